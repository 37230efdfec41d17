"""Compiles triton's kernels for GPUs that are not at hand: prints the shared memory of each.

    python -m tests.helpers.triton_targets 2x64 80 90

compiles for these capabilities of `SHARED_MEMORY` with the shipped blocks of a row (bytes of an element x width of a
head), and prints a line of JSON for each, with how often each kernel was compiled for rows of two lengths. A driver
that only names its GPU stands in for CUDA's: kernels are called as `launch` calls them, with tensors on the CPU, and
compiled to machine code, but not launched.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from hf_ring_attn.kernels import Gradients, Params
from hf_ring_attn.kernels.triton import blocks, launch
from hf_ring_attn.sharding.mask import UNBOUNDED, Tile

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB that a program may have, by compute capability (CUDA programming guide, table of technical specifications)."""
KERNELS = {"forward_kernel", "delta_kernel", "keys_kernel", "queries_kernel"}
TOKENS, HEADS, KV_HEADS = (512, 509), 4, 2
"""Two lengths: triton compiles a kernel again for an argument that is divisible by 16, unless it is told not to."""

_jit = launch.jit


class Driver:
    """What triton's compiler asks of a driver. Each capability is a device of its own, whose kernels are kept apart."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _device: int) -> int:
        return 0


def compiled(capability: int, element_bytes: int, width: int) -> dict[str, set[Any]]:
    """What was compiled of each kernel, with the shipped blocks of this GPU's family."""
    import_module("triton.runtime").driver.set_active(Driver(capability))
    found: dict[str, set[Any]] = {}

    class Compiling:
        """A kernel that is compiled at its launch."""

        def __init__(self, file: str, name: str) -> None:
            self.file, self.name = file, name

        def __getitem__(self, grid: Any) -> Any:
            def launched(*args: Any, **constants: Any) -> None:
                kernel = _jit(self.file, self.name).run(*args, grid=grid, warmup=True, **constants)
                assert kernel.asm["cubin"]
                found.setdefault(self.name, set()).add(kernel)

            return launched

    family = next((name for name, of in blocks.FAMILIES.items() if divmod(capability, 10) in of), "other")

    def row_for(_device: torch.device, *facts: Any) -> blocks.Row:
        with mock.patch.object(blocks, "family_of", return_value=family):
            return blocks.row_for(torch.device("cuda"), *facts)

    dtype = torch.bfloat16 if element_bytes == 2 else torch.float32
    values = blocks.NARROWER_VALUES.get(width, width)
    with (
        mock.patch.object(launch, "jit", Compiling),
        mock.patch.object(launch, "has_copy_engine", return_value=capability >= 90),
        mock.patch.object(launch, "row_for", row_for),
        mock.patch.object(launch, "precision", return_value=launch.FLOAT32_ON_CUDA),
    ):
        for tokens in TOKENS:
            q, dout = (torch.zeros(1, tokens, HEADS, x, dtype=dtype) for x in (width, values))
            k, v = (torch.zeros(1, tokens, KV_HEADS, x, dtype=dtype) for x in (width, values))
            tiles = torch.tensor([Tile(0, 0, tokens, 0, 0, tokens, 0, lo=0, hi=UNBOUNDED)])
            _, lse = launch.forward(q, k, v, tiles, Params(width**-0.5))
            into = Gradients(torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape))
            launch.backward(dout, q, k, v, lse, launch.delta(dout, q), tiles, Params(width**-0.5), into)
    return found


if __name__ == "__main__":
    row, *capabilities = sys.argv[1:]
    element_bytes, width = map(int, row.split("x"))
    for capability in map(int, capabilities):
        found = compiled(capability, element_bytes, width)
        shared = {name: max(kernel.metadata.shared for kernel in kernels) for name, kernels in found.items()}
        times = {name: len(kernels) for name, kernels in found.items()}
        sys.stdout.write(json.dumps({"capability": capability, "row": row, "bytes": shared, "times": times}) + "\n")
