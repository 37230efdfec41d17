"""Measured numbers that README.md and docs quote, each read from recipes/results.

A number is a median with its range, of one run at one commit. `VALUES` has phrases, `TABLES` whole tables; `docs_tools.fill`
writes both between their markers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from hf_ring_attn.bench import results
from hf_ring_attn.kernels.triton.blocks import TABLE

FILED = Path(__file__).resolve().parents[1] / "recipes" / "results"
RING, ULYSSES = "ring_fp32 ring pulls", "Ulysses, flash-attn-4"
K = 1024
DEPTHS = {
    layers: ("2026-11-23-depth", name)
    for layers, name in {2: "depth_2_16", 16: "depth_2_16", 64: "depth_64", 126: "depth_126"}.items()
}
"""The folder and the run of each number of layers."""


@cache
def run(folder: str, name: str) -> results.Run:
    """A filed run, by its folder and its name.

    Raises:
        KeyError: there is none.
    """
    found = {one.name: one for one in results.read(FILED / folder / results.FILE)}
    return found[name]


def row(folder: str, name: str, /, **fields: Any) -> dict[str, Any]:
    """The one row of a run that has these fields; with no rows, the run's head."""
    one = run(folder, name)
    rows = [each for each in one.rows or [one.head] if all(each.get(key) == value for key, value in fields.items())]
    assert len(rows) == 1, f"{folder}, {name}: {len(rows)} rows with {fields}"
    return rows[0]


def commit(folder: str, name: str) -> str:
    """Seven letters of the commit that ran, as Markdown code."""
    return f"`{run(folder, name).head['commit'][:7]}`"


def link(folder: str) -> str:
    """The folder's name as a link from a page of docs or its sub-folders."""
    return f"[{folder}]({{results}}/{folder}/README.md)"


# ---- attention -------------------------------------------------------------------------------------------------------


def share(folder: str, name: str, contender: str, tokens: int, part: str = "both") -> tuple[float, float, float]:
    """Speed a GPU over one GPU's in the same run, in percent: by medians, then the slowest and the fastest round."""
    one = row(folder, name, contender="one device", tokens=tokens)[part]
    mine = row(folder, name, contender=contender, tokens=tokens)[part]
    scale = mine["tflops"] * statistics.median(mine["seconds"])  # FLOPs a GPU
    shares = [scale / seconds / one["tflops"] * 100 for seconds in mine["seconds"]]
    return mine["share"] * 100, min(shares), max(shares)


def ranged(values: tuple[float, float, float]) -> str:
    """Writes "median (lowest to highest)"."""
    return "{:.0f} ({:.0f} to {:.0f})".format(*values)


SPEED_RUNS = {
    2: [
        ("2026-11-22-eight-ranks", "speed_before"),
        ("2026-11-22-eight-ranks", "speed"),
        ("2026-11-22-rooms", "speed"),
        ("2026-11-23-first-step", "speed-2"),
    ],
    4: [("2026-11-22-two-streams", "speed")],
}


def speed_table(gpus: int) -> str:
    """Forward and backward of attention as a share of one GPU's speed, one row a run."""
    lines = [
        "| commit, date | 32K | 64K | 128K | 256K | Ulysses, same run |",
        "|---|---|---|---|---|---|",
    ]
    for folder, name in SPEED_RUNS[gpus]:
        lengths = {each["tokens"] for each in run(folder, name).rows}
        cells, others = [], []
        for tokens in (32 * K, 64 * K, 128 * K, 256 * K):
            cells.append(ranged(share(folder, name, RING, tokens)) if tokens in lengths else "")
            if tokens in lengths and any(each["contender"] == ULYSSES for each in run(folder, name).rows):
                others.append(f"{share(folder, name, ULYSSES, tokens)[0]:.0f}")
        what = f"{commit(folder, name)}, [{run(folder, name).head['date']}]({{results}}/{folder}/README.md)"
        lines.append(f"| {what} | {' | '.join(cells)} | {' / '.join(others)} |")
    return "\n".join(lines + ([_hour_before()] if gpus == 4 else []))


def _hour_before() -> str:
    """The run of four GPUs that kept its medians alone."""
    folder, name = "2026-11-22-two-streams", "ring"
    lengths = [n * K for n in (32, 64, 128, 256)]

    def percent(way: str) -> list[float]:
        return [row(folder, name, way=way, tokens=n, heads="32/8x128")["both"]["percent"] for n in lengths]

    what = f"{commit(folder, name)}, [{run(folder, name).head['date']}, an hour before]({{results}}/{folder}/README.md)"
    mine, others = (" | ".join(f"{x:.0f}" for x in percent("both")), " / ".join(f"{x:.0f}" for x in percent("ulysses")))
    return f"| {what} | {mine} | {others} |"


def peers_table() -> str:
    """Every contender of the widest runs, both passes."""
    runs = [("2026-11-21-ring-of-two", "speed", 2), ("2026-11-22-four-gpus", "speed", 4)]
    names = {
        "ring_fp32 ring pulls": "**ring_fp32**, peer-to-peer copies",
        "ring_fp32 ring messages": "**ring_fp32**, NCCL messages",
        "Ulysses, flash-attn-4": "Ulysses, flash-attn-4",
        "torch CP, cuDNN": "torch context parallel, cuDNN",
        "torch CP, flash": "torch context parallel, flash",
        "ring-flash-attn zigzag": "ring-flash-attn, zigzag",
        "ring-flash-attn llama3": "ring-flash-attn, llama3",
    }
    lines = ["| GPUs, commit, date | contender | 32K | 64K | 128K |", "|---|---|---|---|---|"]
    for folder, name, gpus in runs:
        for contender, words in names.items():
            rows = {each["tokens"]: each for each in run(folder, name).rows if each["contender"] == contender}
            if rows:
                cells = [f"{rows[n * K]['both']['share'] * 100:.0f}" if n * K in rows else "" for n in (32, 64, 128)]
                day = f"[{run(folder, name).head['date']}]({{results}}/{folder}/README.md)"
                lines.append(f"| {gpus}, {commit(folder, name)}, {day} | {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- errors ----------------------------------------------------------------------------------------------------------


def triple(values: list[float], form: Callable[[float], str]) -> str:
    """Writes dq / dk / dv."""
    return " / ".join(form(value) for value in values)


def why_table() -> str:
    """Mismatch and error of gradients by ring size, with sums of three kinds."""
    lines = [
        "| ring size | rounded | mismatch dq / dk / dv | error dq / dk / dv |",
        "|---|---|---|---|",
    ]
    words = {"bf16 sums": "sums in bf16", "bf16 partials": "parts in bf16", "float32": "**nothing (`ring_fp32`)**"}
    for size in (2, 8, 16):
        for way, text in words.items():
            found = row("2026-11-21-why", "why", ring_size=size, way=way)
            mismatch = triple([100 * value for value in found["mismatch"]], "{:.1f}".format)
            error = triple([1000 * value for value in found["error_against_float64"]], "{:.1f}".format)
            lines.append(f"| {size} | {text} | {mismatch} % | {error} x 10⁻³ |")
    return "\n".join(lines)


def dk(size: int, way: str) -> float:
    """Error of dk against float64, in thousandths."""
    return float(row("2026-11-21-why", "why", ring_size=size, way=way)["error_against_float64"][1] * 1000)


def live_errors_table() -> str:
    """Real rings of four and eight processes."""
    lines = ["| ring | forward | mismatch dq / dk / dv | error over one GPU's |", "|---|---|---|---|"]
    for size in (4, 8):
        found = row(
            "2026-11-22-eight-ranks", f"errors_{size}", ring_size=size, dtype="bfloat16", inputs="outliers",
            way="ring_fp32 ring pulls",
        )  # fmt: skip
        bits = "the bits of one GPU" if found["forward_identical"] else "other bits"
        mismatch = triple([100 * found["mismatch"][name] for name in ("dq", "dk", "dv")], "{:.2f}".format)
        lines.append(f"| {size} | {bits} | {mismatch} % | {found['error_over_one_device']:.3f} |")
    return "\n".join(lines)


# ---- whole steps -----------------------------------------------------------------------------------------------------


def step(folder: str, name: str) -> dict[str, Any]:
    """The row of a run of recipes/long_context_lora/train.py."""
    return row(folder, name)


def seconds(folder: str, name: str) -> str:
    """Median seconds of the steps that the run's own program counts, with their range if there are several."""
    found = step(folder, name)
    if "not_timed" in run(folder, name).head:  # it says why
        return "not measured"
    median, times = found["seconds_per_step"], found["seconds"]
    counted = next((rest for n in (1, 2, 3) if (rest := times[n:]) and statistics.median(rest) == median), times[-1:])
    text = f"{median:.0f}" if median >= 100 else f"{median:.1f}" if median >= 10 else f"{median:.2f}"
    if len(counted) == 1:
        return text
    form = ".1f" if median >= 10 else ".2f"
    return f"{text} ({min(counted):{form}} to {max(counted):{form}})"


def gib(folder: str, name: str) -> str:
    """Peak memory of the fullest GPU."""
    peak = step(folder, name).get("peak_memory_GiB")
    return f"{max(peak):.1f}" if peak else "not recorded"


WHOLE, FOUR = "2026-11-23-whole-step", "2026-11-22-four-gpus"
LOSS, EIGHT, LONGEST = "2026-11-23-chunked-loss", "2026-11-22-eight-ranks", "2026-11-25-longest-rows"
H100, H100_FLASH4, H100_1M = "2026-11-25-two-h100", "2026-11-25-two-h100-flash4", "2026-11-25-two-h100-1m"
H100_32B, H100_256K = "2026-11-26-two-h100-32b", "2026-11-26-two-h100-256k"
H100_SHORT, H200_FULL = "2026-11-26-two-h100-short", "2026-11-26-one-h200-full"
BESIDE_OWN = "2026-11-26-two-h100-beside-own"
H100_AUTO, H100_DEFAULTS = "2026-11-27-two-h100-auto", "2026-11-27-two-h100-defaults"
WHOLE_FULL, FULL_1M = "2026-11-27-full-and-first-steps", "2026-11-27-full-1m"
NATIVE, LINEAR = "2026-11-27-default-allocator", "2026-11-27-linear-attention"
EXPERTS, ROWS, DPO = "2026-11-28-experts", "2026-11-28-any-loss", "2026-11-29-dpo-one-gpu"
TWO_8K, KEPT = "2026-11-29-two-gpus-8k", "2026-11-29-kept-layers"
BLOCKS, LONGEST_70B = "2026-11-27-ampere-blocks", "2026-11-30-longest-70b"
ONE_GPU, THREE = "2026-11-30-recipes-one-gpu", "2026-11-30-three-recipes"
MILLION, FULL_ON_TWO = "2026-11-30-million-and-pictures", "2026-11-30-full-1m-two-gpus"
ON_ONE, ON_TWO, AGAIN = "2026-11-24-one-gpu-step", "2026-11-24-two-gpu-steps", "2026-11-24-two-gpu-steps-2"
STEPS = [
    ("8K", "2 x H200", "", AGAIN, "ring_8K", "own_8K"),
    ("8K", "2 x H200", "Liger, no LoRA casts, no checkpointing", AGAIN, "ring_fast_8K", "own_fast_8K"),
    ("8K", "2 x H200", "compiled layers, no checkpointing", AGAIN, "ring_compiled_8K", "own_compiled_8K"),
    ("8K", "2 x H100, a slower host", "Liger, no LoRA casts, no checkpointing", H100_SHORT, "ring_fast_8K-3", "own_fast_8K-3"),
    ("32K", "2 x H200", "Liger, no LoRA casts, no checkpointing", ON_TWO, "ring_fast_32K", "own_fast_32K"),
    ("8K", "2 x H200", '`keep_layers="auto"`, Liger, no LoRA casts', KEPT, "ring_kept_8K", "own_fused_8K"),
    ("32K", "2 x H200", '`keep_layers="auto"`, Liger, no LoRA casts', KEPT, "ring_kept_32K", "own_fused_32K"),
    ("32K", "2 x H100", '`save_attention="auto"`, Liger, no LoRA casts', H100_DEFAULTS, "ring_auto_32K", "own_fused_32K"),
    ("32K", "2 x H200", '`save_attention="auto"`, Liger, no LoRA casts', ROWS, "ring_auto_32K", "own_fused_32K"),
    ("64K", "1 x H200", "one process, no option", ON_ONE, "plain_64K", ""),
    ("64K", "1 x H200", "one process, `mlp_tokens=8192`, `offload_above=2`", ON_ONE, "tiled_64K", ""),
    ("128K", "4 x H200", "", FOUR, "s128", "s128_own"),
    ("128K", "4 x H200", "`save_attention`", FOUR, "s128_saved", "s128_own"),
    ("128K", "2 x H100", '`save_attention="auto"`, SFTTrainer, Liger, no LoRA casts', H100_AUTO, "ring_auto_128K", "own_sft_128K"),
    ("128K", "1 x H200", "one process, `mlp_tokens=16384`, `offload_above=0`", ON_ONE, "offloaded_128K", ""),
    ("160K", "2 x H100", '`save_attention="auto"`, SFTTrainer, Liger, no LoRA casts', H100_DEFAULTS, "ring_auto_160K", ""),
    ("256K", "2 x H100", "`save_attention`, `mlp_tokens=16384`, `offload_above=24`, SFTTrainer, Liger, no LoRA casts", BESIDE_OWN, "ring_sft_256K", "own_sft_256K"),
    ("512K", "2 x H200", "`mlp_tokens=16384`, `save_attention`, `offload_above=8`", WHOLE, "ring_512K", ""),
    ("512K", "2 x H100", "`mlp_tokens=16384`, `offload_above=0`, Liger, no LoRA casts", H100_FLASH4, "lora_512K", ""),
    ("512K", "1 x H200", "one process, `mlp_tokens=16384`, `offload_above=60`", WHOLE, "one_512K", ""),
    ("1M", "2 x H200", "`mlp_tokens=16384`, `offload_above=48`", WHOLE, "ring_1M", ""),
    ("1M", "2 x H100", "`mlp_tokens=16384`, `offload_above=16`, Liger, no LoRA casts", H100_1M, "lora_1M", ""),
]  # fmt: skip
"""Tokens, GPUs, options of the ring; then folder, run of the ring, and run of accelerate's own if it was measured."""


def source(folder: str, name: str) -> str:
    """The commit of a run, and its date with a link to its page."""
    return f"{commit(folder, name)}, [{run(folder, name).head['date']}]({{results}}/{folder}/README.md)"


def table(header: str, rows: Iterable[tuple[object, ...]]) -> str:
    """A table in Markdown; ``header``: its titles, "a | b"."""
    lines = [header, "|".join(["---"] * (header.count("|") + 1)), *(" | ".join(map(str, cells)) for cells in rows)]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


def steps_table() -> str:
    """Whole steps of LoRA on an 8B shape, by length."""
    rows = (
        (
            tokens, gpus, options, seconds(folder, ring), f"{step(folder, ring)['mfu'] * 100:.0f} %", gib(folder, ring),
            *((seconds(folder, own), gib(folder, own)) if own else ("", "")), source(folder, ring),
        )
        for tokens, gpus, options, folder, ring, own in STEPS
    )  # fmt: skip
    return table(
        "tokens | GPUs | options | s a step | MFU | GiB a GPU | accelerate's own: s | GiB | commit, date", rows
    )


WITH_EXPERTS = [
    ("Qwen3 30B-A3B", "32K", "", "ring_a3b_32K", "own_a3b_32K"),
    ("Qwen3 30B-A3B", "128K", "", "ring_a3b_128K", ""),
    ("gpt-oss 20b", "32K", "Liger", "ring_oss_32K", ""),
    ("gpt-oss 20b", "128K", "Liger", "ring_oss_128K", ""),
]
"""Model, tokens, options; then the run of the ring, and that of accelerate's own if it was measured."""


def experts_table() -> str:
    """Whole steps of LoRA on models with experts."""
    rows = (
        (
            model, tokens, options, seconds(EXPERTS, ring), gib(EXPERTS, ring),
            *((seconds(EXPERTS, own), gib(EXPERTS, own)) if own else ("", "")),
        )
        for model, tokens, options, ring, own in WITH_EXPERTS
    )  # fmt: skip
    return table("model | tokens | options | s a step | GiB a GPU | accelerate's own: s | GiB", rows)


def compiled_table() -> str:
    """Short steps of both sides, with eager and with compiled layers."""
    kinds = (
        ("eager layers, checkpointing", ""),
        ("eager layers with Liger, no [LoRA casts](../performance/tuning.md), no checkpointing", "fast_"),
        ("whole layers compiled, no checkpointing", "compiled_"),
    )
    rows = ((what, *(seconds(AGAIN, f"{side}_{name}8K") for side in ("ring", "own"))) for what, name in kinds)
    return table("seconds a step | ring | accelerate's own context parallelism", rows)


def times(folder: str, slow: str, fast: str) -> float:
    """Seconds a step of one run over those of another."""
    return float(step(folder, slow)["seconds_per_step"] / step(folder, fast)["seconds_per_step"])


def chosen_over_dense(passes: str) -> str:
    """The time of attention to chosen keys over that of all keys, of 32,768 tokens."""
    found = row("2026-11-28-chosen-keys", "one_gpu", part="attention", tokens=32 * K)
    return f"{found[f'{passes}_ms'] / found[f'dense_{passes}_ms']:.2f}"


# ---- block sizes -----------------------------------------------------------------------------------------------------


LIKE = {"ampere": 80, "ada": 89}
"""The compute capability for which the kernels of a family were compiled and timed."""


def block_times(
    family: str, element_bytes: int, width: int, bias: bool = False
) -> dict[str, dict[tuple[int, ...], float]]:
    """Milliseconds of each pass by block sizes."""
    times: dict[str, dict[tuple[int, ...], float]] = {}
    for one in results.read(FILED / BLOCKS / results.FILE):
        for each in one.rows if one.head["compiled_for"] == LIKE[family] else []:
            if (each.get("element_bytes"), each.get("width"), each.get("bias")) == (element_bytes, width, bias):
                times.setdefault(each["pass"], {})[tuple(each["blocks"])] = each["milliseconds"]
    return times


def blocks_faster(family: str, element_bytes: int, width: int) -> str:
    """How often as fast the shipped blocks are as those for a GPU that was never measured."""
    times = block_times(family, element_bytes, width)
    never = TABLE["other", element_bytes, width]
    before = zip(("forward", "dk and dv", "dq"), (never.forward, never.keys, never.queries), strict=True)
    took = [(times[what][tuple(blocks)], min(times[what].values())) for what, blocks in before]
    return f"{sum(was for was, _ in took) / sum(now for _, now in took):.1f}"


# ---- models ----------------------------------------------------------------------------------------------------------


def support() -> dict[str, int]:
    """Classes of the sweep, by outcome."""
    (one,) = results.read(FILED / "support" / results.FILE)
    counts = {"exact": 0, "refused": 0, "not run": 0, "partly exact": 0}
    for each in one.rows:
        counts[status(each)] += 1
    return counts


def status(line: dict[str, Any]) -> str:
    """One word for a class: what all kinds of its rows had."""
    found = {said["status"] for said in line["outcomes"]}
    return "not run" if not found else found.pop() if len(found) == 1 else "partly exact"


# ---- phrases ---------------------------------------------------------------------------------------------------------


VALUES: dict[str, Callable[[], str]] = {
    "h100_1m_seconds": lambda: f"{step(H100_1M, 'lora_1M')['seconds_per_step']:,.0f} s",
    "h100_1m_gib": lambda: f"{gib(H100_1M, 'lora_1M')} GiB",
    "h100_qlora70_gib": lambda: gib(H100_FLASH4, "qlora70_128K"),
    "qlora70_gib": lambda: gib(LONGEST_70B, "qlora70_270K_window"),
    "qlora70_seconds": lambda: f"{by_layers(LONGEST_70B, 'qlora70_270K', 80):.0f}",
    "tower": lambda: _tower("vlm"),
    "tower_backward": lambda: _tower("vlm_tower_backward"),
    "qlora32_gib": lambda: gib(LONGEST_70B, "qlora_32b"),
    "qlora32_seconds": lambda: seconds(LONGEST_70B, "qlora_32b"),
    "host_checkpoints": lambda: f"{offload_costs():.1f} %",
    "host_checkpoints_gib": lambda: f"{gib(LONGEST_70B, 'lora_128k')} to {gib(LONGEST_70B, 'lora_128k_host')} GiB",
    "full_1m": lambda: (
        f"{step(FULL_ON_TWO, 'full_1m')['seconds_per_step']:,.0f} s and {gib(FULL_ON_TWO, 'full_1m')} GiB"
    ),
    "two_128k_median": lambda: f"{share(EIGHT, 'speed', RING, 128 * K)[0]:.1f} %",
    "two_128k_ulysses": lambda: f"{share(EIGHT, 'speed', ULYSSES, 128 * K)[0]:.1f} %",
    "spread_32k": lambda: f"{spread(32 * K):.0f}",
    "spread_128k": lambda: f"{spread(128 * K):.0f}",
    "packed_worst": lambda: f"{packed('zigzag')['work_worst']:.1f}",
    "packed_balanced": lambda: f"{packed('balanced')['work_worst']:.1f}",
    "cut_bytes": lambda: f"{cut_documents()['forward_bytes_share'] * 100:.1f} %",
    "own_32k": lambda: f"{step(ON_TWO, 'own_32K')['seconds_per_step']:.2f} s",
    "ring_32k": lambda: f"{step(ON_TWO, 'ring_32K')['seconds_per_step']:.2f} s",
    "full_256k": lambda: (
        f"{step(WHOLE_FULL, 'full_256K')['seconds_per_step']:.1f} s and {gib(WHOLE_FULL, 'full_256K')} GiB"
    ),
    "qwen35_32k": lambda: f"{step(LINEAR, 'q35_32K')['seconds_per_step']:.1f} s and {gib(LINEAR, 'q35_32K')} GiB a GPU",
    "dpo_32k": lambda: f"{step(DPO, 'ring_dpo_32K')['seconds_per_step']:.1f} s and {gib(DPO, 'ring_dpo_32K')} GiB",
    "dpo_8k": lambda: f"{step(TWO_8K, 'ring_dpo_8K')['seconds_per_step']:.2f} s and {gib(TWO_8K, 'ring_dpo_8K')} GiB",
    "a3b_32k": lambda: f"{step(EXPERTS, 'ring_a3b_32K')['seconds_per_step']:.2f} s",
    "a3b_32k_own": lambda: f"{step(EXPERTS, 'own_a3b_32K')['seconds_per_step']:.2f} s",
    "full_256k_auto": lambda: f"{step(FULL_1M, 'full_256K_auto')['seconds_per_step']:.1f} s",
    "32k_auto": lambda: f"{step(H100_DEFAULTS, 'ring_auto_32K')['seconds_per_step']:.2f} s",
    "32k_auto_gib": lambda: f"{gib(H100_DEFAULTS, 'ring_auto_32K')} GiB",
    "32k_own_fused": lambda: f"{step(H100_DEFAULTS, 'own_fused_32K')['seconds_per_step']:.2f} s",
    "32k_own_fused_gib": lambda: f"{gib(H100_DEFAULTS, 'own_fused_32K')} GiB",
    "32k_kept": lambda: f"{step(KEPT, 'ring_kept_32K')['seconds_per_step']:.2f} s",
    "32k_kept_gib": lambda: f"{gib(KEPT, 'ring_kept_32K')} GiB",
    "32k_kept_own": lambda: f"{step(KEPT, 'own_fused_32K')['seconds_per_step']:.2f} s",
    "32k_kept_own_gib": lambda: f"{gib(KEPT, 'own_fused_32K')} GiB",
    "32k_not_kept": lambda: f"{step(KEPT, 'ring_auto_32K')['seconds_per_step']:.2f} s",
    "32k_not_kept_gib": lambda: f"{gib(KEPT, 'ring_auto_32K')} GiB",
    "8k_own": lambda: f"{step(AGAIN, 'own_fast_8K')['seconds_per_step']:.2f} s",
    "8k_ring": lambda: f"{step(AGAIN, 'ring_fast_8K')['seconds_per_step']:.2f} s",
    "128k_auto_own": lambda: f"{seconds(H100_AUTO, 'own_sft_128K')} s",
    "128k_auto_own_gib": lambda: f"{gib(H100_AUTO, 'own_sft_128K')} GiB",
    "128k_auto": lambda: f"{seconds(H100_AUTO, 'ring_auto_128K')} s",
    "128k_auto_gib": lambda: f"{gib(H100_AUTO, 'ring_auto_128K')} GiB",
    "256k_own": lambda: f"{seconds(BESIDE_OWN, 'own_sft_256K')} s",
    "256k_own_gib": lambda: f"{gib(BESIDE_OWN, 'own_sft_256K')} GiB",
    "256k_ring": lambda: f"{seconds(BESIDE_OWN, 'ring_sft_256K')} s",
    "256k_ring_gib": lambda: f"{gib(BESIDE_OWN, 'ring_sft_256K')} GiB",
    "128k_own": lambda: f"{seconds(FOUR, 's128_own')} s",
    "128k_own_gib": lambda: f"{gib(FOUR, 's128_own')} GiB",
    "128k_saved": lambda: f"{seconds(FOUR, 's128_saved')} s",
    "128k_saved_gib": lambda: f"{gib(FOUR, 's128_saved')} GiB",
    "128k_ring": lambda: f"{seconds(FOUR, 's128')} s",
    "128k_ring_gib": lambda: f"{gib(FOUR, 's128')} GiB",
    "ring_64": lambda: f"{replayed('ring_fp32', 64):.2f}",
    "parts_64": lambda: f"{replayed('rounded parts', 64):.2f}",
    "sums_64": lambda: f"{replayed('16-bit sums', 64):.2f}",
    "ring_by_size": lambda: " / ".join(f"{replayed('ring_fp32', size):.2f}" for size in (4, 16, 64)),
    "parts_by_size": lambda: " / ".join(f"{replayed('rounded parts', size):.2f}" for size in (4, 16, 64)),
    "support_all": lambda: str(sum(support().values())),
    "support_exact": lambda: str(support()["exact"]),
    "support_refused": lambda: str(support()["refused"]),
    "support_not_run": lambda: str(support()["not run"]),
    "loss_chunked_gib": lambda: f"{gib(LOSS, 'chunked_8K')} GiB",
    "loss_sharded_gib": lambda: f"{gib(LOSS, 'sharded_8K')} GiB",
    "loss_rows_gib": lambda: f"{gib(ROWS, 'ring_rows_32K')} GiB",
    "loss_auto_gib": lambda: f"{gib(ROWS, 'ring_auto_32K')} GiB",
    "loss_rows_more": lambda: f"{times(ROWS, 'ring_rows_32K', 'ring_auto_32K') * 100 - 100:.0f} %",
    "chosen_forward": lambda: chosen_over_dense("forward"),
    "chosen_both": lambda: chosen_over_dense("both"),
    "blocks_ampere": lambda: blocks_faster("ampere", 2, 128),
    "blocks_ada": lambda: blocks_faster("ada", 2, 128),
    "plain_64k_gib": lambda: f"{gib(ON_ONE, 'plain_64K')} GiB",
    "tiled_64k_gib": lambda: f"{gib(ON_ONE, 'tiled_64K')} GiB",
    "tiled_64k_slower": lambda: f"{(1 / times(ON_ONE, 'plain_64K', 'tiled_64K') - 1) * 100:.1f} %",
    "plan_memory_runs": lambda: str(len(forecast_rows())),
    "plan_within": lambda: PLAN_WITHIN,
}


PLAN_WITHIN = "7 %"
"""How far, at most, a forecast of memory in `forecast_rows` is off."""


def forecast_rows() -> dict[str, bool]:
    """The filed steps of the page of plan, and if their time is compared."""
    text = (FILED / "2026-11-23-plan" / "README.md").read_text()
    rows = re.findall(r"^\| (.+? `[\w-]+`.*?) \|.*\| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    return {name: bool(re.fullmatch(r"[+-]?\d+ %", percent)) for name, _, percent in rows}


def by_layers(folder: str, name: str, layers: int) -> float:
    """Seconds a step of all layers, from steps of one layer and of two."""
    one, two = (step(folder, f"{name}_{part}")["seconds_per_step"] for part in ("layer", "layers"))
    return float(one + (layers - 1) * (two - one))


def offload_costs() -> float:
    """By how many percent a step of 128K in a ring is longer with its checkpoints on the host."""
    plain, host = (step(LONGEST_70B, name)["seconds_per_step"] for name in ("lora_128k", "lora_128k_host"))
    return 100 * float(host / plain - 1)


def spread(tokens: int) -> float:
    """Points between the highest and the lowest median of the runs on two GPUs."""
    medians = [share(folder, name, RING, tokens)[0] for folder, name in SPEED_RUNS[2]]
    return max(medians) - min(medians)


def packed(layout: str) -> dict[str, Any]:
    """Work of packed files on eight ranks."""
    return row("2026-11-21-balance", "traffic", mask="packed files", ring=8, layout=layout)


def cut_documents() -> dict[str, Any]:
    """Bytes of documents cut at 4096 tokens, on eight ranks."""
    return row("2026-11-21-traffic", "traffic", mask="packed files, cut at 4096", ring=8)


def replayed(way: str, size: int) -> float:
    """Error of gradients over one GPU's in a ring of ``size``, bf16, inputs with outliers."""
    found = row("2026-11-21-ring-of-two", "errors_flash4", ring_size=size, dtype="bfloat16", inputs="outliers", way=way)
    return float(found["error_over_one_device"])


def eight() -> dict[str, Any]:
    """The live ring of eight: bf16, inputs with outliers."""
    return row(
        "2026-11-22-eight-ranks", "errors_8", ring_size=8, dtype="bfloat16", inputs="outliers",
        way="ring_fp32 ring pulls",
    )  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "speed_two": lambda: speed_table(2),
    "speed_four": lambda: speed_table(4),
    "peers": peers_table,
    "why": why_table,
    "live_errors": live_errors_table,
    "steps": steps_table,
    "steps.compiled": compiled_table,
    "steps.experts": experts_table,
}


def _tower(run: str) -> str:
    return f"{step(ONE_GPU, run)['seconds_per_step']:.1f} s and {gib(ONE_GPU, run)} GiB"
