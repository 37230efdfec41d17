"""A small attention with the user's own score_mod, which a kernel must get right before it serves.

What a graph cannot tell (a gradient that a function makes itself, a switch of autograd inside it, a compiler's own
limits) shows here: values and gradients are compared with those of the reference, on the GPU at hand. What this
compiles serves the real attention too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..base import Asked, Gradients, Kernel, Params, Part, Request, accumulate_dtype
from ..reference import Reference
from .score_mod import PART, ScoreMod

FAR = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-3, torch.float64: 1e-9}
"""A relative error that only another attention has."""
LEARNED, NOISE, FAULT = 3, 5, 0.25
"""A learned tensor's gradient sums terms of both signs over all tokens, so that in 16 bits rounding may be much of what
is left: it may be three times as far off as the rest, or five times as far as the reference's from the same inputs, and
never as far as a fault."""


KEPT = 64


class Trials:
    """The results of trials. Equal requests are of functions of the same code and graph, which need one trial."""

    def __init__(self) -> None:
        self._found: dict[Request, tuple[str, ...]] = {}

    def reasons(self, request: Request, trial: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """Runs ``trial``, or returns what it gave for an equal request."""
        if request not in self._found:
            self._found[request] = trial()
            while len(self._found) > KEPT:
                del self._found[next(iter(self._found))]
        return self._found[request]


def fails(kernel: Kernel, request: Request, asked: Asked, mod: ScoreMod) -> tuple[str, ...]:
    """Lists what the kernel gets wrong with this function, in words."""
    device = mod.device or torch.device("cpu")
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        return tuple(_failures(kernel, request, asked, mod, device))


def _failures(kernel: Kernel, request: Request, asked: Asked, mod: ScoreMod, device: torch.device) -> list[str]:
    dtype, part = request.dtype, mod.kept[PART]()
    if not len(part.forward):
        return ["nothing is seen in the first rows, so there is nothing to try this score_mod on"]
    generator = torch.Generator().manual_seed(0)
    tensors = _inputs(request, part, device, generator)
    # Beside sinks with about as much mass as the keys, what a function adds to all keys of a query matters too. A
    # softmax alone does not see it: its gradient would be what roundings leave.
    sinks = torch.randn(request.heads, generator=generator, dtype=torch.float32, device="cpu").to(device)
    sinks += math.log(part.keys)
    params = Params(asked.scale, asked.softcap, sinks)
    still = mod.with_values(mod.captured, [x.requires_grad for x in mod.captured])
    for function in (_moved(mod, generator), still):  # as the values are, some gradients may be zero
        tried = replace(params, score_mod=function)
        want = _answer(Reference(), _wide(tensors), part, tried, at_once=True)
        if all(x.isfinite().all() for name, x in want.items() if name != "lse"):
            break
    try:
        got = _answer(kernel, tensors, part, tried)
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except Exception as error:  # noqa: BLE001  # a compiler may fail in any way; each is a reason
        return [f"a small attention with this score_mod failed: {type(error).__name__}: {error}"]
    errors = {name: _error(got[name], want[name]) for name in want}
    rounded = _answer(Reference(), tensors, part, tried, at_once=True)
    far = dict.fromkeys(want, FAR[dtype])
    for name in function.new_gradients():
        far[name] = min(max(LEARNED * FAR[dtype], NOISE * _error(rounded[name], want[name])), FAULT)
    wrong = [f"{name} by {error:.1%}" for name, error in errors.items() if not error < far[name]]
    return [f"a small attention with this score_mod came out wrong here: {', '.join(wrong)}"] if wrong else []


def _inputs(request: Request, part: Part, device: torch.device, generator: torch.Generator) -> list[Tensor]:
    """q, k, v and dout, random."""
    queries, keys = (part.queries, request.heads), (part.keys, request.kv_heads)
    widths = request.head_dim, request.head_dim, request.value_dim, request.value_dim
    return [
        torch.randn(part.rows, *shape, width, generator=generator, dtype=torch.float32, device="cpu").to(
            device, request.dtype
        )
        for shape, width in zip((queries, keys, keys, queries), widths, strict=True)
    ]


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    """In the accumulators' dtype."""
    return [x.to(accumulate_dtype(x.dtype)) for x in tensors]


def _moved(mod: ScoreMod, generator: torch.Generator) -> ScoreMod:
    """With values a little beside its own."""
    values = []
    for x in mod.captured:
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(x.device)
        values.append(x.detach().double() + 0.1 * noise)
    return mod.with_values(values, [x.requires_grad for x in mod.captured])


def _answer(
    kernel: Kernel, tensors: list[Tensor], part: Part, params: Params, at_once: bool = False
) -> dict[str, Tensor]:
    """``at_once``: all heads and keys; else, as in a ring, the backward gets some heads and some keys at a time."""
    q, k, v, dout = tensors
    mod = params.score_mod
    assert mod is not None
    out, lse = kernel.forward(q, k, v, part.forward, params)
    delta = kernel.delta(dout, out)
    dq, dk, dv = (kernel.new_gradient(x) for x in (q, k, v))
    extra = mod.new_gradients()
    groups = k.shape[2]
    step = groups if at_once else (groups + 1) // 2  # as in the lanes of a ring
    pieces = ((0, part.keys, part.forward),) if at_once else part.backward
    for first in range(0, groups, step):
        lane = slice(first, min(first + step, groups))
        mine = slice(lane.start * q.shape[2] // groups, lane.stop * q.shape[2] // groups)
        for start, stop, table in pieces:
            keys, values, of_k, of_v = (x[:, start:stop, lane] for x in (k, v, dk, dv))
            kernel.backward(
                dout[:, :, mine], q[:, :, mine], keys, values, lse[:, mine], delta[:, mine], table,
                params.of_heads(mine), Gradients(kernel.of_heads(dq, mine), of_k, of_v, extra=extra), out[:, :, mine],
            )  # fmt: skip
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **extra}


def _error(got: Tensor, want: Tensor) -> float:
    """Relative; inf where one is infinite and the other is not. What is zero must be small."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isinf(), want.isinf()):
        return torch.inf
    got, want = got.masked_fill(got.isinf(), 0.0), want.masked_fill(want.isinf(), 0.0)
    return float((got - want).norm() / want.norm().clamp(min=1e-3 * want.numel() ** 0.5))
