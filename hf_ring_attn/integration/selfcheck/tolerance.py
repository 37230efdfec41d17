"""Tolerances of the self-check: rounding, and its amplification by the model; an attempt that they judge."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ...kernels import in_score_mod
from ..context.threads import runs_for

EXACT = 1e-4
"""Relative error of a token's output in float32 (transformers computes norms and softmaxes in it for float64 models
too). Sums in another order make 1e-7 to 1e-5, a defect 1e-2 and more."""

ROUNDINGS = 2.0
"""The same for other dtypes, in spacings of numbers at 1: 0.016 in bfloat16, 0.002 in float16 and TF32."""

AMPLIFICATION = 2.0
"""Factor on the change of a model's own answer if every module's output is off by up to half a spacing.

For models that magnify roundings (deep ones, experts). Sharding changes about one in a thousand of these numbers."""

LOSS = 0.25
"""Factor for a loss, in which the mean over tokens leaves less of their rounding."""

LEAST_LOSS, LEAST_GRADIENT = 2.5e-6, 1e-5
"""Relative distances of a loss and of a gradient in float32 that always pass. All models of transformers make 2e-7 and
1.5e-6 on a CPU, since other sums have other roundings, and those of tests/gpu no more on an H100. A term that is small
or nearly the same for all tokens, such as an entropy or a z-loss, is off by less than other defects: by 2e-5 and
more."""

ROUNDING = 50.0
"""Factor on the change that `AMPLIFICATION` is a factor on, too: a larger distance passes up to it, and up to the
tolerance. Found is 1.3."""


def tolerance(spacing: float, device: torch.device) -> float:
    """The relative tolerance of a token's output. ``spacing``: ``finfo.eps`` of the coarsest dtype of any module."""
    # torch.get_float32_matmul_precision() raises once a program used this option, as transformers does for tf32=True.
    if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision not in ("ieee", "none"):
        spacing = max(spacing, torch.finfo(torch.float16).eps)  # TF32 has a fraction of the same length
    return EXACT if spacing <= torch.finfo(torch.float32).eps else ROUNDINGS * spacing


def always_passes(gradients: int) -> list[float]:
    """The distances that always pass in float32: of a loss, and of so many gradients."""
    return [LEAST_LOSS] + [LEAST_GRADIENT] * gradients


@contextmanager
def outputs(see: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Calls ``see`` with each floating-point tensor that a module without children returns, and takes its result."""

    thread = threading.get_ident()

    def after(module: nn.Module, _args: Any, output: Any) -> Any:
        if in_score_mod() or not runs_for(thread):  # in one, modules compute one score, under vmap
            return None
        if isinstance(output, Tensor) and output.is_floating_point() and not module._modules:
            return see(output)
        return None

    with torch.nn.modules.module.register_module_forward_hook(after):
        yield


@contextmanager
def dtypes_seen() -> Iterator[set[torch.dtype]]:
    """Collects the dtypes of the tensors that modules return."""
    found: set[torch.dtype] = set()
    with outputs(lambda x: found.add(x.dtype)):
        yield found


@contextmanager
def rounded_anew(device: torch.device) -> Iterator[None]:
    """Moves every module's output by up to half a spacing of its dtype, for an answer as right as the first."""
    generator = torch.Generator(device).manual_seed(0)

    def see(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator, device=device).to(x.device) - 0.5
        return (x.double() * (1 + torch.finfo(x.dtype).eps * noise.double())).to(x.dtype)

    with outputs(see):
        yield


@dataclass
class Attempt:
    """The relative distances of two runs of one row, the largest on any rank, and their limits.

    Args:
        precise: no module's output was coarser than float32.
        again: the distances between the whole run and another one.
        refusal: the error, given the limits; it may raise a more precise one.
        fine: limits up to ``limits``; a distance between both passes if rounding explains it.
    """

    found: list[float]
    limits: list[float]
    precise: bool
    again: Callable[[], list[float]]
    refusal: Callable[[list[float]], errors.Refused]
    fine: list[float]

    def agrees(self, device: torch.device) -> bool:
        """Returns True if the runs agree. Unless they clearly do, limits are set by what the model amplifies first."""
        if self._within(self.fine):
            return True
        with rounded_anew(device):
            own = self.again()
        self.limits = [
            max(least, min(limit, ROUNDING * error), AMPLIFICATION * error)
            for least, limit, error in zip(self.fine, self.limits, own, strict=True)
        ]
        return self._within(self.limits)

    def _within(self, limits: list[float]) -> bool:
        return all(error <= limit for error, limit in zip(self.found, limits, strict=True))
