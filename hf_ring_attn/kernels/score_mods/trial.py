"""A trial of a kernel with the user's score_mod on a small attention, before it is served.

Values and gradients are compared with the reference's, on the GPU in use. This finds what a graph does not show: custom
gradients, autograd switched off, limits of a compiler. The real attention reuses the compiled code.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...dtypes import accumulate_dtype
from ..base import Asked, Gradients, Kernel, Params, Part, Request
from ..reference import Reference
from .score_mod import ScoreMod

FAR = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-3, torch.float64: 1e-9}
"""Relative errors that only a wrong attention has."""
LEARNED, NOISE, FAULT = 3, 5, 0.25
"""Limits for gradients of learned tensors, whose terms cancel over all tokens, so that rounding in 16 bits weighs more:
`LEARNED` times `FAR`, or `NOISE` times the reference's error from the same inputs; at most `FAULT`."""


MOST_TRIALS = 64
"""Results of trials that a kernel caches. Equal requests are of functions of the same code and graph: one trial."""


def failures_of(kernel: Kernel, request: Request) -> tuple[str, ...]:
    """Lists what the kernel gets wrong with the function of a request, in words."""
    assert request.asked is not None
    mod = request.asked.function()
    device = mod.device or torch.device("cpu")
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        return tuple(_failures(kernel, request, request.asked, mod, device))


def _failures(kernel: Kernel, request: Request, asked: Asked, mod: ScoreMod, device: torch.device) -> list[str]:
    dtype, part = request.dtype, asked.part()
    if not len(part.forward):
        return ["nothing is seen in the first rows, so there is nothing to try this score_mod on"]
    generator = torch.Generator().manual_seed(0)
    tensors = _inputs(request, part, device, generator)
    # Sinks with about as much mass as the keys: without them a term common to all keys of a query has no gradient.
    sinks = torch.randn(request.heads, generator=generator, dtype=torch.float32, device="cpu").to(device)
    sinks += math.log(part.keys)
    params = Params(asked.scale, asked.softcap, sinks)
    still = mod.with_values(mod.captured, [x.requires_grad for x in mod.captured])
    for function in (_moved(mod, generator), still):  # moved, since gradients may be zero at the given values
        tried = replace(params, score_mod=function)
        want = _answer(Reference(), _wide(tensors), part, tried, at_once=True)
        if all(x.isfinite().all() for name, x in want.items() if name != "lse"):
            break
    try:
        got = _answer(kernel, tensors, part, tried)
    except torch.OutOfMemoryError:  # not the kernel's fault
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
    """Casts to the accumulators' dtype."""
    return [x.to(accumulate_dtype(x.dtype)) for x in tensors]


def _moved(mod: ScoreMod, generator: torch.Generator) -> ScoreMod:
    """Adds noise to the values."""
    values = []
    for x in mod.captured:
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(x.device)
        values.append(x.detach().double() + 0.1 * noise)
    return mod.with_values(values, [x.requires_grad for x in mod.captured])


def _answer(
    kernel: Kernel, tensors: list[Tensor], part: Part, params: Params, at_once: bool = False
) -> dict[str, Tensor]:
    """Runs both passes. ``at_once``: one backward; else some heads and some keys at a time, as in a ring."""
    q, k, v, dout = tensors
    mod = params.score_mod
    assert mod is not None
    out, lse = kernel.forward(q, k, v, part.forward, params)
    delta = kernel.delta(dout, out)
    dq, dk, dv = (kernel.new_gradient(x) for x in (q, k, v))
    extra = mod.new_gradients()
    groups = k.shape[2]
    step = groups if at_once else (groups + 1) // 2  # as the head halves of a ring pass
    pieces = ((0, part.keys, part.forward),) if at_once else part.backward
    for first in range(0, groups, step):
        half = slice(first, min(first + step, groups))
        mine = slice(half.start * q.shape[2] // groups, half.stop * q.shape[2] // groups)
        for start, stop, table in pieces:
            keys, values, of_k, of_v = (x[:, start:stop, half] for x in (k, v, dk, dv))
            kernel.backward(
                dout[:, :, mine], q[:, :, mine], keys, values, lse[:, mine], delta[:, mine], table,
                params.of_heads(mine), Gradients(kernel.of_heads(dq, mine), of_k, of_v, extra=extra), out[:, :, mine],
            )  # fmt: skip
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **extra}


def _error(got: Tensor, want: Tensor) -> float:
    """Computes a relative error; inf if infinities differ. Small values count absolutely."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isinf(), want.isinf()):
        return torch.inf
    got, want = got.masked_fill(got.isinf(), 0.0), want.masked_fill(want.isinf(), 0.0)
    return float((got - want).norm() / want.norm().clamp(min=1e-3 * want.numel() ** 0.5))
