"""How far apart two right answers of one model may be: what rounding explains, and how a model magnifies it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import in_score_mod

EXACT = 1e-4
"""Relative error of a token's output that sums in another order may make in float32 (transformers' norms and softmaxes
are computed in it for float64 models too). What is found is 1e-7 to 1e-5; a defect makes 1e-2 and more."""

ROUNDINGS = 2.0
"""The same for other dtypes, in spacings of numbers at 1: 0.016 in bfloat16, 0.002 in float16 and TF32."""

AMPLIFICATION = 2.0
"""Where more is found: how many times further than the model's own answer moves when every module's output is off by up
to half a spacing. Deep models and those with experts magnify a rounding. Sharding moves fewer numbers than that: sums
are accumulated in float32, so another order rounds about one in a thousand of them to the other side."""

LOSS = 0.25
"""The loss is a mean over tokens, so less of their rounding is left in it: this part of what a token may have."""


def tolerance(spacing: float, device: torch.device) -> float:
    """Of a token's output, relatively, where the coarsest dtype that any module put out has this ``finfo.eps``."""
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        spacing = max(spacing, torch.finfo(torch.float16).eps)  # TF32 has a fraction of the same length
    return EXACT if spacing <= torch.finfo(torch.float32).eps else ROUNDINGS * spacing


@contextmanager
def outputs(see: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Shows each floating-point tensor that a module without children returns; what ``see`` returns takes its place."""

    def after(module: nn.Module, _args: Any, output: Any) -> Any:
        if in_score_mod():  # its modules compute one score, under vmap
            return None
        if isinstance(output, Tensor) and output.is_floating_point() and not module._modules:
            return see(output)
        return None

    handle = torch.nn.modules.module.register_module_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def rounded_anew(device: torch.device) -> Iterator[None]:
    """Every module's output is off by up to half a spacing of its dtype: an answer that is as right as the first."""
    generator = torch.Generator(device).manual_seed(0)

    def see(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator, device=device).to(x.device) - 0.5
        return (x.double() * (1 + torch.finfo(x.dtype).eps * noise.double())).to(x.dtype)

    with outputs(see):
        yield
