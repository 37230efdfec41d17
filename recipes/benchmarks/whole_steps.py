"""Whole training steps beside accelerate's own context parallelism: LoRA on the shape of Llama 3.1 8B, FSDP2.

    python recipes/benchmarks/whole_steps.py --gpus 2 [--only 8K 32K] [--save FOLDER]
    python recipes/benchmarks/whole_steps.py --gpus 2 --only full qlora32 qlora70   # the longest rows

Each run is recipes/long_context_lora/train.py by accelerate launch. Runs of one length follow each other. The table has
seconds a step (median and fastest), MFU, memory, and tokens a second over those of accelerate's own, once with its
defaults and once with the same options. Below each run of a ring is what it said: its ring and its kernel. A run that
fails is named, and the others go on. ``--toy`` runs tiny models on two CPU processes, without accelerate's own, which
needs GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = "recipes/long_context_lora/train.py"
K = 1024
STEPS = {8: 12, 32: 6, 128: 3, 256: 2}
"""Of each run, by thousands of tokens. The first two are not timed; of fewer steps the last one is."""
FUSED = "--liger --no-lora-casts"
SFT = f"{FUSED} --trainer sft"
DPO = f"{FUSED} --trainer dpo"
SDPA = "--implementation sdpa"


class Run(NamedTuple):
    """A run of train.py.

    ``own``: the run of accelerate's own with the same options, where it takes them. ``steps``: 0 for those of `STEPS`.
    """

    name: str
    thousands: int
    options: str
    own: str = ""
    steps: int = 0


def runs() -> list[Run]:
    """All runs in their order: for each length accelerate's own and the ring, as they are and with the fastest options.

    Those are to save all activations where they fit; else to save what attention computed, which only a ring does.
    """
    found = []
    for length in STEPS:
        keeps_all = length <= 32
        own_fast = f"{FUSED} --no-checkpointing" if keeps_all else FUSED
        fast = own_fast if keeps_all else f"{FUSED} --save-attention"
        fast += " --mlp-tokens 16384" if length == 256 else ""
        found += [
            Run(f"own_{length}K", length, SDPA),
            Run(f"ring_{length}K", length, "", f"own_{length}K"),
            Run(f"own_fast_{length}K", length, f"{SDPA} {own_fast}"),
            Run(f"ring_fast_{length}K", length, fast, f"own_fast_{length}K"),
        ]
        if keeps_all:
            compiled = "--no-checkpointing --compile-layers"
            found += [
                Run(f"own_compiled_{length}K", length, f"{SDPA} {compiled}"),
                Run(f"ring_compiled_{length}K", length, compiled, f"own_compiled_{length}K"),
            ]
    return found


def parts() -> list[Run]:
    """More runs, by --only. `plan` says that qlora70_128K, qlora32_256K, qlora32_416K, LoRA and 32K fit 2 x H100.

    own_dpo_8K, own_dpo_32K and full_512K_window are for one H200, the others are for 2 x H200. All activations of 32K
    tokens fit an H100 only if the MLPs run in chunks, so accelerate's own needs checkpointing there.

    Where a whole step takes too long: its memory with a window of 4096, its time from one layer and two, in their
    second step, since the first compiles torchao's optimizer.
    """
    long = {
        "full_1M": (1024, "--full --optim adamw_torch_8bit --liger --mlp-tokens 16384", " --offload-above 24"),
        "qlora32_280K": (280, "--shape 32B --qlora --mlp-tokens 16384", ""),
        # about the longest on 2 x H100 with 232 GiB of host memory
        "qlora32_416K": (416, "--shape 32B --qlora --liger --mlp-tokens 16384", " --offload-above 26"),
        # about the longest on 2 x H200 with 200 GiB of host memory
        "qlora70_270K": (270, "--shape 70B --qlora --liger --mlp-tokens 16384", " --offload-above 70"),
    }
    qlora70 = "--shape 70B --qlora --liger --mlp-tokens 16384 --offload-above 0"
    found = [
        Run("qlora70_128K", 128, qlora70, steps=2),
        Run("qlora70_quarter", 128, f"{qlora70} --layers 20", steps=3),
        Run("qlora32_256K", 256, "--shape 32B --qlora --liger --mlp-tokens 16384 --offload-above 0", steps=1),
        Run("qlora70_140K", 140, "--shape 70B --qlora --mlp-tokens 16384"),
        Run("lora_512K", 512, "--liger --no-lora-casts --mlp-tokens 16384 --offload-above 0"),
        Run("own_fused_8K", 8, f"{SDPA} {FUSED}"),
        Run("ring_auto_8K", 8, FUSED, "own_fused_8K"),
        Run("ring_kept_8K", 8, f"{FUSED} --keep-layers auto", "own_fused_8K"),
        Run("own_fused_32K", 32, f"{SDPA} {FUSED}"),
        Run("ring_kept_32K", 32, f"{FUSED} --keep-layers auto", "own_fused_32K"),
        Run("ring_fused_32K", 32, f"{FUSED} --no-save-attention", "own_fused_32K"),
        Run("ring_saved_32K", 32, f"{FUSED} --save-attention", "own_fused_32K"),
        Run("ring_auto_32K", 32, FUSED, "own_fused_32K"),
        Run("ring_rows_8K", 8, f"{FUSED} --loss gathered"),
        Run("ring_rows_32K", 32, f"{FUSED} --loss gathered"),
        Run("ring_gather_8K", 8, f"{FUSED} --no-checkpointing --backward gather", "own_fast_8K"),
        Run("ring_auto_128K", 128, SFT, "own_sft_128K"),
        Run("ring_chunks_32K", 32, f"{FUSED} --no-checkpointing --mlp-tokens 8192", "own_fused_32K"),
        Run("full_512K_window", 512, f"{long['full_1M'][1]} --offload-above 28 --window 4096", steps=2),
        Run("own_dpo_8K", 8, f"{SDPA} {DPO} --no-checkpointing"),
        Run("ring_dpo_8K", 8, f"{DPO} --no-checkpointing", "own_dpo_8K"),
        Run("own_dpo_32K", 32, f"{SDPA} {DPO}"),
        Run("ring_dpo_32K", 32, DPO, "own_dpo_32K"),
        *[run for length in (32, 128) for run in experts(length)],
        # 224 GiB of host memory for two GPUs
        Run("lora_1M", 1024, "--liger --no-lora-casts --mlp-tokens 16384 --offload-above 16", steps=1),
        # 192 GiB of host memory
        Run("full_1M", 1024, f"{long['full_1M'][1]} --offload-above 32", steps=1),
    ]
    for length in STEPS:
        # SFTTrainer: TRL's head makes no logits on either side. All that 256K of a ring save fit an H200 alone.
        keeps, saves = (" --no-checkpointing", "") if length == 8 else ("", " --save-attention")
        saves += " --mlp-tokens 16384 --offload-above 24" if length == 256 else ""
        found += [
            Run(f"own_sft_{length}K", length, f"{SDPA} {SFT}{keeps}"),
            Run(f"ring_sft_{length}K", length, f"{SFT}{keeps}{saves}", f"own_sft_{length}K"),
        ]
    for name, (thousands, options, stays) in long.items():
        found += [
            Run(f"{name}_window", thousands, f"{options}{stays} --window 4096"),
            Run(f"{name}_layer", thousands, f"{options} --no-save-attention --layers 1", steps=2),
            Run(f"{name}_layers", thousands, f"{options} --no-save-attention --layers 2", steps=2),
        ]
    return found


def experts(length: int) -> list[Run]:
    """Models with experts. accelerate's own knows no sinks, so no gpt-oss."""
    qwen, oss = ("--shape qwen3-30B-A3B", "--shape gpt-oss-20b")
    return [
        Run(f"own_a3b_{length}K", length, f"{SDPA} {qwen} {SFT}"),
        Run(f"ring_a3b_{length}K", length, f"{qwen} {SFT}", f"own_a3b_{length}K"),
        Run(f"ring_a3b_plain_{length}K", length, qwen),
        Run(f"ring_oss_{length}K", length, f"{oss} {SFT}"),
        Run(f"ring_oss_plain_{length}K", length, oss),
    ]


def command(run: Run, given: argparse.Namespace, output: Path) -> list[str]:
    """The command line of a run, after "python"."""
    ranks = 2 if given.toy else given.gpus
    config = "cpu_2ranks" if given.toy else "gpu_8_fsdp2"
    options = [one for one in run.options.split() if not given.toy or one != "--liger"]  # it needs a GPU
    size = ["--shape", "tiny", "--tokens", str(8 * run.thousands), "--dtype", "float32"] if given.toy else [
        "--tokens", str(run.thousands * K)]  # fmt: skip
    return [
        "-m", "accelerate.commands.launch", "--config_file", f"recipes/accelerate/{config}.yaml",
        "--num_processes", str(ranks), "--parallelism_config_cp_size", str(ranks), TRAIN, *size,
        "--steps", str(given.steps or run.steps or STEPS.get(run.thousands, 1)), *options, "--output", str(output),
    ]  # fmt: skip


def end(launcher: psutil.Process) -> None:
    """Kills a launcher and its ranks. Each rank is a session of its own, and a living one keeps its GPU's memory."""
    for process in [*launcher.children(recursive=True), launcher]:
        with suppress(psutil.NoSuchProcess):  # it ended between the two lines
            process.kill()


def is_error(line: str) -> bool:
    """The last line of a traceback: not every error of this package has "Error" in its name."""
    return "Error" in line or "hf_ring_attn.errors." in line


def measured(run: Run, given: argparse.Namespace) -> dict[str, Any] | str:
    """What train.py wrote. Of a run that failed: its last words; of one that took too long: the steps that it made."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.json"
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if given.toy:
            environment["ACCELERATE_USE_CPU"] = "true"
        with subprocess.Popen(
            [sys.executable, *command(run, given, output)], cwd=REPOSITORY, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as launched:  # fmt: skip
            try:
                words, _ = launched.communicate(timeout=given.seconds)
            except subprocess.TimeoutExpired:
                end(psutil.Process(launched.pid))
                words, _ = launched.communicate()
                made = [line for line in words.splitlines() if line.startswith("step ")]
                return "; ".join([f"ended after {given.seconds:g} s", *made])
        if launched.returncode == 0 and output.is_file():
            found: dict[str, Any] = json.loads(output.read_text())
            return found
        errors = [line for line in words.splitlines() if is_error(line) and "ChildFailedError" not in line]
        return (errors or words.splitlines() or ["nothing"])[-1][:200]


def line(run: Run, row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """A run's line of the table."""
    timed = row["seconds"][2:] or row["seconds"][-1:]
    mfu = "" if row["mfu"] is None else f"{row['mfu']:.0%}"
    peak = max((gib for gib in row["peak_memory_GiB"] if gib is not None), default=None)
    memory = "" if peak is None else f"{peak:.1f} GiB"
    over = [
        f"{row['tokens_per_second'] / rows[name]['tokens_per_second']:.2f}" if name in rows else "-"
        for name in (f"own_{run.thousands}K", run.own)
    ]
    speed = f"{statistics.median(timed):9.3f} ({min(timed):.3f}) {mfu:>5} {memory:>10} {over[0]:>9} {over[1]:>9}"
    losses = ", ".join(f"{x:.5f}" for x in row["losses"][:3])
    return f"{run.name:24} {speed}   first step {row['seconds'][0]:.1f} s, losses {losses}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="runs with one of these words in their names")
    parser.add_argument("--steps", type=int, help="of each run; default: by length, 12 to 3")
    parser.add_argument("--seconds", type=float, default=600, help="after which a run is ended")
    parser.add_argument("--toy", action="store_true", help="tiny models on two CPU processes")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    given = parser.parse_args()
    every = [*runs(), *parts()] if given.only else runs()
    chosen = [run for run in every if not given.only or {run.name, *run.name.split("_")} & set(given.only)]
    chosen = [run for run in chosen if not (given.toy and run.name.startswith("own"))]
    if not chosen:
        parser.error(f"--only {' '.join(given.only)} leaves no run of {', '.join(run.name for run in every)}")
    head = facts()
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'':24} {'s a step (fastest)':>17} {'MFU':>5} {'a GPU':>10} {'over own':>9} {'alike':>9}", flush=True)
    failed = 0
    for run in chosen:
        began = time.perf_counter()
        row = measured(run, given)
        if isinstance(row, str):
            failed += 1
            print(f"{run.name:24} failed after {time.perf_counter() - began:.0f} s: {row}", flush=True)
            continue
        rows[run.name] = row
        print(line(run, row, rows), *row["said"], sep="\n    ", flush=True)
        if given.save is not None:
            said = {"command": " ".join(["python", *command(run, given, Path("run.json"))])}
            results.save(given.save, run.name, {**head, **said}, [row])
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
