"""Measured steps of recipes/results beside which forecasts are held, and the settings of `plan` for each.

Two runs gave constants of `plan.hardware`, the others none. Memory has no constant: it is counted by tensors. The
counts were written with `HELD_OUT` in sight; `MEASURED_LATER` came after them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hf_ring_attn.bench.results import FILE, Run, read
from hf_ring_attn.plan.hardware import GIB, GPUS
from hf_ring_attn.plan.memory import memory_of
from hf_ring_attn.plan.seconds import seconds_of
from hf_ring_attn.plan.setup import Setup
from hf_ring_attn.plan.shape import ModelShape
from tests.plan.shapes import (
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_8B,
    QWEN3_32B,
    QWEN3_A3B,
    QWEN35_9B,
    llama_8b,
    shape,
)

RESULTS = Path(__file__).resolve().parents[2] / "recipes" / "results"


class Filed(NamedTuple):
    """A measured run of recipes/long_context_lora/train.py: LoRA of rank 16, on the shape of Llama 3.1 8B or another.

    ``is_timed``: its seconds are those of the GPUs, and not of a slow host or of other programs beside it.
    """

    folder: str
    run: str
    setup: dict[str, Any]
    is_timed: bool = True
    shape: dict[str, Any] = LLAMA_8B
    gpu: str = "h200"

    def filed(self) -> Run:
        return next(run for run in read(RESULTS / self.folder / FILE) if run.name == self.run)

    def row(self) -> dict[str, Any]:
        return next(row for row in [self.filed().head, *self.filed().rows] if "seconds_per_step" in row)

    def model(self) -> ModelShape:
        return llama_8b() if self.shape is LLAMA_8B else shape(self.shape)

    def forecast(self) -> tuple[float, float]:
        """GiB and seconds. A first step makes the optimizer's states at its end: those of all weights are left out."""
        setup = Setup(gpu=GPUS[self.gpu], **self.setup)
        memory = memory_of(self.model(), setup)
        is_first = setup.method == "full" and len(self.row()["seconds"]) == 1
        later = memory.always["optimizer"] if is_first else 0.0
        return (memory.allocated - later) / GIB, seconds_of(self.model(), setup).total


SAVED = {"save_attention": True}
FITTED = [
    Filed("2026-11-22-four-gpus", "s128_saved", {"gpus": 4, "tokens": 131072, **SAVED}),
    Filed("2026-11-23-chunked-loss", "chunked_8K", {"gpus": 2, "tokens": 8192}),
]
HELD_OUT = [
    Filed("2026-11-23-chunked-loss", "sharded_8K", {"gpus": 2, "tokens": 8192, "loss": "sharded"}),
    Filed("2026-11-23-chunked-loss", "chunked_128K", {"gpus": 2, "tokens": 131072, **SAVED}),
    Filed("2026-11-23-chunked-loss", "chunked_256K", {"gpus": 2, "tokens": 262144}, False),
    Filed("2026-11-21-ring-of-two", "step_128k", {"gpus": 2, "tokens": 131072}),
    Filed("2026-11-21-ring-of-two", "step_128k_saved", {"gpus": 2, "tokens": 131072, **SAVED}),
    Filed("2026-11-22-eight-ranks", "save", {"gpus": 2, "tokens": 32768}),
    Filed("2026-11-22-four-gpus", "s128", {"gpus": 4, "tokens": 131072}),
    Filed("2026-11-22-four-gpus", "s32", {"gpus": 4, "tokens": 32768}),
    Filed("2026-11-22-four-gpus", "s32_saved", {"gpus": 4, "tokens": 32768, **SAVED}),
    Filed("2026-11-22-four-gpus", "s32_ddp", {"gpus": 4, "tokens": 32768, "shard": "ddp", **SAVED}),
    Filed("2026-11-22-four-gpus", "losses_one_1", {"gpus": 1, "tokens": 32768}),
    Filed("2026-11-22-two-streams", "losses_four", {"gpus": 4, "tokens": 32768}),
    Filed("2026-11-21-two-gpus", "ddp_ring2_32k", {"gpus": 2, "tokens": 32768, "shard": "ddp", "kernel": "triton"}),
    Filed("2026-11-22-rooms", "train_ddp", {"gpus": 2, "tokens": 8192, "shard": "ddp", "loss": "sharded"}),
]

WHOLE_STEP = "2026-11-23-whole-step"
MEASURED_LATER = [
    Filed(WHOLE_STEP, "ring_liger_32K", {"gpus": 2, "tokens": 32768, "liger": True, **SAVED}),
    Filed(WHOLE_STEP, "ring_8K", {"gpus": 2, "tokens": 8192, **SAVED}, False),
    Filed(WHOLE_STEP, "ring_liger_8K", {"gpus": 2, "tokens": 8192, "liger": True, **SAVED}, False),
    Filed(WHOLE_STEP, "ring_512K_window", {"gpus": 2, "tokens": 524288, "mlp_tokens": 16384}, False),
    Filed(WHOLE_STEP, "ring_512K", {"gpus": 2, "tokens": 524288, "mlp_tokens": 16384, "offload_above": 73.0, **SAVED}),
    Filed(WHOLE_STEP, "ring_1M", {"gpus": 2, "tokens": 1048576, "mlp_tokens": 16384, "offload_above": 48.0}),
    Filed(WHOLE_STEP, "one_512K", {"gpus": 1, "tokens": 524288, "mlp_tokens": 16384, "offload_above": 60.0}),
]
"""Runs that were filed after the forecast was written. Their host was slow at 8K. The last four are first steps; the
window of 4096 takes attention's time away, but not its memory. ring_512K ran with a budget of 8 GiB beside 65 GiB of
saved attention, which counts in the budget since."""

QLORA, ON_ONE = "2026-11-24-qlora", {"gpus": 1, "method": "qlora", "shard": "ddp", "mlp_tokens": 8192}
MEASURED_IN_4_BITS = [
    Filed(QLORA, "q32_128K", {**ON_ONE, "tokens": 131072}, shape=QWEN3_32B),
    Filed(QLORA, "q70_56K", {**ON_ONE, "tokens": 57344}, shape=LLAMA_70B),
    Filed(QLORA, "q70_layers1", {**ON_ONE, "tokens": 131072}, shape={**LLAMA_70B, "num_hidden_layers": 1}),
    Filed(QLORA, "q70_layers2", {**ON_ONE, "tokens": 131072}, shape={**LLAMA_70B, "num_hidden_layers": 2}),
]
"""QLoRA on one GPU. Before them the forecast had PEFT cast its inputs to float32 beside 4-bit weights, too, which it
does not: it said 6 % more memory than measured for whole models, and 36 % more for one layer."""

ONE_GPU, DDP = "2026-11-24-one-gpu-step", {"gpus": 1, "shard": "ddp"}
MEASURED_ON_ONE = [
    Filed(ONE_GPU, "plain_64K", {**DDP, "tokens": 65536, "loss": "sharded"}),
    Filed(ONE_GPU, "tiled_64K", {**DDP, "tokens": 65536, "mlp_tokens": 8192, "offload_above": 2.0}),
    Filed(ONE_GPU, "kept_128K", {**DDP, "tokens": 131072, "mlp_tokens": 16384}),
    Filed(ONE_GPU, "offloaded_128K", {**DDP, "tokens": 131072, "mlp_tokens": 16384, "offload_above": 0.0}),
    Filed(ONE_GPU, "one_8K", {**DDP, "tokens": 8192, **SAVED}),
]
"""One GPU; the forecast is older than these runs. Without an option Trainer makes all logits, as the first did."""

TWO_GPUS, ALL_SAVED = "2026-11-24-two-gpu-steps", {"liger": True, "checkpointing": False}
MEASURED_ON_TWO = [
    Filed(TWO_GPUS, "ring_8K", {"gpus": 2, "tokens": 8192}, False),
    Filed(TWO_GPUS, "ring_fast_8K", {"gpus": 2, "tokens": 8192, **ALL_SAVED}, False),
    Filed(TWO_GPUS, "ring_32K", {"gpus": 2, "tokens": 32768}),
    Filed(TWO_GPUS, "ring_fast_32K", {"gpus": 2, "tokens": 32768, **ALL_SAVED}),
    Filed(TWO_GPUS, "ring_fast_128K", {"gpus": 2, "tokens": 131072, "liger": True, **SAVED}),
]
"""Without PEFT's casts, where "fast". Their host was slow at 8K. Before the two without checkpointing, which were the
first, the forecast counted an MLP's activation, which Liger computes again: it said 31.9 and 93.9 GiB."""

AGAIN = "2026-11-24-two-gpu-steps-2"
MEASURED_AGAIN = [  # on a faster host, and short attention is not split
    Filed(AGAIN, "ring_8K", {"gpus": 2, "tokens": 8192}),
    Filed(AGAIN, "ring_fast_8K", {"gpus": 2, "tokens": 8192, **ALL_SAVED}),
    Filed(AGAIN, "ring_fast_128K", {"gpus": 2, "tokens": 131072, "liger": True, **SAVED}),
]
LONGEST = "2026-11-25-longest-rows"
FULL = {"gpus": 2, "tokens": 1048576, "mlp_tokens": 16384, "method": "full", "liger": True, "optimizer": "adamw_8bit"}
QLORA_ON_TWO = {"gpus": 2, "tokens": 286720, "mlp_tokens": 16384, "method": "qlora"}
MEASURED_BY_LAYERS = [
    Filed(LONGEST, "full_1M_layer", FULL, shape={**LLAMA_8B, "num_hidden_layers": 1}),
    Filed(LONGEST, "full_1M_layers", FULL, shape={**LLAMA_8B, "num_hidden_layers": 2}),
    Filed(LONGEST, "qlora32_280K_layer", QLORA_ON_TWO, shape={**QWEN3_32B, "num_hidden_layers": 1}),
    Filed(LONGEST, "qlora32_280K_layers", QLORA_ON_TWO, shape={**QWEN3_32B, "num_hidden_layers": 2}),
]
"""One layer and two. Before the first two the forecast counted dq in float32 of all heads where only a group of heads
has it: it said 53.0 and 58.0 GiB. Whole models in 4 bits are not here: their weights were not
sharded, nor were those of the last two, which moves the forecasts of these by less than 0.5 GiB."""

H100, TRITON = "2026-11-25-two-h100", {"gpus": 2, "kernel": "triton", "liger": True}
LARGE = {**TRITON, "tokens": 131072, "method": "qlora", "mlp_tokens": 16384, "offload_above": 0.0}
MEASURED_ON_H100 = [
    Filed(H100, "ring_fast_8K", {**TRITON, "tokens": 8192, "checkpointing": False}, False, gpu="h100"),
    Filed(H100, "ring_fast_128K", {**TRITON, "tokens": 131072, **SAVED}, gpu="h100"),
    Filed(H100, "qlora70_128K", LARGE, False, LLAMA_70B, "h100"),
]
"""Attention in triton, whose speed was measured on an H200 before. The last is a first step."""

H100_FLASH4, LIGER = "2026-11-25-two-h100-flash4", {"gpus": 2, "liger": True}
MEASURED_WITH_FLASH4 = [
    Filed(H100_FLASH4, "ring_fast_8K", {**LIGER, "tokens": 8192, "checkpointing": False}, False, gpu="h100"),
    Filed(H100_FLASH4, "ring_fast_128K", {**LIGER, "tokens": 131072, **SAVED}, gpu="h100"),
    Filed(H100_FLASH4, "lora_512K", {**LIGER, "tokens": 524288, "mlp_tokens": 16384, "offload_above": 0.0}, gpu="h100"),
    Filed(H100_FLASH4, "qlora70_128K", {**LARGE, "kernel": "auto"}, False, LLAMA_70B, "h100"),
]
"""The last two are first steps, which lock host memory: for 70B 160 GiB."""

H100_1M = "2026-11-25-two-h100-1m"


def quarter_of_70b(folder: str) -> Filed:
    shape = {**LLAMA_70B, "num_hidden_layers": 20}
    return Filed(folder, "qlora70_quarter", {**LARGE, "kernel": "auto"}, shape=shape, gpu="h100")


MEASURED_AT_1M = [
    Filed(H100_1M, "lora_1M", {**LIGER, "tokens": 1048576, "mlp_tokens": 16384, "offload_above": 16.0}, gpu="h100"),
    quarter_of_70b(H100_1M),
]
"""The first is a first step; of the second two steps after the first count."""

H100_32B, AT_416K = "2026-11-26-two-h100-32b", {**LIGER, "tokens": 425984, "method": "qlora", "mlp_tokens": 16384}
LORA_128K = {**LIGER, "tokens": 131072, "mlp_tokens": 16384, "offload_above": 0.0}
MEASURED_OF_32B = [
    Filed(H100_32B, "qlora32_416K_layer", AT_416K, shape={**QWEN3_32B, "num_hidden_layers": 1}, gpu="h100"),
    Filed(H100_32B, "qlora32_416K_layers", AT_416K, shape={**QWEN3_32B, "num_hidden_layers": 2}, gpu="h100"),
    quarter_of_70b(H100_32B),
    Filed(H100_32B, "memory_128K", LORA_128K, False, gpu="h100"),
    Filed(H100_32B, "ring_fast_8K", {**LIGER, "tokens": 8192, "checkpointing": False}, gpu="h100"),
]
"""Of memory_128K only the first step was timed. All 64 layers are not here: see the test of their window."""

H100_256K = "2026-11-26-two-h100-256k"
MEASURED_WHEN_MENDED = [
    Filed(H100_256K, "qlora32_256K", {**AT_416K, "tokens": 262144, "offload_above": 0.0}, shape=QWEN3_32B, gpu="h100"),
    Filed(H100_256K, "qlora32_416K_window", {**AT_416K, "offload_above": 26.0}, False, QWEN3_32B, "h100"),
    Filed(H100_256K, "memory_128K", LORA_128K, False, gpu="h100"),
]
"""The first is a first step; the second has a window, which leaves its fullest moment as it is."""

H100_SHORT, AT_8K, AT_32K = "2026-11-26-two-h100-short", {**LIGER, "tokens": 8192}, {**LIGER, "tokens": 32768}
ON_H200 = {"gpus": 1, "tokens": 524288, "mlp_tokens": 16384, "method": "full", "liger": True, "optimizer": "adamw_8bit"}
MEASURED_SHORT_AND_FULL = [
    Filed(H100_SHORT, "ring_fast_8K", {**AT_8K, "checkpointing": False}, gpu="h100"),
    Filed(H100_SHORT, "ring_fast_8K-2", {**AT_8K, "checkpointing": False}, gpu="h100"),
    Filed(H100_SHORT, "ring_fast_8K-3", {**AT_8K, "checkpointing": False}, False, gpu="h100"),
    Filed(H100_SHORT, "ring_fast_8K-4", {**AT_8K, "checkpointing": False}, gpu="h100"),
    Filed(H100_SHORT, "ring_32K", {"gpus": 2, "tokens": 32768}, gpu="h100"),
    Filed(H100_SHORT, "ring_fused_32K", AT_32K, gpu="h100"),
    Filed(H100_SHORT, "ring_saved_32K", {**AT_32K, **SAVED}, gpu="h100"),
    Filed(H100_SHORT, "ring_chunks_32K", {**AT_32K, "checkpointing": False, "mlp_tokens": 8192}, gpu="h100"),
    Filed("2026-11-26-one-h200-full", "full_512K_window", {**ON_H200, "offload_above": 28.0, "wrapped": True}, False),
]
"""The third waits for a slower host; the last has a window, which leaves its fullest moment as it is."""

BESIDE_OWN = "2026-11-26-two-h100-beside-own"
AT_256K = {**LIGER, **SAVED, "tokens": 262144, "mlp_tokens": 16384, "offload_above": 24.0}
MEASURED_BESIDE_OWN = [
    Filed(BESIDE_OWN, "ring_fast_8K", {**AT_8K, "checkpointing": False}, gpu="h100"),
    Filed(BESIDE_OWN, "ring_fused_32K", AT_32K, gpu="h100"),
    Filed(BESIDE_OWN, "ring_saved_32K", {**AT_32K, **SAVED}, gpu="h100"),
    Filed(BESIDE_OWN, "ring_fast_128K", {**LIGER, **SAVED, "tokens": 131072}, gpu="h100"),
    Filed(BESIDE_OWN, "ring_saved_256K", AT_256K, gpu="h100"),
    Filed(BESIDE_OWN, "ring_sft_256K", AT_256K, gpu="h100"),
]

AUTO, DEFAULTS = "2026-11-27-two-h100-auto", "2026-11-27-two-h100-defaults"
WHOLE_FULL, FULL_1M = "2026-11-27-full-and-first-steps", "2026-11-27-full-1m"
NATIVE = "2026-11-27-default-allocator"
MEASURED_BY_DEFAULT = [
    Filed(AUTO, "ring_fast_8K", {**AT_8K, "checkpointing": False}, gpu="h100"),
    Filed(AUTO, "ring_sft_8K", {**AT_8K, "checkpointing": False}, False, gpu="h100"),
    Filed(AUTO, "ring_auto_32K", {**AT_32K, **SAVED}, gpu="h100"),
    Filed(AUTO, "ring_auto_128K", {**LIGER, **SAVED, "tokens": 131072}, gpu="h100"),
    Filed(DEFAULTS, "ring_auto_32K", {**AT_32K, **SAVED}, gpu="h100"),
    Filed(DEFAULTS, "ring_auto_160K", {**LIGER, **SAVED, "tokens": 163840}, gpu="h100"),
    Filed(WHOLE_FULL, "native_160K", {**LIGER, "tokens": 163840}, gpu="h100"),
    Filed(WHOLE_FULL, "full_256K", {**FULL, "tokens": 262144, "offload_above": 8.0}, gpu="h100"),
    Filed(FULL_1M, "full_1M", {**FULL, "offload_above": 32.0}),
    Filed(FULL_1M, "full_256K_auto", {**FULL, **SAVED, "tokens": 262144, "offload_above": 8.0}),
    Filed(NATIVE, "native_saved_160K", {**LIGER, **SAVED, "tokens": 163840}, gpu="h100"),
    Filed(NATIVE, "native_auto_160K", {**LIGER, **SAVED, "tokens": 163840}, gpu="h100"),
]

ROWS = "2026-11-28-any-loss"
MEASURED_ON_WHOLE_ROWS = [
    Filed(ROWS, "ring_rows_8K", {**AT_8K, **SAVED, "loss": "gathered"}, False),  # waits for its host
    Filed(ROWS, "ring_rows_32K", {**AT_32K, **SAVED, "loss": "gathered"}),
    Filed(ROWS, "ring_auto_32K", {**AT_32K, **SAVED}),
    Filed(ROWS, "ring_fast_8K-3", {**AT_8K, "checkpointing": False}),
]

LINEAR, QWEN35 = "2026-11-27-linear-attention", {"gpus": 2, "tokens": 32768, "kernel": "triton", **SAVED}
MEASURED_WITH_LINEAR_ATTENTION = [Filed(LINEAR, "q35_32K", QWEN35, shape=QWEN35_9B, gpu="h100")]
"""Forecast from the speed of its scan, which is filed beside it. Before that of the convolution was, it said 3.12 s."""

EXPERTS, TWO = "2026-11-28-experts", {"gpus": 2, **SAVED}
MEASURED_WITH_EXPERTS = [  # before those of 32K gave its numbers, the forecast said 2.55, 24.2, 1.17 and 8.6 s
    Filed(EXPERTS, "ring_a3b_32K", {**TWO, "tokens": 32768}, shape=QWEN3_A3B),
    Filed(EXPERTS, "ring_a3b_128K", {**TWO, "tokens": 131072}, shape=QWEN3_A3B),
    Filed(EXPERTS, "ring_oss_32K", {**TWO, "tokens": 32768, "liger": True}, shape=GPT_OSS_20B),
    Filed(EXPERTS, "ring_oss_128K", {**TWO, "tokens": 131072, "liger": True}, shape=GPT_OSS_20B),
]

KEPT, KEPT_LONG = "2026-11-29-kept-layers", "2026-11-29-two-gpus-checks"
MEASURED_WITH_KEPT_LAYERS = [
    Filed(KEPT, "ring_auto_32K", {**AT_32K, **SAVED}),
    Filed(KEPT, "ring_kept_32K", {**AT_32K, **SAVED, "keep_layers": 32}),
    Filed(KEPT, "ring_kept_8K", {**AT_8K, **SAVED, "keep_layers": 32}, False),  # waits for its host
    Filed(KEPT_LONG, "auto_128K", {**AT_32K, **SAVED, "tokens": 131072}),
    Filed(KEPT_LONG, "kept_128K", {**AT_32K, **SAVED, "tokens": 131072, "keep_layers": 8}),
]

LONGEST, AT_270K = "2026-11-30-longest-70b", {**LIGER, "tokens": 276480, "method": "qlora", "mlp_tokens": 16384}
QLORA_32B = {**TWO, "tokens": 131072, "method": "qlora", "mlp_tokens": 8192, "shard": "ddp", "save_attention": False}
MEASURED_OF_70B = [  # the last three by the run.sh of recipes
    Filed(LONGEST, "qlora70_270K_layer", AT_270K, shape={**LLAMA_70B, "num_hidden_layers": 1}),
    Filed(LONGEST, "qlora70_270K_layers", AT_270K, shape={**LLAMA_70B, "num_hidden_layers": 2}),
    Filed(LONGEST, "qlora70_270K_window", {**AT_270K, "offload_above": 70.0}, False, LLAMA_70B),
    Filed(LONGEST, "lora_128k", {**TWO, "tokens": 131072}),
    Filed(LONGEST, "lora_128k_host", {**TWO, "tokens": 131072, "offload_above": 0.0}),
    Filed(LONGEST, "qlora_32b", {**QLORA_32B, "optimizer": "paged_adamw_8bit"}, shape=QWEN3_32B),
]
RECIPES_ON_ONE = "2026-11-30-recipes-one-gpu"
THREE, AT_128K = "2026-11-30-three-recipes", {"gpus": 2, "tokens": 131072}
MILLION, FULL_ON_TWO = "2026-11-30-million-and-pictures", "2026-11-30-full-1m-two-gpus"
ON_ONE_H200 = {"method": "full", "optimizer": "adamw_8bit", "offload_above": 0.0, "wrapped": True, **SAVED}
MEASURED_BY_RECIPES = [
    Filed(RECIPES_ON_ONE, "extend_context", {"gpus": 1, "tokens": 131072, **ON_ONE_H200}, shape=QWEN3_8B),
    Filed(THREE, "extend_context", {**AT_128K, **SAVED, "method": "full"}, shape=QWEN3_8B),
    Filed(THREE, "qlora_70b", {**AT_128K, "method": "qlora", "mlp_tokens": 8192}, shape=LLAMA_70B),
    Filed(
        MILLION, "lora_1m", {"gpus": 2, "tokens": 1048576, "mlp_tokens": 16384, "offload_above": 48.0}, shape=QWEN3_8B
    ),
    Filed(FULL_ON_TWO, "full_1m", {**FULL, "liger": False, "offload_above": 48.0}, shape=QWEN3_8B),
]

ALL = [
    *FITTED, *HELD_OUT, *MEASURED_LATER, *MEASURED_IN_4_BITS, *MEASURED_ON_ONE, *MEASURED_ON_TWO, *MEASURED_AGAIN,
    *MEASURED_BY_LAYERS, *MEASURED_ON_H100, *MEASURED_WITH_FLASH4, *MEASURED_AT_1M, *MEASURED_OF_32B,
    *MEASURED_WHEN_MENDED, *MEASURED_SHORT_AND_FULL, *MEASURED_BESIDE_OWN, *MEASURED_BY_DEFAULT,
    *MEASURED_WITH_LINEAR_ATTENTION, *MEASURED_WITH_EXPERTS, *MEASURED_ON_WHOLE_ROWS, *MEASURED_WITH_KEPT_LAYERS,
    *MEASURED_OF_70B, *MEASURED_BY_RECIPES,
]  # fmt: skip
