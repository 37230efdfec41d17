"""Tracing of a score_mod on one score, to a graph of torch operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, fx

from ...errors import BadScoreMod
from .score_mod import ScoreMod, Unfit, in_fixed_order, run_one

SCALARS = 5
"""score, b, h, q_idx, kv_idx: the first nodes of a graph, before the captured tensors."""


def name_of(node: fx.Node) -> str:
    """Returns the name of the operation that a node calls, such as "add"."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(node.target)


def traced_from(mod: ScoreMod, dtype: torch.dtype, index: torch.dtype) -> fx.GraphModule:
    """Traces the function as a graph, with scores of ``dtype`` and indices of ``index``.

    Raises:
        Unfit: it fails on one score, or cannot be traced.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and most processes need none of it

    values = [x.detach().to(dtype, copy=True) for x in mod.captured]
    device = mod.device

    def one(*given: Tensor) -> Tensor:
        return run_one(mod, given[:SCALARS], given[SCALARS:])

    numbers = [torch.zeros((), dtype=index, device=device) for _ in range(SCALARS - 1)]
    try:
        with in_fixed_order(mod.deterministic), torch.inference_mode(False), torch.no_grad():
            # Without a table, torch 2.14 and later write detach as alias: a gradient would flow where none does.
            trace = make_fx(one, decomposition_table={})
            return trace(torch.zeros((), dtype=dtype, device=device), *numbers, *values)
    except BadScoreMod:
        raise
    except Exception as error:  # any failure here is a reason to take another kernel
        raise Unfit(f"the score_mod cannot be written down as a graph ({type(error).__name__}: {error})") from error


def graph_of(mod: ScoreMod) -> fx.GraphModule:
    """Traces the function in float64, once per call. Raises as `traced_from`."""
    return mod.once("graph", lambda: traced_from(mod, torch.float64, torch.int64))


def text_of(mod: ScoreMod) -> str:
    """Returns a text that is equal only for functions that compute the same, whatever their tensors hold."""
    if mod.text:
        return mod.text
    try:
        code = graph_of(mod).code
    except Unfit as error:
        code = str(error)
    # The shape of learned tensors, but only the number of dims of others: rows of any length have one text.
    held = [(tuple(x.shape) if x.requires_grad else x.dim(), str(x.dtype), x.requires_grad) for x in mod.captured]
    return f"{code}{held}"


def reached_from(
    start: Iterable[fx.Node], nodes: Iterable[fx.Node], passes: Callable[[fx.Node], bool] = lambda _: True
) -> dict[fx.Node, None]:
    """The nodes of ``start``, and those of ``nodes`` that depend on them through nodes that ``passes``; in order."""
    found = dict.fromkeys(start)
    for node in nodes:
        if any(x in found for x in node.all_input_nodes) and passes(node):
            found[node] = None
    return found


def of_scores_in(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The nodes that differ between scores, in order."""
    return reached_from(nodes[:SCALARS], nodes[SCALARS:])


def is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
