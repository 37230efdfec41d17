"""FlexAttention, torch's own, for attention with a score_mod on a GPU.

Both passes call FlexAttention over the given keys. Its backward normalizes by the log-sum-exp of these keys alone. To
get the gradients of the whole row's softmax it is given other gradients of its outputs: with w = exp(lse of these keys
- lse of the row), w * dout for out, and rowsum(w * dout * (out of these keys - out of the row)) for lse. So each
contribution to dq, dk and dv is rounded to the inputs' dtype twice (w * dout, and FlexAttention's result) before it is
added in float32. Gradients of captured tensors are float32 sums by atomics, in no fixed order, added in float64 here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...dtypes import HALVES, accumulate_dtype
from ..base import Gradients, InOrder, Params, Request, products_in_place, with_sinks
from ..score_mods.score_mod import ScoreMod, Unfit
from ..score_mods.trial import MOST_TRIALS, failures_of
from .calls import NO_ROOM, Calls
from .graph import Graph
from .leaves import spread, sum_copies
from .mask_table import MaskTable

SMALLEST_HEAD, LARGEST_HEAD = 16, 256
TESTED = ("2.11.", "2.12.", "2.13.")


class Flex(InOrder):
    """See the module.

    Args:
        backend: of torch.compile; another than "inductor" serves CPU tensors, for tests.
        tried: try each function on a small attention before it is served.
    """

    name = "flex"
    rounds_gradients = True

    def __init__(self, backend: str = "inductor", tried: bool = True) -> None:
        self._calls = Calls(backend)
        self._on_gpu, self._tried = backend == "inductor", tried
        self._reasons = lru_cache(maxsize=MOST_TRIALS)(self._why_not)
        self._places: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, _ = q.shape
        mod, dtype = _mod(params), accumulate_dtype(q.dtype)
        out = q.new_empty(batch, tokens, heads, v.shape[3]) if out is None else out
        places = self._places_of(tiles, q, k)
        if places is None:
            out.zero_()
            lse = q.new_full((batch, heads, tokens), -torch.inf, dtype=dtype)
        else:
            graph = Graph.of(mod, dtype, params.scale, params.softcap)
            with torch.no_grad():
                leaves = [
                    spread(x, leaf.copies, dtype).detach()
                    for leaf, x in zip(graph.leaves, graph.values(mod.values, q.device), strict=True)
                ]
                found, lse = self._calls(
                    _heads_first(q), _heads_first(k), _heads_first(v), graph, leaves, places, mod.first_head
                )
            out.copy_(found.transpose(1, 2))
        return out, with_sinks(out, lse.transpose(1, 2), params.sinks).transpose(1, 2).contiguous()

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return products_in_place(dout, out)  # the backward needs out itself

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor,
        params: Params, into: Gradients, out: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert out is not None, "the gradient of a tile's log-sum-exp is made of out"
        places = self._places_of(tiles, q, k)
        if places is None:
            return
        mod, dtype = _mod(params), accumulate_dtype(q.dtype)
        graph = Graph.of(mod, dtype, params.scale, params.softcap)
        with torch.inference_mode(False), torch.enable_grad():
            values = graph.values(mod.values, q.device)
            leaves = [spread(x, leaf.copies, dtype) for leaf, x in zip(graph.leaves, values, strict=True)]
            inputs = [_heads_first(x).requires_grad_() for x in (q, k, v)]
            of_tile, lse_of_tile = self._calls(inputs[0], inputs[1], inputs[2], graph, leaves, places, mod.first_head)
        with torch.no_grad():
            share = torch.exp(lse_of_tile - lse).masked_fill(lse_of_tile == -torch.inf, 0.0)
            d_out = (dout.transpose(1, 2) * share[..., None]).to(q.dtype).contiguous()
            d_lse = torch.einsum("bhtd,bhtd->bht", d_out.to(dtype), of_tile.to(dtype) - out.transpose(1, 2).to(dtype))
        wanted = [*inputs, *(x for x in leaves if x.requires_grad)]
        found = torch.autograd.grad((of_tile, lse_of_tile), wanted, (d_out, d_lse), allow_unused=True)
        for total, part in zip((into.dq, into.dk, into.dv), found, strict=False):
            if part is not None:  # nothing flows where the function does not use the score
                total.add_(part.transpose(1, 2))
        _add_captured(mod, graph, values, found[3:], into.extra)

    def unsupported(self, request: Request) -> list[str]:
        reasons = []
        if self._on_gpu and request.device != "cuda":
            reasons.append(f"needs a GPU, got tensors on {request.device}")
        if self._on_gpu and request.dtype not in (*HALVES, torch.float32):
            reasons.append(f"computes in bfloat16, float16 or float32, got {request.dtype}")
        if not request.score_mod:
            reasons.append("it computes only attention with a score_mod")
        if request.deterministic:
            reasons.append("it adds the gradients of what a score_mod uses in no fixed order")
        if request.holes:
            reasons.append("a document's keys must be one run, and here others or hidden keys are between them")
        for what, width in (("keys", request.head_dim), ("values", request.value_dim)):
            if self._on_gpu and not SMALLEST_HEAD <= width <= LARGEST_HEAD:
                reasons.append(f"heads of {what} are {SMALLEST_HEAD} to {LARGEST_HEAD} wide, got {width}")
        if self._on_gpu and not torch.__version__.startswith(TESTED):
            reasons.append(f"torch {torch.__version__} is not known here ({', '.join(TESTED)}x are)")
        if not reasons and self._on_gpu and not torch.cuda.is_available():
            reasons.append("needs a GPU, and torch finds none")
        if not reasons and request.asked is not None:
            reasons += self._reasons(request)
        return reasons

    def text(self, mod: ScoreMod, dtype: torch.dtype, scale: float, softcap: float | None) -> str:
        """Returns a text that is equal only for functions that compile to the same code."""
        try:
            return Graph.of(mod, accumulate_dtype(dtype), scale, softcap).text
        except Unfit as error:
            return str(error)

    def _why_not(self, request: Request) -> tuple[str, ...]:
        asked = request.asked
        assert asked is not None
        try:
            graph = Graph.of(asked.function(), accumulate_dtype(request.dtype), asked.scale, asked.softcap)
        except Unfit as error:
            return (str(error),)
        while self._tried:
            reasons = failures_of(self, request)
            no_room = any(text in reason for text in NO_ROOM for reason in reasons)
            if not no_room or not self._calls.smaller(graph, request.dtype, request.head_dim, request.value_dim):
                return reasons
        return ()

    def _places_of(self, tiles: Tensor, q: Tensor, k: Tensor) -> MaskTable | None:
        by_shape: dict[Any, MaskTable | None] = self._places.setdefault(tiles, {})
        key = q.shape[0], q.shape[1], k.shape[1], q.device
        if key not in by_shape:
            by_shape[key] = MaskTable.of(tiles, *key)
        return by_shape[key]


def _mod(params: Params) -> ScoreMod:
    assert params.score_mod is not None, "unsupported() should have refused it"
    return params.score_mod


def _heads_first(x: Tensor) -> Tensor:
    """Copies to contiguous [B, heads, T, width]: other strides would be compiled again."""
    return x.detach().transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _add_captured(
    mod: ScoreMod, graph: Graph, values: list[Tensor], found: tuple[Tensor | None, ...], into: dict[str, Tensor]
) -> None:
    """Adds the gradients of captured tensors, computed from those of the leaves."""
    learned = [(x, leaf.copies) for x, leaf in zip(values, graph.leaves, strict=True) if leaf.copies is not None]
    pairs = [
        (x, sum_copies(part).to(x.dtype))
        for (x, copies), part in zip(learned, found, strict=True)
        if part is not None and x.requires_grad
    ]
    mod.add_gradients(into, [x for x, _ in pairs], [part for _, part in pairs])
