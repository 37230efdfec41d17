"""Builder of the graph of one score: scalars, and reads of leaves at one index each, as FlexAttention allows."""

from __future__ import annotations

import math
import operator
from collections.abc import Container

import torch
from torch import Tensor, fx

from ..score_mods.graph import SCALARS, name_of
from ..score_mods.score_mod import Unfit
from .leaves import Copies, Leaf


def value_of(node: fx.Node) -> Tensor:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise Unfit(f"the score_mod uses {name_of(node)}, which gives no tensor")
    return value


class Build:
    """Builds the graph of one score from the traced nodes that differ between scores."""

    def __init__(self, dtype: torch.dtype, scale: float, softcap: float | None) -> None:
        self.dtype = dtype
        self.learned: Container[fx.Node] = ()
        self.graph = fx.Graph()
        names = ("product", "b", "h", "q_idx", "kv_idx", "query", "key")
        self.inputs = [self.graph.placeholder(name) for name in names]
        call = self.graph.call_function
        score = call(operator.mul, (call(torch.ops.aten._to_copy.default, (self.inputs[0],), {"dtype": dtype}), scale))
        if softcap is not None:
            score = call(operator.mul, (call(torch.tanh, (call(operator.truediv, (score, softcap)),)), softcap))
        self.scalars = [score, *self.inputs[1:SCALARS]]
        self.leaves: list[Leaf] = []
        self.holders: list[fx.Node] = []
        self.known: dict[fx.Node, fx.Node] = {}
        self.rows: dict[fx.Node, tuple[fx.Node, list[fx.Node | None]]] = {}

    def add(self, node: fx.Node, place: int) -> None:
        if place < SCALARS:
            self.known[node] = self.scalars[place]
        elif node.op == "call_function" and node.target is torch.ops.aten.index.Tensor:
            self._read(node)
        elif node.op == "call_function":
            if value_of(node).dim():
                shape = tuple(value_of(node).shape)
                raise Unfit(f"the score_mod makes a vector for one score ({name_of(node)} of {shape})")
            arguments, named = fx.map_arg((node.args, node.kwargs), self._number)
            assert not isinstance(node.target, str)
            self.known[node] = self.graph.call_function(node.target, arguments, named)

    def finished(self, answer: fx.Node, has_gradient: bool) -> fx.GraphModule:
        """Returns the module, with the leaves' placeholders moved behind the others.

        Args:
            has_gradient: the answer depends on the score by differentiable operations.
        """
        number = self._number(answer)
        if not has_gradient:
            # FlexAttention needs some gradient of the score; this one is zero.
            product = self.inputs[0]
            same = self.graph.call_function(operator.eq, (product, product))
            number = self.graph.call_function(torch.where, (same, number, self.scalars[0]))
        self.graph.output(self.graph.call_function(torch.ops.aten._to_copy.default, (number,), {"dtype": self.dtype}))
        last = self.inputs[-1]
        for holder in self.holders:
            last.append(holder)
            last = holder
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule({}, self.graph)

    def _read(self, node: fx.Node) -> None:
        """Handles ``base[i, j]`` or a part of it; the read is added once all dims have an index."""
        base, places = node.args
        assert isinstance(base, fx.Node) and isinstance(places, (list, tuple))
        origin, at = self.rows.get(base, (base, [None] * value_of(base).dim()))
        if origin in self.known or any(isinstance(p, fx.Node) and value_of(p).dim() for p in places):
            raise Unfit("the score_mod reads many places of a tensor for one score")
        at, free = list(at), [dim for dim, place in enumerate(at) if place is None]
        for dim, place in zip(free, places, strict=False):
            at[dim] = place
        if any(isinstance(p, fx.Node) and value_of(p).dtype == torch.bool for p in at):
            raise Unfit("the score_mod reads a tensor by a mask")
        if any(place is None for place in at):
            self.rows[node] = origin, at
            return
        whole = [place for place in at if place is not None]
        fixed = tuple((dim, p) for dim, p in reversed(list(enumerate(whole))) if p not in self.known)
        moving = tuple(self.known[p] for p in whole if p in self.known)
        self.known[node] = self._leaf(origin, fixed, moving)

    def _number(self, node: fx.Node) -> fx.Node:
        """Returns the node of a scalar, of one score or common to all."""
        if node in self.known:
            return self.known[node]
        if node in self.rows or value_of(node).dim():
            raise Unfit(f"the score_mod computes with a whole tensor for one score ({tuple(value_of(node).shape)})")
        return self._leaf(node, (), ())

    def _leaf(self, value: fx.Node, fixed: tuple[tuple[int, fx.Node], ...], at: tuple[fx.Node, ...]) -> fx.Node:
        shape = list(value_of(value).shape)
        for dim, _ in fixed:
            del shape[dim]
        copies = Copies.of(math.prod(shape)) if value in self.learned else None
        holder = self.graph.placeholder(f"leaf_{len(self.leaves)}")
        self.holders.append(holder)
        self.leaves.append(Leaf(value, fixed, copies, tuple(shape), value_of(value).dtype))
        if copies is not None:
            of_query, of_key = (
                self.graph.call_function(torch.ops.aten.bitwise_and.Scalar, (self.inputs[which], count - 1))
                for which, count in ((5, copies.queries), (6, copies.keys))
            )
            at = (of_query, *at, of_key)
        return self.graph.call_function(operator.getitem, (holder, at)) if at else holder
