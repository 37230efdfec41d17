"""Conversion of a score_mod to a graph that FlexAttention can compile, with captured tensors as inputs.

The function is traced on one score. Operations that need no score, head or position (such as a sigmoid of a whole
parameter) run before, in float64 with ordinary autograd. The rest has scalars and `Leaf`s: tensors that are read at one
index per score, whose gradients FlexAttention sums with atomics. Each read has its own leaf, since FlexAttention allows
one read per tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..score_mods.graph import SCALARS, is_floating, name_of, of_scores_in, reached_from, traced_from
from ..score_mods.score_mod import ScoreMod, Unfit
from .build import Build
from .leaves import Leaf

SAFE = {
    "add", "sub", "rsub", "neg", "abs", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "where", "remainder",
    "fmod", "floor_divide", "div", "index", "_to_copy", "alias", "detach", "bitwise_and", "clone", "lift_fresh_copy",
    "lift_fresh",
}  # fmt: skip
"""Operations whose results fit 32 bits, given positions, heads or rows."""


@dataclass(frozen=True, eq=False)
class Graph:
    """See the module.

    Args:
        score: ``score(product, b, h, q_idx, kv_idx, query, key, *leaves)`` of a product of a query and a key that is
            not scaled yet; ``query`` and ``key`` choose the copy. Scale and softcap are constants in its code: a
            compiler would make variables of numbers outside.
        leaves: described in the order of `values`.
        index: dtype in which rows, heads and positions must be given.
        text: equal for functions that compile to the same code.
        before, constants: the nodes that compute the leaves, in order, and their constant inputs.
    """

    score: fx.GraphModule
    leaves: tuple[Leaf, ...]
    index: torch.dtype
    text: str
    before: tuple[fx.Node, ...]
    constants: dict[fx.Node, Tensor]

    @classmethod
    def of(cls, mod: ScoreMod, dtype: torch.dtype, scale: float, softcap: float | None) -> Graph:
        """Builds the graph of a function, once per call.

        Args:
            dtype: of its scores.

        Raises:
            Unfit: with the reason.
        """
        return mod.once(f"flex {dtype} {scale} {softcap}", lambda: _graph(mod, dtype, scale, softcap))

    def values(self, captured: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Computes the leaves from the captured tensors in float64; differentiable."""
        known: dict[fx.Node, Any] = dict(self.constants)
        inputs = iter(captured)

        def given(node: Any) -> Any:
            return fx.map_arg(node, lambda one: known[one])

        for node in self.before:
            if node.op == "placeholder":
                known[node] = next(inputs)
            elif node.op == "call_function":
                known[node] = node.target(*given(node.args), **given(node.kwargs))  # type: ignore[operator]
        found = []
        for leaf in self.leaves:
            value: Tensor = known[leaf.value]
            for dim, place in leaf.picked:
                value = value.select(dim, int(known[place]))
            found.append(value.to(device))
        return found


# ---- from a function to its graph ---------------------------------------------------------------------------------


def _graph(mod: ScoreMod, dtype: torch.dtype, scale: float, softcap: float | None) -> Graph:
    for index in (torch.int32, torch.int64):
        traced = traced_from(mod, dtype, index)
        of_scores = of_scores_in(list(traced.graph.nodes))
        if index == torch.int64 or not any(_may_overflow(node) for node in of_scores):
            break
    return _split(mod, traced, of_scores, index, Build(dtype, scale, softcap))


def _may_overflow(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype != torch.int32:
        return False
    return name_of(node) not in SAFE


def _split(
    mod: ScoreMod, traced: fx.GraphModule, of_scores: dict[fx.Node, None], index: torch.dtype, build: Build
) -> Graph:
    nodes = list(traced.graph.nodes)
    before = tuple(node for node in nodes[SCALARS:] if node not in of_scores and node.op != "output")
    constants = {node: _constant(traced, node) for node in before if node.op == "get_attr"}
    for node, value in constants.items():
        node.meta["val"] = value
    inputs = zip((node for node in before if node.op == "placeholder"), mod.captured, strict=True)
    trained = [node for node, value in inputs if value.requires_grad]
    build.learned = reached_from(trained, before, lambda node: is_floating(node) and name_of(node) != "detach")
    for place, node in enumerate(of_scores):
        build.add(node, place)
    answer = nodes[-1].args[0]
    assert isinstance(answer, fx.Node), "one score comes out"
    if answer not in of_scores:
        raise Unfit("the score_mod gives all scores one value")
    module = build.finished(answer, answer in reached_from(nodes[:1], of_scores, is_floating))
    # Compiled in: the shape of learned tensors, but only the number of dims of others, such as a table over the row.
    shapes = [(leaf.copies, leaf.shape if leaf.copies else len(leaf.shape), leaf.dtype) for leaf in build.leaves]
    text = f"{module.code}\n{shapes}\n{index}"
    return Graph(module, tuple(build.leaves), index, text, before, constants)


def _constant(traced: fx.GraphModule, node: fx.Node) -> Tensor:
    value = operator.attrgetter(str(node.target))(traced)
    assert isinstance(value, Tensor)
    return value
