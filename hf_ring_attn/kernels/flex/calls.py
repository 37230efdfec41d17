"""Calls of torch's FlexAttention: one function compiled for each graph of a score_mod, for tensors of any length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .graph import Graph
from .mask_table import BLOCK, MaskTable

FLEX = "torch.nn.attention.flex_attention"
KEPT = 64
"""Most compiled functions in the cache."""


def _blocks(side: int, stages: int) -> dict[str, Any]:
    """Options for square blocks in both passes, with a pipeline of ``stages`` loads."""
    names = ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
    return {**dict.fromkeys(names, side), "num_stages": stages, "num_warps": 4}


LEVELS: tuple[dict[str, Any], ...] = ({}, _blocks(64, 2), _blocks(64, 1), _blocks(32, 1))
"""Block sizes to try, FlexAttention's own first. Each tensor that a function reads by query and key takes a block of
shared memory per stage; a trial finds the first sizes that fit."""
NO_ROOM = ("out of resource", "No valid triton configs")

Run = Callable[..., tuple[Tensor, Tensor]]


class Calls:
    """Compiled functions.

    Args:
        backend: of torch.compile.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._known: OrderedDict[tuple[Any, ...], Run] = OrderedDict()
        self._level: dict[tuple[Any, ...], int] = {}

    def smaller(self, graph: Graph, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
        """Switches this function to smaller blocks; returns False if there are none."""
        key = graph.text, dtype, head_dim, value_dim
        level = self._level.get(key, 0) + 1
        self._level[key] = min(level, len(LEVELS) - 1)
        return level < len(LEVELS)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, graph: Graph, leaves: Sequence[Tensor], places: MaskTable,
        first_head: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out [B, H, T, Dv] and lse [B, H, T] of q [B, H, T, D], k [B, G, S, D] and v; differentiable."""
        # One function for each property that a compiler specializes on: each is compiled once.
        blocks = places.blocks[1].shape
        widths = graph.text, q.dtype, q.shape[3], v.shape[3]
        level = self._level.get(widths, 0)
        kind = (
            *widths, level, torch.is_grad_enabled(), q.shape[2] == k.shape[2], q.shape[0] == 1, blocks[2] == 1,
            blocks[3] == 1, q.shape[1], k.shape[1],
        )  # fmt: skip
        if kind not in self._known:
            function = _function(graph, LEVELS[level])
            self._known[kind] = torch.compile(function, dynamic=True, fullgraph=True, backend=self._backend)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(kind)
        for leaf, x in zip(graph.leaves, leaves, strict=True):
            if leaf.copies is not None:
                for dim in range(x.dim()):
                    torch._dynamo.mark_static(x, dim)
        heads = torch.arange(first_head, first_head + q.shape[1], dtype=torch.int32, device=q.device)
        tables = places.rows, places.queries, places.keys, places.low, places.high, heads
        return self._known[kind](q, k, v, tables, tuple(leaves), block_mask(places))


def _function(graph: Graph, blocks: dict[str, Any]) -> Run:
    flex = import_module(FLEX)
    attention, aux, index, score = flex.flex_attention, flex.AuxRequest(lse=True), graph.index, graph.score
    options = {**kernel_options(), **blocks}

    def run(
        q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, ...], leaves: tuple[Tensor, ...], mask: Any
    ) -> tuple[Tensor, Tensor]:
        rows, queries, keys, low, high, heads = tables

        def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # An invisible key is replaced by a visible one: the function may be undefined at others.
            key = torch.minimum(torch.maximum(keys[b, j], low[b, i]), high[b, i])
            at = (rows[b, i], heads[h], queries[b, i], key)
            changed: Tensor = score(s, *[x.to(index) for x in at], i, j, *leaves)
            return changed

        out, more = attention(
            q, k, v, score_mod=score_mod, block_mask=mask, scale=1.0, enable_gqa=True, kernel_options=options,
            return_aux=aux,
        )  # fmt: skip
        return out, more.lse

    # A copy of the code for each function: the compiler limits how often it compiles one code object.
    return FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)


@cache
def kernel_options() -> dict[str, Any]:
    """Options: no other kernel for few queries, and float32 products in float32 whatever the process has set."""
    flex = import_module(FLEX)
    options: dict[str, Any] = {"FLOAT32_PRECISION": "'ieee'"}
    if "BACKEND" in flex.FlexKernelOptions.__annotations__:
        return {**options, "BACKEND": "TRITON"}
    return {**options, "FORCE_USE_FLEX_ATTENTION": True}


def block_mask(places: MaskTable) -> Any:
    """FlexAttention's own object for a mask, cached in its table."""
    if places.mask is None:
        first, last, keys = places.first, places.last, places.keys

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            key = keys[b, j]
            return (first[b, i] <= key) & (key <= last[b, i])

        with torch.inference_mode(False), torch.no_grad():
            mask = import_module(FLEX).BlockMask.from_kv_blocks(
                *places.blocks, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(first.shape[1], keys.shape[1])
            )
        object.__setattr__(places, "mask", mask)
    return places.mask
