"""Forecasts beside measured steps of recipes/results: two runs gave constants of `plan.hardware`, the others none.

Memory has no constant: it is counted by tensors. The counts were written with `HELD_OUT` in sight; `MEASURED_LATER`
came after them.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hf_ring_attn.bench.results import FILE, read
from hf_ring_attn.plan.hardware import GIB, GPUS
from hf_ring_attn.plan.memory import memory_of
from hf_ring_attn.plan.seconds import attention_flops, elementwise_numbers, matmul_flops, seconds_of
from hf_ring_attn.plan.setup import Setup
from tests.plan.shapes import LLAMA_8B, LLAMA_70B, QWEN3_32B, llama_8b, shape

RESULTS = Path(__file__).resolve().parents[2] / "recipes" / "results"
MOST_MEMORY, MOST_SECONDS = 0.10, 0.15


class Filed(NamedTuple):
    """A measured run of recipes/long_context_lora/train.py: LoRA of rank 16, on the shape of Llama 3.1 8B or another.

    ``is_timed``: its seconds are those of the GPUs.
    """

    folder: str
    run: str
    setup: dict[str, Any]
    is_timed: bool = True
    shape: dict[str, Any] = LLAMA_8B

    def row(self) -> dict[str, Any]:
        run = next(run for run in read(RESULTS / self.folder / FILE) if run.name == self.run)
        return next(row for row in [run.head, *run.rows] if "seconds_per_step" in row)


SAVED = {"save_attention": True}
FITTED = [
    Filed("2026-11-22-four-gpus", "s128_saved", {"gpus": 4, "tokens": 131072, **SAVED}),
    Filed("2026-11-23-chunked-loss", "chunked_8K", {"gpus": 2, "tokens": 8192}),
]
HELD_OUT = [
    Filed("2026-11-23-chunked-loss", "sharded_8K", {"gpus": 2, "tokens": 8192, "loss": "sharded"}),
    Filed("2026-11-23-chunked-loss", "chunked_128K", {"gpus": 2, "tokens": 131072, **SAVED}),
    Filed("2026-11-23-chunked-loss", "chunked_256K", {"gpus": 2, "tokens": 262144}),
    Filed("2026-11-21-ring-of-two", "step_128k", {"gpus": 2, "tokens": 131072}),
    Filed("2026-11-21-ring-of-two", "step_128k_saved", {"gpus": 2, "tokens": 131072, **SAVED}),
    Filed("2026-11-22-eight-ranks", "save", {"gpus": 2, "tokens": 32768}),
    Filed("2026-11-22-four-gpus", "s128", {"gpus": 4, "tokens": 131072}),
    Filed("2026-11-22-four-gpus", "s32", {"gpus": 4, "tokens": 32768}),
    Filed("2026-11-22-four-gpus", "s32_saved", {"gpus": 4, "tokens": 32768, **SAVED}),
    Filed("2026-11-22-four-gpus", "s32_ddp", {"gpus": 4, "tokens": 32768, "shard": "ddp", **SAVED}),
    Filed("2026-11-22-four-gpus", "losses_one_1", {"gpus": 1, "tokens": 32768}),
    Filed("2026-11-22-two-streams", "losses_four", {"gpus": 4, "tokens": 32768}),
    Filed("2026-11-21-two-gpus", "ddp_ring2_32k", {"gpus": 2, "tokens": 32768, "shard": "ddp"}),
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


@pytest.mark.parametrize(
    "filed",
    [*FITTED, *HELD_OUT, *MEASURED_LATER, *MEASURED_IN_4_BITS],
    ids=lambda filed: f"{filed.folder[5:]} {filed.run}",
)
def test_a_filed_step_is_forecast(filed: Filed) -> None:
    row, setup = filed.row(), Setup(gpu=GPUS["h200"], **filed.setup)
    assert row["ranks"] == setup.gpus
    model = llama_8b() if filed.shape is LLAMA_8B else shape(filed.shape)
    memory_gib = memory_of(model, setup).allocated / GIB
    assert memory_gib == pytest.approx(max(row["peak_memory_GiB"]), rel=MOST_MEMORY)
    if filed.is_timed:
        assert seconds_of(model, setup).total == pytest.approx(row["seconds_per_step"], rel=MOST_SECONDS)


def test_the_newest_runs_are_forecast_within_three_percent() -> None:
    for filed in HELD_OUT[1:3]:  # both of the code and the loss of today, and long
        row, setup = filed.row(), Setup(gpu=GPUS["h200"], **filed.setup)
        assert memory_of(llama_8b(), setup).allocated / GIB == pytest.approx(max(row["peak_memory_GiB"]), rel=0.03)
        assert seconds_of(llama_8b(), setup).total == pytest.approx(row["seconds_per_step"], rel=0.03)


def test_the_fitted_constants_are_those_of_the_profile() -> None:
    """Attention, matrix products and other kernels of the four-GPU profile, without what waits for other ranks."""
    model, setup = llama_8b(), Setup(gpu=GPUS["h200"], **FITTED[0].setup)
    profile = FITTED[0].row()["profile"]
    took = profile["milliseconds_by_kind"]
    waits = sum(ms for name, _, ms in profile["longest"] if "wait_signal" in name or "barrier_kernel" in name)
    forecast = seconds_of(model, setup)
    assert forecast.attention == pytest.approx(took["attention"] / 1000, rel=0.01)
    assert forecast.matrix_products == pytest.approx(took["matrix products"] / 1000, rel=0.01)
    assert forecast.elementwise == pytest.approx((took["other"] + took["loss"] - waits) / 1000, rel=0.04)
    first = FITTED[1].row()
    assert statistics.median(first["seconds"][2:]) == pytest.approx(first["seconds_per_step"])


def test_rates_of_a_layer_by_hand() -> None:
    model, setup = llama_8b(), Setup(gpu=GPUS["h200"], gpus=2, tokens=8192)
    assert attention_flops(model, model.layers[0], 8192) == (2 * 8192**2 * 4096, 5 * 8192**2 * 4096)
    assert matmul_flops(setup) == pytest.approx(0.664 * 989e12)
    lora_out, lora_in = 4096 * (1 + 0.25 + 0.25 + 1 + 3.5 + 3.5 + 1), 4096 * (6 + 3.5)
    rope, norms, residuals, gate = 10 * 5120, 2 * 18 * 4096, 6 * 4096, 5 * 14336
    assert (
        elementwise_numbers(model, model.layers[0], setup) == norms + residuals + rope + gate + 6 * lora_out + lora_in
    )
