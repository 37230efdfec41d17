"""What a score_mod adds to scores, where that depends on nothing but the head and kv_idx - q_idx: ALiBi, T5's bias.

That it depends on nothing else is read from its graph. Then the function itself, run once for each distance that some
pair has, makes a table, which the kernels read; and autograd takes the table's gradient back to what the function
captures. So a kernel knows distances and no function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..score_graph import SCALARS, Unfit, graph_of, name_of, of_scores_in
from ..score_mod import Indices, Pull, ScoreMod
from .places import lowest_distance
from .tables import places_on

LOG2E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class Bias:
    """What is added to the scores of one attention.

    Args:
        table: [H, L] float32, by query head and kv_idx - q_idx - lowest; in powers of two.
        lowest: the smallest distance of the table.
        q_places, k_places: [B, T], [B, S] int32, where in the row each token is.
        learned: [H, L] float32, zeros, for the gradient of what is added (natural, not in powers of two); None where
            nothing is learned.
    """

    table: Tensor
    lowest: int
    q_places: Tensor
    k_places: Tensor
    learned: Tensor | None = None
    pull: Pull | None = None

    @classmethod
    def of(cls, mod: ScoreMod, q: Tensor, k: Tensor, tiles: Tensor, into: dict[str, Tensor] | None = None) -> Bias:
        """The function's, which `why_not` has no reason against, for the pairs of these tiles.

        Args:
            into: where `finish` adds the gradients of captured tensors, named as by `ScoreMod.new_gradients`.
        """
        q_places, k_places, distances = places_on(tiles, q.device, q.shape[0], q.shape[1], k.shape[1])
        lowest = lowest_distance(tiles)
        numbers = torch.arange(q.shape[2], device=q.device)
        at = Indices(
            numbers[:1] * 0, numbers + mod.first_head, (-distances).clamp(min=0)[None], distances.clamp(min=0)[None]
        )
        scores = torch.zeros(1, q.shape[2], 1, len(distances), dtype=torch.float64, device=q.device)
        learns = into is not None and any(x.requires_grad for x in mod.values)
        if not learns or into is None:
            return cls(_table(mod(scores, at)), lowest, q_places, k_places)
        with torch.inference_mode(False):
            after, pull = mod.differentiable(scores, at, into)
        return cls(
            _table(after), lowest, q_places, k_places, torch.zeros_like(after[0, :, 0], dtype=torch.float32), pull
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the kernels take them."""
        return self.table, self.q_places, self.k_places, self.lowest, self.table.shape[1]

    def finish(self) -> None:
        """Takes ``learned`` back to the captured tensors."""
        if self.learned is not None and self.pull is not None:
            with torch.inference_mode(False):
                self.pull(self.learned[None, :, None].double())


def _table(added: Tensor) -> Tensor:
    return (added[0, :, 0] * LOG2E).float().contiguous()


# ---- which functions depend on the distance alone -----------------------------------------------------------------

Node = fx.Node


def why_not(mod: ScoreMod) -> str | None:
    """Why the function's graph does not prove that it adds something by head and distance alone; None if it does."""
    try:
        nodes = list(graph_of(mod).graph.nodes)
    except Unfit as error:
        return str(error)
    moving = dict.fromkeys(of_scores_in(nodes))
    score, _, head, query, key = nodes[:SCALARS]
    answer, parts = nodes[-1].args[0], []
    while answer is not score:  # score + a - b ..., in any order
        term, rest = _split(answer, score, moving)
        if term is None:
            return "it does more than to add something to a score"
        answer = term
        parts.append(rest)
    for part in parts:
        if not _by_distance(part, head, {query, key}, moving):
            return "what it adds depends on more than the head and kv_idx - q_idx"
    return None


def _split(node: Any, score: Node, moving: dict[Node, None]) -> tuple[Any, Any]:
    """The term of a sum that the score is in, and the other; None and None of anything else, also of x - score."""
    if isinstance(node, Node) and name_of(node) in ("add", "sub") and not node.kwargs:
        orders = [node.args, node.args[::-1]] if name_of(node) == "add" else [node.args]
        for term, rest in orders:
            if _depends(term, score, moving) and not _depends(rest, score, moving):
                return term, rest
    return None, None


def _depends(node: Any, on: Node, moving: dict[Node, None]) -> bool:
    return on in _behind(node, set(), moving)


def _by_distance(node: Any, head: Node, ends: set[Node], moving: dict[Node, None]) -> bool:
    """Whether indices come into this by the head, and by the difference of one end and the other, alone."""
    distances = {x for x in moving if name_of(x) == "sub" and not x.kwargs and set(x.args) == ends}
    return all(x.op != "placeholder" or x is head for x in _behind(node, distances, moving))


def _behind(node: Any, ends: set[Node], moving: dict[Node, None]) -> set[Node]:
    """What a value is made of, of nodes that differ from score to score; what is behind ``ends`` is left out."""
    found: set[Node] = set()
    left = [node]
    while left:
        one = left.pop()
        if isinstance(one, Node) and one in moving and one not in found:
            found.add(one)
            left += [] if one in ends else one.all_input_nodes
    return found
