"""The index of recipes/results: one row a folder, each number computed from its rows and named with its commit."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from . import numbers
from .numbers import (
    AGAIN,
    BESIDE_OWN,
    EIGHT,
    FILED,
    FOUR,
    FULL_1M,
    H100,
    H100_1M,
    H100_32B,
    H100_256K,
    H100_AUTO,
    H100_DEFAULTS,
    H100_FLASH4,
    H100_SHORT,
    H200_FULL,
    LONGEST,
    LOSS,
    NATIVE,
    ON_ONE,
    ON_TWO,
    RING,
    TWO_STREAMS,
    WHOLE,
    WHOLE_FULL,
    K,
    commit,
    dk,
    gib,
    row,
    run,
    share,
    step,
    support,
    times,
)
from .recipes import QLORA

Number = tuple[str, Callable[[], str]]
"""A run and what it measured."""


class Row(NamedTuple):
    """A question, and the numbers that answer it."""

    question: str
    folder: str
    command: str
    numbers: list[Number]


def speeds(folder: str, name: str, *lengths: int) -> Number:
    """Speed a GPU over one GPU's, both passes, by thousands of tokens."""

    def text() -> str:
        shares = " / ".join(f"{share(folder, name, RING, n * K)[0]:.1f}" for n in lengths)
        return f"{shares} % of one GPU at {' / '.join(f'{n}K' for n in lengths)}"

    return name, text


def a_step(folder: str, name: str, words: str) -> Number:
    """Seconds and memory of a whole step."""
    return name, lambda: f"{words} {step(folder, name)['seconds_per_step']:,.0f} s, {gib(folder, name)} GiB"


def faster(folder: str, slow: str, fast: str, words: str) -> Number:
    """Time of accelerate's own over a ring's."""
    return fast, lambda: f"{words} {times(folder, slow, fast):.2f} times as fast as accelerate's own"


def mismatch(folder: str, name: str, **fields: object) -> float:
    """Largest mismatch of output and gradients, in percent."""
    return max(float(x) for x in row(folder, name, **fields)["mismatch"].values()) * 100


def found(run_name: str, model: str) -> float:
    """Numbers of 100 that a model of the context extension finds at its longest rows."""
    rows = run("2026-11-24-context-extension", run_name).rows
    return sum(20 * float(each["found"]) for each in rows if each["model"] == model and each.get("length") == 8192)


def far(run_name: str, model: str) -> float:
    """Loss of a model of the context extension at its last positions."""
    name = "2026-11-24-context-extension"
    return float(row(name, run_name, model=model, measure="loss", to=8191)["loss"])


def milliseconds(folder: str, name: str, kernel: str) -> tuple[float, float]:
    """Forward and backward of learned slopes at 32K tokens."""
    each = row(folder, name, function="learned ALiBi slopes", kernel=kernel, tokens=32 * K)
    return statistics.median(each["forward_ms"]), statistics.median(each["backward_ms"])


def deepest() -> float:
    """Largest error of a stack's gradient over one device's, over depths."""
    return max(
        float(row(folder, name, depth=depth, way="ring_fp32", ring_size=8)["over_one_device"])
        for depth, (folder, name) in numbers.DEPTHS.items()
    )


def eight_ranks() -> float:
    """Largest error of a live ring of eight over one device's."""
    rows = [each for each in run(EIGHT, "errors_8").rows if each["way"] == "ring_fp32 ring pulls"]
    return max(float(each["error_over_one_device"]) for each in rows)


def first(name: str) -> float:
    """Seconds of a run's first step."""
    return float(step("2026-11-23-first-step", name)["seconds"][0])


WHY, DEPTH, ONE, PARITY = "2026-11-21-why", "2026-11-23-depth", "2026-11-22-one-gpu", "2026-11-23-logprob-parity"
TWO, ROOMS, FIRST, HEADS = (
    "2026-11-21-ring-of-two",
    "2026-11-22-rooms",
    "2026-11-23-first-step",
    "2026-11-22-head-groups",
)
PULLS, FLASH4, TRITON, FLEX = "2026-11-21-pulls", "2026-11-20-flash4", "2026-11-21-triton", "2026-11-21-flex"
BIAS, TRAFFIC, BALANCE, BLOCKWISE = (
    "2026-11-22-bias",
    "2026-11-21-traffic",
    "2026-11-21-balance",
    "2026-11-21-blockwise",
)
LIGHT, GPUS_21, GPUS_22, PLAN = (
    "2026-11-21-first-light",
    "2026-11-21-two-gpus",
    "2026-11-22-two-gpus",
    "2026-11-23-plan",
)
EXTENSION = "2026-11-24-context-extension"
PACKED = {"mask": "packed files", "ring": 8}


def _triton(what: str) -> float:
    return float(row(TRITON, "speed", what="causal, 32K, 32/8 x 128", kernel=f"triton {what}")["tflops"])


def _heads(name: str) -> str:
    return f"forward of 192/128 at {row(HEADS, name, contender=RING, tokens=32 * K)['forward']['share'] * 100:.0f} % of one GPU"


def _flash4() -> str:
    each = row(FLASH4, "speed", name="causal 32K")
    mine, stock = (
        f"{each[a]:.0f} / {each[b]:.0f}" for a, b in (("forward", "backward"), ("stock forward", "stock backward"))
    )
    return f"{mine} TFLOP/s at 32K, stock {stock}"


def _bias() -> str:
    triton, flex = (sum(milliseconds(BIAS, "score_mod", kernel)) for kernel in ("triton", "flex"))
    return f"{triton / flex:.2f} of flex's time, learned slopes at 32K"


def _pulls() -> str:
    each = row(PULLS, "neighbours", MiB=64)
    return f"64 MiB in {each['copy_ms']:.3f} ms, NCCL {each['messages_ms']:.3f} ms"


def _worst() -> str:
    zigzag, balanced = (row(BALANCE, "traffic", layout=name, **PACKED)["work_worst"] for name in ("zigzag", "balanced"))
    return f"worst row of 8 ranks {zigzag:.1f} -> {balanced:.1f} times the mean"


def _norms() -> str:
    wrong, right = (step(GPUS_21, name)["grad_norms"][0] for name in ("fsdp2_ring2_32k", "fsdp2_ring2_32k_triton"))
    return f"gradient norm {(1 - wrong / right) * 100:.1f} % too small"


def _light(name: str) -> str:
    head = run(LIGHT, name).head
    if name == "import":
        return f"import {head['median_seconds']:.2f} s"
    return f"step {head['median_ratio_to_bare_kernel']['ring_fp32, shard(batch)']:.2f} of the bare kernel"


def _parity() -> str:
    rows = [each for name in ("ring_2", "ring_4", "ring_8") for each in run(PARITY, name).rows if "log_probs" in each]
    tokens, same = rows[0]["log_probs"]["tokens"], min(each["log_probs"]["same_bits"] for each in rows)
    kernels = len({each["kernel"] for each in rows})
    return f"rings of 2, 4 and 8, {kernels} kernels: {same * 100:.0f} % of {tokens:,} have one device's bits"


def _live() -> str:
    worst = mismatch(TWO, "errors_live", inputs="outliers", dtype="bfloat16", way="ring_fp32 ring", ring_size=2)
    return f"mismatch {worst:.2f} % in bf16"


def _pr821() -> str:
    return f"PR 821's case {mismatch(ONE, 'pr821', way='ring_fp32'):.2f} %"


def _flex() -> str:
    return "{:.0f} / {:.0f} ms at 32K, learned slopes".format(*milliseconds(FLEX, "speed", "flex"))


def _fault() -> str:
    fault = row(BLOCKWISE, "errors", way="the fault: ring of 8, chunks of 159")["dq"]["max"]
    return f"dq {row(BLOCKWISE, 'errors', way='ring of 8')['dq']['max']:.3f} off in bf16; with the planted fault {fault:.2f}"


def _window() -> str:
    each = row(TRAFFIC, "traffic", mask="Mistral's window of 4096", ring=8)
    return f"a window of 4096 moves {each['forward_bytes_share'] * 100:.1f} % of a gather"


def _loss() -> str:
    pair = [
        f"{gib(LOSS, name)} GiB, {numbers.seconds(LOSS, name).split(' ')[0]} s" for name in ("sharded_8K", "chunked_8K")
    ]
    return f"at 8K all logits {pair[0]}; chunks {pair[1]}"


def _offloading() -> float:
    """How much longer a step takes that offloads all checkpoints, in percent."""
    kept, away = (step(ON_ONE, name)["seconds_per_step"] for name in ("kept_128K", "offloaded_128K"))
    return float(away / kept - 1) * 100


def _classes() -> str:
    counts = support()
    return f"{counts['exact']} classes exact, {counts['refused']} refused"


ROWS = [
    Row("Which models are exact?", "support", "`python -m tests.sweep.run --ring 2 4 --rows all`", [("support", _classes)]),
    Row("What do rounded sums lose?", WHY, "`recipes/benchmarks/why.py --length 2048`",
        [("why", lambda: f"error of dk at ring 16: {dk(16, 'bf16 sums'):.1f}e-3 (bf16 sums), {dk(16, 'float32'):.1f}e-3 (float32)")]),
    Row("How does error grow with depth?", DEPTH, "`recipes/benchmarks/depth.py`",
        [("depth_126", lambda: f"at most {deepest():.2f} of one device's error")]),
    Row("What does one GPU allow? Mismatch, long rows, wide heads", ONE, "`bench`, `depth.py`, `long_row.py`",
        [("pr821", _pr821)]),
    Row("Are log-probabilities one device's?", PARITY, "`recipes/benchmarks/logprob_parity.py`", [("ring_8", _parity)]),
    Row("Does a context extension learn?", EXTENSION, "`recipes/extend-context/learn.py`",
        [("seed_0", lambda: f"at 4 times the length: loss {far('seed_0', 'base'):.2f} -> {far('seed_0', 'extended'):.2f}, numbers found "
                            f"{found('seed_0', 'base'):.0f} -> {found('seed_0', 'extended'):.0f} of 100"),
         ("ring_of_2", lambda: f"a ring of two: loss {far('ring_of_2', 'extended'):.3f}, {far('seed_0', 'extended'):.3f} without")]),
    Row("How long a row does QLoRA of 32B and 70B train on one H200?", QLORA, "`train.py --qlora`",
        [a_step(QLORA, "q32_128K", "32B: 131,072 tokens,"), a_step(QLORA, "q70_56K", "70B: 57,344 tokens,")]),
    Row("What do chunks and offloading give one GPU, and what do they change?", ON_ONE, "`train.py`",
        [a_step(ON_ONE, "plain_64K", "64K, no option:"), a_step(ON_ONE, "tiled_64K", "chunks, offloading:"),
         ("offloaded_128K", lambda: f"offloading at 128K costs {_offloading():.1f} %")]),
    Row("How long do the longest rows of full fine-tuning and QLoRA take on two GPUs?", LONGEST, "`whole_steps.py`, 2 GPUs",
        [("full_1M_layers", lambda: f"all weights at 1M: 32 layers {numbers.by_layers('full_1M', 32):,.0f} s, from one layer and two"),
         ("qlora32_280K_layers", lambda: f"32B QLoRA at 280K, weights not sharded: {numbers.by_layers('qlora32_280K', 64):,.0f} s, likewise")]),
    Row("Do the forecasts of memory hold on two H100, and does QLoRA of 70B fit there?", H100, "`whole_steps.py`, 2 GPUs",
        [a_step(H100, "qlora70_128K", "70B: 131,072 tokens, kernel `triton`,")]),
    Row("How long are whole steps on two H100 with flash4, and how long a row fits?", H100_FLASH4, "`whole_steps.py`, 2 GPUs",
        [a_step(H100_FLASH4, "ring_fast_128K", "128K:"), a_step(H100_FLASH4, "lora_512K", "512K (first step):"),
         a_step(H100_FLASH4, "qlora70_128K", "70B QLoRA at 128K (first step):")]),
    Row("How long a row of a 32B model fits two GPUs of 80 GB, and what is in memory?", H100_32B, "`whole_steps.py`, 2 GPUs",
        [("qlora32_416K_layers", lambda: f"QLoRA of 64 layers at 416K {numbers.by_layers('qlora32_416K', 64, H100_32B):,.0f} s, from one layer and two"),
         ("qlora32_416K_window", lambda: f"with a window {gib(H100_32B, 'qlora32_416K_window')} GiB a GPU"),
         ("ring_fast_8K", lambda: f"8K {step(H100_32B, 'ring_fast_8K')['seconds_per_step']:.2f} s, accelerate's own "
                                  f"{step(H100_32B, 'own_fast_8K')['seconds_per_step']:.2f} s")]),
    Row("How long is a whole step of a 32B model at 256K tokens on two GPUs of 80 GB?", H100_256K, "`whole_steps.py`, 2 GPUs",
        [a_step(H100_256K, "qlora32_256K", "QLoRA at 256K (first step):"),
         ("qlora32_416K_window", lambda: f"at 416K with a window {gib(H100_256K, 'qlora32_416K_window')} GiB a GPU")]),
    Row("How fast are whole steps at 8K and 32K on two H100, beside accelerate's own?", H100_SHORT, "`whole_steps.py`, 2 GPUs",
        [("ring_fast_8K", lambda: f"8K: {times(H100_SHORT, 'own_fast_8K', 'ring_fast_8K'):.2f} times as fast with the same options"),
         ("ring_fast_8K-3", lambda: f"{times(H100_SHORT, 'own_fast_8K-3', 'ring_fast_8K-3'):.2f} times on a slower host, "
                                    f"{times(H100_SHORT, 'own_8K', 'ring_fast_8K-3'):.2f} times its defaults"),
         ("ring_fast_8K-4", lambda: f"{times(H100_SHORT, 'own_fast_8K-4', 'ring_fast_8K-4'):.2f} times since attention takes less host time"),
         ("ring_fused_32K", lambda: f"32K: {times(H100_SHORT, 'own_fused_32K', 'ring_fused_32K'):.2f} times with the same options"),
         ("ring_saved_32K", lambda: f"with `save_attention` {times(H100_SHORT, 'own_fused_32K', 'ring_saved_32K'):.2f} times, "
                                    f"and {times(H100_SHORT, 'own_32K', 'ring_saved_32K'):.2f} times its defaults")]),
    Row("How fast are whole steps at 128K on two H100 with default options, beside accelerate's own?", H100_AUTO, "`whole_steps.py`, 2 GPUs",
        [("ring_auto_128K", lambda: f"128K: {times(H100_AUTO, 'own_sft_128K', 'ring_auto_128K'):.2f} times as fast, "
                                    f"{gib(H100_AUTO, 'ring_auto_128K')} GiB a GPU for {gib(H100_AUTO, 'own_sft_128K')}"),
         ("ring_fast_8K", lambda: f"8K: {times(H100_AUTO, 'own_fast_8K', 'ring_fast_8K'):.2f} times with the same options, "
                                  f"{times(H100_AUTO, 'own_sft_8K', 'ring_sft_8K'):.2f} by SFTTrainer")]),
    Row("How fast are whole steps at 32K with default options, and does \"auto\" save attention near a full GPU?", H100_DEFAULTS, "`whole_steps.py`, 2 GPUs",
        [("ring_auto_32K", lambda: f"32K: {times(H100_DEFAULTS, 'own_fused_32K', 'ring_auto_32K'):.2f} times as fast, "
                                   f"{gib(H100_DEFAULTS, 'ring_auto_32K')} GiB a GPU for {gib(H100_DEFAULTS, 'own_fused_32K')}"),
         ("ring_fast_8K", lambda: f"8K: {times(H100_DEFAULTS, 'own_fast_8K', 'ring_fast_8K'):.2f} times with the same options, "
                                  f"{times(H100_DEFAULTS, 'own_sft_8K', 'ring_sft_8K'):.2f} by SFTTrainer"),
         a_step(H100_DEFAULTS, "ring_auto_160K", "160K:")]),
    Row("How fast are whole steps at 256K on two H100, beside accelerate's own?", BESIDE_OWN, "`whole_steps.py`, 2 GPUs",
        [("ring_sft_256K", lambda: f"256K: {times(BESIDE_OWN, 'own_sft_256K', 'ring_sft_256K'):.2f} times as fast, "
                                   f"{gib(BESIDE_OWN, 'ring_sft_256K')} GiB a GPU for {gib(BESIDE_OWN, 'own_sft_256K')}")]),
    Row("Full fine-tuning of a whole model at 1M on two GPUs; \"auto\" with checkpoints in host memory", FULL_1M, "long_context_lora, 2 GPUs",
        [a_step(FULL_1M, "full_1M", "all weights, 1M (first step):"), a_step(FULL_1M, "full_256K_auto", "256K:")]),
    Row("Full fine-tuning of a whole model at 256K; \"auto\" with torch's default allocator; where a first step's time goes", WHOLE_FULL, "long_context_lora, 2 GPUs",
        [a_step(WHOLE_FULL, "full_256K", "all weights, 256K:"), a_step(WHOLE_FULL, "native_160K", "LoRA, 160K, default allocator:")]),
    Row("Does \"auto\" save attention near a full GPU with torch's default allocator?", NATIVE, "long_context_lora, 2 GPUs",
        [a_step(NATIVE, "native_auto_160K", "LoRA, 160K:")]),
    Row("How much memory does full fine-tuning take with 524,288 tokens a GPU?", H200_FULL, "`whole_steps.py`, 1 GPU",
        [a_step(H200_FULL, "full_512K_window", "32 layers with a window of 4096:")]),
    Row("Do a million tokens fit two GPUs of 80 GB, and why are first steps longer?", H100_1M, "`whole_steps.py`, 2 GPUs",
        [a_step(H100_1M, "lora_1M", "1M LoRA (first step):"),
         ("qlora70_quarter", lambda: f"20 layers of 70B: {step(H100_1M, 'qlora70_quarter')['seconds'][0]:.0f} s, then "
                                     f"{step(H100_1M, 'qlora70_quarter')['seconds_per_step']:.0f} s")]),
    Row("The same with short attention in one piece; 128K on both sides", AGAIN, "`whole_steps.py`, `host_time.py`, 2 GPUs",
        [("ring_fast_8K", lambda: f"8K, no checkpointing: {times(AGAIN, 'own_fast_8K', 'ring_fast_8K'):.2f} times as fast as accelerate's own"),
         ("ring_compiled_8K", lambda: f"compiled: {times(AGAIN, 'own_compiled_8K', 'ring_compiled_8K'):.2f} times"),
         ("ring_fast_128K", lambda: f"128K: {times(AGAIN, 'own_fast_128K', 'ring_fast_128K'):.2f} times")]),
    Row("How fast are whole steps beside accelerate's own, 8K to 128K?", ON_TWO, "`whole_steps.py`, 2 GPUs",
        [("ring_fast_8K", lambda: f"8K, no checkpointing: {times(ON_TWO, 'own_fast_8K', 'ring_fast_8K'):.2f} times as fast as accelerate's own"),
         ("ring_fast_32K", lambda: f"32K: {times(ON_TWO, 'own_fast_32K', 'ring_fast_32K'):.2f} times"),
         a_step(ON_TWO, "ring_fast_128K", "128K")]),
    Row("Is a ring of two exact and fast?", TWO, "`bench`, `bench --errors`, 2 GPUs",
        [speeds(TWO, "speed", 32, 64, 128), ("errors_live", _live)]),
    Row("Did the move into rooms change speed or bits?", ROOMS, "`bench`, `self_check.py`, `train.py`, 2 GPUs",
        [speeds(ROOMS, "speed", 32, 128)]),
    Row("How near are the forecasts of `plan`?", PLAN, "`hf-ring-attn plan`",
        [("forecasts", lambda: numbers.forecast_words())]),
    Row("How long until the first step? What do guards cost?", FIRST, "`train.py`, `guards.py`, `bench`, 2 GPUs",
        [("first_step_second_run", lambda: f"first step {first('first_step_second_run'):.1f} s, accelerate's own {first('first_step_accelerate'):.1f} s"),
         ("first_step_disk_cache", lambda: f"{first('first_step_disk_cache'):.1f} s with a cache on disk"),
         ("guards-2", lambda: f"guards {run(FIRST, 'guards-2').rows[0]['guards_ms']:.1f} ms a step"),
         ("guards_cpu_c4f9600", lambda: f"{run(FIRST, 'guards_cpu_c4f9600').head['guards_cpu_ms']:.2f} ms of CPU time"),
         speeds(FIRST, "speed", 32, 128), speeds(FIRST, "speed-2", 32, 128)]),
    Row("Do 512K and 1M tokens fit two GPUs? What do Liger and compiled layers give?", WHOLE, "`train.py`, 2 GPUs",
        [a_step(WHOLE, "ring_512K", "512K LoRA"), a_step(WHOLE, "ring_1M", "1M"), a_step(WHOLE, "one_512K", "512K on one GPU"),
         faster(WHOLE, "accelerate_32K", "ring_liger_32K", "32K with Liger"),
         faster(WHOLE, "accelerate_8K", "ring_compiled_layers_8K", "8K compiled")]),
    Row("What does the loss in chunks save?", LOSS, "`train.py`, 2 GPUs", [("chunked_8K", _loss)]),
    Row("Is a ring of eight right?", EIGHT, "`bench --errors`, 8 ranks; `bench`, 2 GPUs",
        [("errors_8", lambda: f"error at most {eight_ranks():.3f} of one GPU's"),
         speeds(EIGHT, "speed_before", 32, 64, 128), speeds(EIGHT, "speed", 32, 128)]),
    Row("Four GPUs beside peers and accelerate?", FOUR, "`bench`, `train.py`, 4 GPUs",
        [faster(FOUR, "s128_own", "s128_saved", "a 128K step"), speeds(FOUR, "speed", 32, 64, 128)]),
    Row("Four GPUs, newest; what bounds them?", TWO_STREAMS, "`bench`, `where.py`, 4 GPUs",
        [speeds(TWO_STREAMS, "speed", 32, 64, 128, 256)]),
    Row("How many heads travel together?", HEADS, "`bench --heads-per-gather`",
        [("mla_before", lambda: _heads("mla_before")), ("mla_after", lambda: _heads("mla_after"))]),
    Row("Why P2P copies?", PULLS, "not recorded", [("neighbours", _pulls)]),
    Row("Is flash4 exact and fast?", FLASH4, "`measure.py` (pinned)", [("speed", _flash4)]),
    Row("Is triton exact and fast?", TRITON, "`measure.py` (pinned)",
        [("speed", lambda: f"{_triton('forward'):.0f} / {_triton('backward'):.0f} TFLOP/s at 32K")]),
    Row("Is flex right and fast?", FLEX, "`measure.py` (pinned)", [("speed", _flex)]),
    Row("triton with a bias, beside flex?", BIAS, "`recipes/benchmarks/score_mod.py`", [("score_mod", _bias)]),
    Row("Work and bytes by mask?", TRAFFIC, "`recipes/benchmarks/traffic.py`", [("traffic", _window)]),
    Row("What does balancing give and cost?", BALANCE, "`recipes/benchmarks/traffic.py`", [("traffic", _worst)]),
    Row("Is blockwise attention right?", BLOCKWISE, "`recipes/benchmarks/blockwise.py`", [("errors", _fault)]),
    Row("What does no ring cost?", LIGHT, "`recipes/benchmarks/first_light.py`",
        [("import", lambda: _light("import")), ("step", lambda: _light("step"))]),
    Row("The wrong dq of triton; steps on two GPUs", GPUS_21, "`train.py`, `bench`, 2 GPUs",
        [("fsdp2_ring2_32k", _norms), ("fsdp2_ring2_32k_triton", lambda: "mended")]),
    Row("The race of dv; comparing shared keys", GPUS_22, "`pulls_ranks.py`, `shared.py` (pinned)",
        [("pulls_ranks", lambda: run(GPUS_22, "pulls_ranks").rows[-1]["printed"])]),
]  # fmt: skip


def _commit(folder: str, name: str) -> str:
    return commit(folder, name) if run(folder, name).head["commit"] != "not recorded" else "not recorded"


def _title(folder: str) -> str:
    """The folder's name without its date; of two with one name, with its day."""
    *date, name = folder.split("-", 3)
    others = [each.folder for each in ROWS if each.folder.endswith(f"-{name}") and each.folder != folder]
    return f"{name}, {date[2]}" if date and any(each.split("-", 3)[-1] == name for each in others) else name


PLACES = {
    "README": ["README.md"],
    "docs": ["docs"],
    "recipes": ["recipes"],
    "changelog": ["CHANGELOG.md", "CHANGELOG-details.md"],
    "code": ["hf_ring_attn"],
}
"""Where a result may be linked, and the files or folders of each place."""


@cache
def _text(place: str) -> str:
    """All pages and modules of a place, without the results themselves."""
    paths = [FILED.parents[1] / name for name in PLACES[place]]
    files = [file for path in paths for file in (path.rglob("*.*") if path.is_dir() else [path])]
    read = [file for file in files if file.suffix in {".md", ".py"} and not file.is_relative_to(FILED)]
    return "\n".join(file.read_text() for file in read)


def linked_from(folder: str) -> str:
    """The places that link a folder of results."""
    link = re.compile(rf"results/{re.escape(folder)}(?![\w-])")
    return ", ".join(place for place in PLACES if link.search(_text(place))) or "-"


def index() -> str:
    """The table; a cell with numbers of several commits names the commit of each."""
    lines = [
        "| question | file | command | number | date | commit | linked from |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in ROWS:
        commits = {name: _commit(each.folder, name) for name, _ in each.numbers}
        several = len(set(commits.values())) > 1
        cells = [text() + (f" ({commits[name]})" if several else "") for name, text in each.numbers]
        dates = dict.fromkeys(run(each.folder, name).head["date"] for name, _ in each.numbers)
        lines.append(
            f"| {each.question} | [{_title(each.folder)}]({each.folder}) | {each.command} | {'; '.join(cells)} | "
            f"{', '.join(dates)} | {', '.join(dict.fromkeys(commits.values()))} | {linked_from(each.folder)} |"
        )
    return "\n".join(lines)


PARTS = {"index": index}
