"""Forecasts beside measured steps of recipes/results (`filed_steps.py`)."""

from __future__ import annotations

import re
import statistics

import pytest

from docs_tools import numbers
from hf_ring_attn.bench.results import FILE, read
from hf_ring_attn.plan.hardware import ATTENTION, DELTA_RULES, ELEMENTWISE, GIB, GPUS
from hf_ring_attn.plan.memory import memory_of
from hf_ring_attn.plan.seconds import attention_flops, elementwise_numbers, matmul_flops, seconds_of
from hf_ring_attn.plan.setup import Setup
from tests.plan.filed_steps import ALL, AT_416K, FITTED, H100_32B, HELD_OUT, LINEAR, RESULTS, Filed
from tests.plan.shapes import QWEN3_32B, llama_8b

MOST_MEMORY, MOST_SECONDS = 0.10, 0.15


@pytest.mark.parametrize("filed", ALL, ids=lambda filed: f"{filed.folder[5:]} {filed.run}")
def test_a_filed_step_is_forecast(filed: Filed) -> None:
    row, (memory_gib, seconds) = filed.row(), filed.forecast()
    assert row["ranks"] == filed.setup["gpus"]
    assert memory_gib == pytest.approx(max(row["peak_memory_GiB"]), rel=MOST_MEMORY)
    if filed.is_timed:
        assert "not_timed" not in filed.filed().head
        assert seconds == pytest.approx(row["seconds_per_step"], rel=MOST_SECONDS)


def test_the_newest_runs_are_forecast_within_three_percent() -> None:
    for filed in HELD_OUT[1:3]:  # both of the code and the loss of today, and long
        row, (memory_gib, seconds) = filed.row(), filed.forecast()
        assert memory_gib == pytest.approx(max(row["peak_memory_GiB"]), rel=0.03)
        assert not filed.is_timed or seconds == pytest.approx(row["seconds_per_step"], rel=0.03)


def test_what_a_run_with_a_window_held_more_is_what_was_mended_after_it() -> None:
    """dq of all heads in float32, where full attention has a group of two of eight; the embeddings of the row."""
    window = Filed(H100_32B, "qlora32_416K_window", {**AT_416K, "offload_above": 26.0}, shape=QWEN3_32B, gpu="h100")
    memory = memory_of(window.model(), Setup(gpu=GPUS["h100"], **window.setup))
    tokens = window.setup["tokens"] // 2
    more = tokens * (64 * 128 * 4 * 6 / 8 + 5120 * 2)
    held = sum(memory.always.values()) + sum(memory.moments["backward of the last layer's attention"].values()) + more
    assert held / GIB == pytest.approx(max(window.row()["peak_memory_GiB"]), rel=0.01)
    assert memory.allocated < held


def test_the_page_has_these_forecasts_and_the_index_their_number_and_bounds() -> None:
    text = (RESULTS / "2026-11-23-plan/README.md").read_text()
    table = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| .+ `[\w-]+`.* \|", line)]
    cells = {(line[0].split("`")[0].strip(), line[0].split("`")[1]): line[1:] for line in table}
    assert len(cells) == len(table) == len(ALL)
    for filed in ALL:
        name = filed.folder.removeprefix("2026-11-").split("-", 1)[1]
        (found,) = [line for (where, run), line in cells.items() if run == filed.run and where.split(",")[0] == name]
        pairs = [(found[0], filed.forecast()[0], max(filed.row()["peak_memory_GiB"]))]
        if filed.is_timed:
            pairs.append((found[2], filed.forecast()[1], filed.row()["seconds_per_step"]))
        for cell, *values in pairs:
            for written, value in zip(cell.strip().split(" / "), values, strict=True):
                digits = len(written.partition(".")[2])
                assert float(written) == pytest.approx(value, abs=0.51 * 10**-digits), (filed.run, written, value)
    timed = [filed for filed in ALL if filed.is_timed]
    measured = [max(filed.row()["peak_memory_GiB"]) for filed in ALL]
    memory = [filed.forecast()[0] / gib - 1 for filed, gib in zip(ALL, measured, strict=True)]
    seconds = max(abs(filed.forecast()[1] / filed.row()["seconds_per_step"] - 1) for filed in timed)
    assert max(map(abs, memory)) <= 0.07 and numbers.PLAN_WITHIN == "7 %"  # the part that --max-tokens leaves free
    is_timed = numbers.forecast_rows().values()
    assert seconds <= 0.12 and (len(is_timed), sum(is_timed)) == (len(ALL), len(timed))


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


def test_the_speed_of_triton_is_the_filed_one() -> None:
    speed, wide = (run for run in read(RESULTS / "2026-11-21-triton" / FILE) if run.name in ("speed", "wide"))
    cases = {
        64: "causal, 32K, 64/8 x 64", 80: "causal, 32K, 32/8 x 80", 96: "causal, 32K, 32/8 x 96",
        128: "causal, 128K, 32/8 x 128", 192: "causal, 32K, 32/32 x 192/128", 256: "causal, 32K, 16/8 x 256",
    }  # fmt: skip
    assert set(ATTENTION["triton"]) == {*cases, 512}
    for width, case in cases.items():
        rates = [
            next(row["tflops"] for row in speed.rows if (row["what"], row["kernel"]) == (case, f"triton {way}"))
            for way in ("forward", "backward")
        ]
        assert ATTENTION["triton"][width] == pytest.approx([rate / GPUS["h200"].tflops for rate in rates], abs=6e-4)
    of_512 = [row for row in wide.rows if (row.get("bytes"), row.get("width")) == (2, 512)]
    fastest = {row["pass"]: row["blocks_and_ms"][0][-1] / 1000 for row in of_512}
    product = 2 * 16 * 512 * 8192**2 / 2  # of a causal row of 8K, 16 heads
    times = (2, fastest["forward"]), (5, sum(fastest[part] for part in ("dk", "dv", "dq")))
    shares = [count * product / seconds / (1e12 * GPUS["h200"].tflops) for count, seconds in times]
    assert ATTENTION["triton"][512] == pytest.approx(shares, abs=6e-4)


def test_rates_of_a_layer_by_hand() -> None:
    model, setup = llama_8b(), Setup(gpu=GPUS["h200"], gpus=2, tokens=8192)
    assert attention_flops(model.layers[0], 8192) == (2 * 8192**2 * 4096, 5 * 8192**2 * 4096)
    assert matmul_flops(setup) == pytest.approx(0.664 * 989e12)
    lora_out, lora_in = 4096 * (1 + 0.25 + 0.25 + 1 + 3.5 + 3.5 + 1), 4096 * (6 + 3.5)
    rope, norms, residuals, gate = 10 * 5120, 2 * 18 * 4096, 6 * 4096, 5 * 14336
    assert (
        elementwise_numbers(model, model.layers[0], setup) == norms + residuals + rope + gate + 6 * lora_out + lora_in
    )


def test_the_speed_of_linear_attention_is_the_filed_one() -> None:
    (scan,) = [run for run in read(RESULTS / LINEAR / FILE) if run.name == "scan"]
    (row,) = [row for row in scan.rows if row["kind"] == "gdr" and row["tokens"] == 131072]
    forward, both = (row[name] * 1e6 / row["tokens"] for name in ("forward_ms", "both_ms"))
    speed = DELTA_RULES["by head"][(row["heads"], row["width"])]
    assert speed == pytest.approx((forward, both - forward), rel=0.01)


def test_the_convolution_of_linear_attention_takes_as_long_as_filed() -> None:
    """By the bytes of 18 numbers of a channel: the forward; its recompute and the backward are 2.3 more of them."""
    (scan,) = [run for run in read(RESULTS / LINEAR / FILE) if run.name == "scan"]
    gpu = GPUS["h100"]
    for row in scan.rows:
        if row["kind"] == "conv" and row["tokens"] > 8192:
            moved = 18 * 2 * row["tokens"] * 2 * row["width"] * row["heads"]
            assert 1e3 * moved / (ELEMENTWISE * gpu.bandwidth_gbs * 1e9) == pytest.approx(row["forward_ms"], rel=0.08)
