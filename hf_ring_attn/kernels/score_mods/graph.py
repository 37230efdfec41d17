"""The torch operations of a score_mod as a graph: the function is run once, on one score."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from ...errors import BadScoreMod
from .score_mod import ScoreMod, in_fixed_order, run_one

SCALARS = 5
"""score, b, h, q_idx, kv_idx: the first nodes of a graph, before the captured tensors."""


class Unfit(Exception):
    """A kernel cannot compute a function; with the reason."""


def name_of(node: fx.Node) -> str:
    """The name of the operation that a node calls, such as "add"."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(node.target)


def traced_from(mod: ScoreMod, dtype: torch.dtype, index: torch.dtype) -> fx.GraphModule:
    """Traces the function as a graph, with scores of ``dtype`` and indices of ``index``.

    Raises:
        Unfit: it cannot be run on one score, or not be written down.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and most processes need none of it

    values = [x.detach().to(dtype, copy=True) for x in mod.captured]
    device = mod.device

    def one(*given: Tensor) -> Tensor:
        return run_one(mod, given[:SCALARS], given[SCALARS:])

    numbers = [torch.zeros((), dtype=index, device=device) for _ in range(SCALARS - 1)]
    try:
        with in_fixed_order(mod.deterministic), torch.inference_mode(False), torch.no_grad():
            return make_fx(one)(torch.zeros((), dtype=dtype, device=device), *numbers, *values)
    except BadScoreMod:
        raise
    except Exception as error:  # any failure here is a reason to take another kernel
        raise Unfit(f"the score_mod cannot be written down as a graph ({type(error).__name__}: {error})") from error


_KEY = "graph"


def graph_of(mod: ScoreMod) -> fx.GraphModule:
    """The function's graph in float64, cached in it for as long as its call lasts.

    Raises:
        Unfit: as `traced_from`.
    """
    if _KEY not in mod.kept:
        try:
            mod.kept[_KEY] = traced_from(mod, torch.float64, torch.int64)
        except Unfit as error:
            mod.kept[_KEY] = error
    known = mod.kept[_KEY]
    if isinstance(known, Unfit):
        raise known
    graph: fx.GraphModule = known
    return graph


def text_of(mod: ScoreMod) -> str:
    """A text that differs for functions that compute something else, whatever their tensors hold."""
    try:
        code = graph_of(mod).code
    except Unfit as error:
        code = str(error)
    # Of what does not learn, such as a table over the row, only how many dims it has: rows of any length are one.
    held = [(tuple(x.shape) if x.requires_grad else x.dim(), str(x.dtype), x.requires_grad) for x in mod.captured]
    return f"{code}{held}"


def of_scores_in(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes that differ from score to score."""
    found: dict[fx.Node, None] = {}
    for place, node in enumerate(nodes):
        if place < SCALARS or any(x in found for x in node.all_input_nodes):
            found[node] = None
    return list(found)
