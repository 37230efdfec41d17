"""Lets a Hopper GPU run Triton kernels as an Ampere or Ada GPU would: a stand-in where none is at hand.

A kernel is compiled to the instructions of the other GPU (`mma.sync` and `cp.async`, not Hopper's own), which Hopper
runs, too. It has the other GPU's shared memory: larger kernels are refused, and only as many programs share a
multiprocessor as would there. Per multiprocessor and clock, `mma.sync` on an H100 is about as fast as on an A100, twice
as fast as on an L40S. Memory and caches are the H100's.
"""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from typing import Any

import torch

SHARED_MEMORY = {80: 164, 86: 100, 89: 100, 90: 228}
"""KiB of a multiprocessor, by compute capability; a program may have one less (CUDA programming guide)."""
HOPPER = 90
TOO_MUCH = 2**20


def compile_like(capability: int) -> None:
    """From now on triton compiles for ``capability``, and torch names it; to be called before the first kernel.

    Args:
        capability: 80, 86 or 89.
    """
    compiler = import_module("triton.backends.compiler")
    backend, driver = (import_module(f"triton.backends.nvidia.{name}") for name in ("compiler", "driver"))
    here, there = SHARED_MEMORY[HOPPER], SHARED_MEMORY[capability]
    machine_code = backend.CUDABackend.make_cubin

    def for_hopper(self: Any, src: str, metadata: dict[str, Any], opt: Any, _capability: int) -> Any:
        code, needed = machine_code(self, src, metadata, opt, HOPPER), metadata["shared"]
        fits = needed <= (there - 1) * 1024
        metadata["shared"] = min(needed * here // there, (here - 1) * 1024) if fits else TOO_MUCH
        return code

    def target(_self: Any) -> Any:
        return compiler.GPUTarget("cuda", capability, 32)

    def named(_device: Any = None) -> tuple[int, int]:
        return divmod(capability, 10)

    os.environ["TRITON_CACHE_DIR"] = os.environ.get("LIKE_GPU_CACHE") or tempfile.mkdtemp(prefix="triton-like-")
    os.environ["LIKE_GPU_CACHE"] = os.environ["TRITON_CACHE_DIR"]  # for the processes that this one starts
    backend.CUDABackend.make_cubin = for_hopper
    driver.CudaDriver.get_current_target = target
    torch.cuda.get_device_capability = named  # type: ignore[assignment]
