"""Our own kernels in Triton: every CUDA or ROCm GPU, every band, float32 gradients added in place.

triton is imported at the first call, never with this package.
"""

from __future__ import annotations

from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...config import triton_is_interpreted
from ..base import Asked, Gradients, InOrder, Params, Request
from ..score_mods.chosen_keys import ChosenKeys
from ..score_mods.trial import MOST_TRIALS, failures_of
from .blocks import WIDTHS, widest_head
from .distance import why_not

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOWEST_CAPABILITY = (8, 0)


class Triton(InOrder):
    """One softmax over all keys of a query in the forward; probabilities from lse in the backward.

    Sums are float32. Gradients are added to the caller's accumulators, in the order of the tensors. 16-bit inputs are
    multiplied on matrix units, with probabilities and their gradients rounded to the inputs' dtype, as in every flash
    attention; float32 inputs are multiplied in float32 (no tf32). Results are the same from run to run, and a chunk of
    queries gives the bits of the whole sequence. It serves score_mods that add a term of head and distance
    (`distance`), whose tensors' gradients are float32 sums by atomics, and the choice of an indexer (`choice`).
    """

    name = "triton"

    def __init__(self) -> None:
        self._failures = lru_cache(maxsize=MOST_TRIALS)(partial(failures_of, self))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        found, lse = _launch().forward(q, k, v, tiles, params)
        return found if out is None else out.copy_(found), lse

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        sums: Tensor = _launch().delta(dout, out)
        return sums

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor,
        params: Params, into: Gradients, out: Tensor | None = None,
    ) -> None:  # fmt: skip
        _launch().backward(dout, q, k, v, lse, delta, tiles, params, into)

    def unsupported(self, request: Request) -> list[str]:
        reasons = []
        if request.device != "cuda" and not (request.device == "cpu" and triton_is_interpreted()):
            reasons.append(f"needs a CUDA or ROCm GPU, got tensors on {request.device}")
        if find_spec("triton") is None:
            reasons.append("triton is not installed")
        if request.dtype not in DTYPES:
            reasons.append(f"computes in bfloat16, float16 or float32, got {request.dtype}")
        if request.device == "cpu" and request.dtype == torch.bfloat16 and triton_is_interpreted():
            reasons.append("triton's interpreter cannot multiply bfloat16")
        widest = widest_head(request.device, request.dtype.itemsize)
        if max(request.head_dim, request.value_dim) > widest:
            here = f" in {request.dtype}" if widest < WIDTHS[-1] else ""
            got = f"{request.head_dim} and {request.value_dim}"
            reasons.append(f"heads are at most {widest} wide{here} on this device, got {got}")
        if request.device == "cuda" and torch.version.hip is None and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability()
            if capability < LOWEST_CAPABILITY:
                reasons.append(f"needs compute capability 8.0 or later, got {capability[0]}.{capability[1]}")
        if not reasons and request.asked is not None:
            reasons += self._of_function(request, request.asked)
        return reasons

    def _of_function(self, request: Request, asked: Asked) -> tuple[str, ...]:
        mod = asked.function()
        if isinstance(mod.function, ChosenKeys):
            return self._failures(request)
        reason = why_not(mod)
        if reason is not None:
            return (f"of score_mods it takes those that add something by head and distance alone: {reason}",)
        if request.deterministic and any(x.requires_grad for x in mod.captured):
            return ("it adds the gradients of what a score_mod learns in no fixed order",)
        return self._failures(request)


def _launch() -> Any:
    return import_module(".launch", __name__)
