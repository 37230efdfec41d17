"""Tables for score_mods that add a term of the head and kv_idx - q_idx alone, such as ALiBi and T5's bias.

The function's graph shows that it depends on nothing else. The function runs once per distance and fills a table, which
the kernels read. Autograd takes the table's gradient back to the captured tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..score_mods.graph import SCALARS, graph_of, name_of, of_scores_in
from ..score_mods.score_mod import Indices, ScoreMod, Unfit
from .positions import lowest_distance
from .tables import places_on

TABLE_AT_ONCE = 2**22
"""Most numbers of a table that the function computes at a time; this takes several float64 copies."""


@dataclass(frozen=True, eq=False)
class Bias:
    """The table that is added to the scores of one attention.

    Args:
        table: [H, L] float32, by query head and kv_idx - q_idx - lowest.
        lowest: the smallest distance of the table.
        q_places, k_places: [B, T], [B, S] int32, the position of each token in the row.
        learned: [H, L] float32, zeros, for the gradient of the table; None if no tensor needs it.
    """

    mod: ScoreMod
    distances: Tensor
    table: Tensor
    lowest: int
    q_places: Tensor
    k_places: Tensor
    learned: Tensor | None
    into: dict[str, Tensor]

    @classmethod
    def of(cls, mod: ScoreMod, q: Tensor, k: Tensor, tiles: Tensor, into: dict[str, Tensor] | None = None) -> Bias:
        """Builds the table of a function that passes `why_not`, for the pairs of these tiles.

        Args:
            into: gradients of captured tensors, by the names of `ScoreMod.new_gradients`; `finish` adds to them.
        """
        q_places, k_places, distances = places_on(tiles, q.device, q.shape[0], q.shape[1], k.shape[1])
        table = torch.empty(q.shape[2], len(distances), dtype=torch.float32, device=q.device)
        for heads, at in _pieces(mod, distances, q.shape[2]):
            table[heads] = mod(_zeros(at), at)[0, :, 0].float()
        learns = into is not None and any(x.requires_grad for x in mod.values)
        learned = torch.zeros_like(table) if learns else None
        return cls(mod, distances, table, lowest_distance(tiles), q_places, k_places, learned, into or {})

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the kernels."""
        return self.table, self.q_places, self.k_places, self.lowest, self.table.shape[1]

    def finish(self) -> None:
        """Backpropagates ``learned`` to the captured tensors: the function runs again, under autograd."""
        if self.learned is None:
            return
        with torch.inference_mode(False):
            for heads, at in _pieces(self.mod, self.distances, len(self.table)):
                _, pull = self.mod.differentiable(_zeros(at), at, self.into)
                pull(self.learned[heads][None, :, None].double())


def _pieces(mod: ScoreMod, distances: Tensor, heads: int) -> Iterator[tuple[slice, Indices]]:
    """Yields some heads at a time, with a pair of indices for each distance."""
    queries, keys = (-distances).clamp(min=0)[None], distances.clamp(min=0)[None]
    step = max(1, TABLE_AT_ONCE // len(distances))
    row = torch.zeros(1, dtype=torch.int64, device=distances.device)
    for first in range(0, heads, step):
        last = min(first + step, heads)
        numbers = torch.arange(mod.first_head + first, mod.first_head + last, device=distances.device)
        yield slice(first, last), Indices(row, numbers, queries, keys)


def _zeros(at: Indices) -> Tensor:
    return torch.zeros(1, len(at.heads), *at.queries.shape, dtype=torch.float64, device=at.queries.device)


# ---- which functions depend on the distance alone -----------------------------------------------------------------

Node = fx.Node
ADD, SUB = ({getattr(getattr(torch.ops.aten, name), kind) for kind in ("Tensor", "Scalar")} for name in ("add", "sub"))
OF_DISTANCE = {getattr(torch.ops.aten, name).Tensor for name in ("sub", "lt", "le", "gt", "ge", "eq", "ne")}
"""Operations on q_idx and kv_idx that depend on their difference, or its sign, alone."""


def why_not(mod: ScoreMod) -> str | None:
    """Returns the reason why a function may depend on more than head and distance; None if it does not."""
    try:
        nodes = list(graph_of(mod).graph.nodes)
    except Unfit as error:
        return str(error)
    moving = of_scores_in(nodes)
    writes = [name_of(node) for node in nodes if _writes(node)]
    if writes:
        return f"it writes into a tensor ({writes[0]}), which its graph does not follow"
    score, _, head, query, key = nodes[:SCALARS]
    answer, parts = nodes[-1].args[0], []
    while answer is not score:  # score + a - b ..., in any order
        term, rest = _split(answer, score, moving)
        if term is None:
            return f"it does more than to add something to a score ({answer})"
        answer = term
        parts.append(rest)
    for part in parts:
        if not _by_distance(part, head, {query, key}, moving):
            return "what it adds depends on more than h and q_idx - kv_idx, which must stand in it as that difference"
    return None if _passes_gradients_on(mod) else "the gradient of a score is not that of what it becomes"


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _passes_gradients_on(mod: ScoreMod) -> bool:
    """Returns True if the gradient of a score passes unchanged; a graph does not show gradients that are switched off
    or made by hand."""
    zero = torch.zeros(1, dtype=torch.int64, device=mod.device)
    at = Indices(zero, zero, zero[None], zero[None])
    with torch.inference_mode(False):
        still = mod.with_values(mod.captured, [x.requires_grad for x in mod.captured])
        _, pull = still.differentiable(_zeros(at), at, {})
        return bool((pull(torch.ones_like(_zeros(at))) == 1).all())


def _split(node: Any, score: Node, moving: dict[Node, None]) -> tuple[Any, Any]:
    """Splits a sum into the term with the score and the other; None and None for anything else, also x - score."""
    if isinstance(node, Node) and node.target in ADD | SUB and not node.kwargs:
        orders = [node.args, node.args[::-1]] if node.target in ADD else [node.args]
        for term, rest in orders:
            if _depends(term, score, moving) and not _depends(rest, score, moving):
                return term, rest
    return None, None


def _depends(node: Any, on: Node, moving: dict[Node, None]) -> bool:
    return on in _behind(node, set(), moving)


def _by_distance(node: Any, head: Node, ends: set[Node], moving: dict[Node, None]) -> bool:
    """Returns True if a node depends only on the head and the difference of both ends."""
    distances = {x for x in moving if x.target in OF_DISTANCE and not x.kwargs and set(x.args) == ends}
    return all(x.op != "placeholder" or x is head for x in _behind(node, distances, moving))


def _behind(node: Any, ends: set[Node], moving: dict[Node, None]) -> set[Node]:
    """Collects the nodes that a value depends on and that differ between scores, without those behind ``ends``."""
    found: set[Node] = set()
    left = [node]
    while left:
        one = left.pop()
        if isinstance(one, Node) and one in moving and one not in found:
            found.add(one)
            left += [] if one in ends else one.all_input_nodes
    return found
