"""Speeds and memory of GPUs: what makers give, and the shares of it that were measured.

Fitted to two runs: `s128_saved` of recipes/results/2026-11-22-four-gpus (its profile: attention, matrix products,
other kernels), and `chunked_8K` of 2026-11-23-chunked-loss (`LAYER_SECONDS`). Experts: the runs of 32K tokens of
2026-11-28-experts. Attention of heads that are not 128 wide:
runs `two_*` of 2026-11-22-four-gpus, and for triton runs `speed` (of its cases of 128, that of 128K tokens) and `wide`
of 2026-11-21-triton. tests/plan compares forecasts with runs that were not fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30
FLOAT32 = 4
"""Bytes of a number."""
DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule in flash-linear-attention."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU and its links.

    Args:
        memory_gib: as torch sees it. tflops, float32_tflops: dense, as the maker gives it.
        bandwidth_gbs: of its memory. link_gbs: to GPUs of its node. network_gbs: to other nodes, per GPU. host_gbs: to
            host memory. Each in one direction, in 1e9 bytes per second; the last three as programs reach them.
        host_memory_gib: of host memory, per GPU.
        has_flash4: flash-attn-4 serves it, if it is installed; else attention is in triton.
    """

    memory_gib: float
    tflops: float
    float32_tflops: float
    bandwidth_gbs: float
    link_gbs: float
    network_gbs: float = 45.0
    host_gbs: float = 45.0
    host_memory_gib: float = math.inf
    has_flash4: bool = True

    @property
    def memory_speed(self) -> float:
        """Bytes per second that kernels other than matrix products and attention move."""
        return ELEMENTWISE * self.bandwidth_gbs * 1e9


GPUS = {
    "h100": Gpu(79.1, 989.0, 67.0, 3350.0, 360.0),
    "h200": Gpu(139.8, 989.0, 67.0, 4800.0, 360.0),
    "a100": Gpu(79.2, 312.0, 19.5, 2039.0, 240.0, 22.0, 22.0, has_flash4=False),
}

MATMUL = 0.664
"""Share of the maker's FLOP/s that matrix products reach."""

ATTENTION = {
    "flash4": {64: (0.53, 0.545), 128: (0.674, 0.595), 192: (0.667, 0.50), 256: (0.71, 0.37)},
    "triton": {
        64: (0.503, 0.379),
        80: (0.357, 0.288),
        96: (0.424, 0.335),
        128: (0.536, 0.428),
        192: (0.387, 0.215),
        256: (0.571, 0.280),
        512: (0.354, 0.139),
    },
}
"""The same for attention, by kernel and by a head's width: forward, backward. Both on Hopper, in 16 bits."""

TOWER_ATTENTION = 0.356
"""The same for attention of a vision tower by torch's sdpa, forward: 0.7 s of 118 pictures of 4,096 patches, by the
profile in recipes/results/2026-11-30-recipes-one-gpu."""

DELTA_RULES: dict[str, dict[tuple[int, int], tuple[float, float]]] = {
    "by head": {(16, 128): (63.4, 107.7)},
    "by channel": {(16, 128): (88.8, 295.4)},
}
"""Nanoseconds per token of a row that the scan of linear attention takes, by heads on a GPU and their width: forward,
backward. By head: chunk_gated_delta_rule of flash-linear-attention; by channel: its chunk_kda. Where nothing is filed,
a forecast leaves the time out, and says so. Of a row of 128K tokens on an H100; of 32K it is 6 to 8 % more
(recipes/results/2026-11-27-linear-attention)."""

ELEMENTWISE = 0.82
"""Share of the memory's bandwidth that all other kernels reach, by the bytes of `seconds.elementwise_numbers`."""

EXPERTS, BIASES = 30, 20
"""Numbers that kernels read and write for each of a token's copies for its experts and for each of these experts'
intermediates; more for each intermediate of experts with biases. In transformers 5.17, with its grouped products. Most
kernels are slow ones, whose operands have different shapes: counts of bytes alone would be half as large."""

LAYER_SECONDS = 0.0037
"""Seconds of a step that each layer costs whatever the tokens: launches, small kernels, waits. They are the host's: on
another machine of the kind a step of 8192 tokens took 1.02 s, not 0.64 (recipes/results/2026-11-23-whole-step)."""

CONTEXT_GIB = 2.0
"""CUDA's context, NCCL's and cuBLAS's buffers, outside of torch's allocator: a round number, not measured."""

SLACK = 0.05
"""Share of the memory for activations that torch's allocator reserves beyond what is in use: assumed."""

LOCKED_GIB_PER_SECOND = 3.0
"""Host memory that a process touches and locks: 80 GiB in 27 s, on one host (results/2026-11-26-two-h100-256k)."""

KEPT_FREE = 0.07
"""Share of a GPU's memory that the search for the longest row leaves: forecasts were as near to measured steps as that
(tests/plan/test_filed_results.py)."""


def attention_shares(kernel: str, head_width: int) -> tuple[float, float]:
    """Shares of the maker's FLOP/s in attention's forward and backward, of the nearest width that was measured."""
    measured = ATTENTION[kernel]
    return measured[min(measured, key=lambda width: abs(width - head_width))]
