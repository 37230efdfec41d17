"""Where the host's time of Trainer's steps goes: runs recipes/long_context_lora/train.py with its own options.

    accelerate launch --config_file recipes/accelerate/gpu_8_fsdp2.yaml --num_processes 2 \
        --parallelism_config_cp_size 2 recipes/benchmarks/host_of_step.py ROWS.jsonl --tokens 8192 --steps 14 ...

The first rank writes, for each part, medians over the steps from the fourth on: milliseconds of the host in it, and
when it begins and ends, in milliseconds after the step's begin. A part may lie inside another.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import runpy
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback

TRAIN = Path(__file__).parents[1] / "long_context_lora" / "train.py"
STEP = "step"
calls: list[tuple[str, float, float]] = []


def timed(owner: Any, name: str, label: str = "") -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def measured(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            calls.append((label or name, began, time.perf_counter()))

    setattr(owner, name, measured)


class Mark(TrainerCallback):
    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.ready = trainer, False

    def on_step_begin(self, *_args: Any, **_options: Any) -> None:
        now = time.perf_counter()
        calls.append((STEP, now, now))
        if self.ready:
            return
        self.ready = True
        it: Any = self.trainer
        for name in ("training_step", "_prepare_inputs", "floating_point_ops", "get_batch_samples"):
            timed(it, name)
        timed(it, "_maybe_log_save_evaluate", "log")
        timed(it.accelerator, "backward")
        timed(it.accelerator, "clip_grad_norm_")
        timed(it.optimizer, "step", "optimizer.step")
        timed(it.model_wrapped, "train", "model.train")
        timed(it.model_wrapped, "zero_grad")
        timed(torch, "isnan")
        with suppress(ImportError):
            from hf_ring_attn.comm.ring import Ring
            from hf_ring_attn.integration.batch import shard
            from hf_ring_attn.integration.context import model_record
            from hf_ring_attn.integration.hosts import trainer

            timed(trainer, "shard_inputs", "ring: all of shard")
            timed(model_record, "_visited", "ring: visit of modules")
            timed(shard, "admit", "ring: admission")
            timed(Ring, "mean", "ring: mean of losses")


def report(path: str) -> None:
    if int(os.environ.get("RANK", "0")):
        return
    begins = [at for at, call in enumerate(calls) if call[0] == STEP][3:]
    steps = [calls[a:b] for a, b in itertools.pairwise(begins)]
    lengths = [round(1000 * (calls[b][1] - calls[a][1]), 2) for a, b in itertools.pairwise(begins)]
    rows: list[dict[str, Any]] = [{"part": STEP, "milliseconds": lengths}]
    for part in dict.fromkeys(name for step in steps for name, _, _ in step if name != STEP):
        found = [[(b - step[0][1], e - step[0][1]) for name, b, e in step if name == part] for step in steps]
        found = [times for times in found if times]
        rows.append({
            "part": part, "calls": statistics.median(len(times) for times in found),
            "host_ms": round(1000 * statistics.median(sum(e - b for b, e in times) for times in found), 2),
            "from_ms": round(1000 * statistics.median(times[0][0] for times in found), 2),
            "to_ms": round(1000 * statistics.median(times[-1][1] for times in found), 2),
        })  # fmt: skip
    rows[1:] = sorted(rows[1:], key=lambda row: row["from_ms"])
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    path = sys.argv.pop(1)
    make = Trainer.__init__

    @functools.wraps(make)
    def init(self: Trainer, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.add_callback(Mark(self))

    Trainer.__init__ = init  # type: ignore[method-assign]
    Trainer.ring_fp32_exact = True  # type: ignore[attr-defined]  # its methods are wrapped, and nothing else
    timed(PreTrainedModel, "num_parameters")
    sys.path.insert(0, str(TRAIN.parent))
    sys.argv[0] = str(TRAIN)
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    finally:
        report(path)
