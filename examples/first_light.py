"""The main job: LoRA on long rows that two processes share, against one process that holds them alone.

    bash examples/run.sh               # where everything is installed: python examples/first_light.py
    bash examples/run.sh --quick       # shorter rows, fewer steps

A small Llama is saved to disk and fine-tuned twice by the same function, `train`, on the source of Python's standard
library: in one process by transformers alone, then by two CPU processes with attn_implementation="ring_fp32", each of
which holds half of every row. Nothing differs but that string, one import and the launch config. Then a process
without the plugin loads the adapter that the ring has trained.

It ends with a table of both runs' losses and gradient norms, and fails with exit code 1 if they are not the same to
float32's accuracy, or if the adapter gives other logits when it is loaded without the plugin.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import ProgressCallback
from transformers.utils import logging

from small import small_llama
from text import Rows

REPOSITORY = Path(__file__).resolve().parents[1]
TWO_RANKS = REPOSITORY / "recipes" / "accelerate" / "cpu_2ranks.yaml"
ALLOWED = {"loss": 2e-6, "grad_norm": 3e-5, "logits": 1e-5}
"""Largest relative differences: ten times what float32 sums in another order come to after twelve steps.

A ring that sends gradients of keys and values in bf16 instead shows 9e-6 in the loss and 3e-4 in the gradient norm.
"""


# ---- the job: what a program of your own would hold ----------------------------------------------------------------


def train(args: argparse.Namespace, attention: str) -> Any:
    """Fine-tunes the saved model with LoRA; writes the adapter and the log of every step. Returns the model."""
    set_seed(0)  # the adapter starts from random numbers
    base = AutoModelForCausalLM.from_pretrained(args.output / "model", attn_implementation=attention)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    folder = args.output / attention
    options = TrainingArguments(
        output_dir=str(folder), num_train_epochs=1, per_device_train_batch_size=1, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=Rows(args.steps, args.length))
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar())
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    if trainer.is_world_process_zero():
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        (folder / "steps.json").write_text(json.dumps(steps))
    return model


def one_process(args: argparse.Namespace) -> None:
    """Trains alone, with transformers' own attention."""
    train(args, "sdpa")
    assert "hf_ring_attn" not in sys.modules, "the baseline must not know the plugin"


def two_ranks(args: argparse.Namespace) -> None:
    """Trains in the ring, and keeps the trained model's logits of a row that it has not seen."""
    import hf_ring_attn

    model = train(args, "ring_fp32").eval()
    sharded = hf_ring_attn.shard({"input_ids": unseen_row(args)})
    assert sharded.ring.size == 2, "the launch config must start two ranks"
    with sharded, torch.no_grad():
        logits = sharded.gather(model(**sharded.inputs).logits)
    if sharded.ring.rank == 0:
        torch.save(logits, args.output / "logits.pt")


def reload(args: argparse.Namespace) -> None:
    """Loads the ring's adapter with transformers and peft alone, and compares the logits."""
    base = AutoModelForCausalLM.from_pretrained(args.output / "model", attn_implementation="sdpa")
    model = PeftModel.from_pretrained(base, str(args.output / "ring_fp32" / "adapter")).eval()
    with torch.no_grad():
        logits = model(input_ids=unseen_row(args)).logits
    assert "hf_ring_attn" not in sys.modules, "the adapter must be usable without the plugin"
    difference = (logits - torch.load(args.output / "logits.pt")).abs().max()
    sizes = {"largest_difference": difference.item(), "largest": logits.abs().max().item()}
    (args.output / "logits.json").write_text(json.dumps(sizes))


def unseen_row(args: argparse.Namespace) -> Tensor:
    """[1, length] tokens, those after the rows of training."""
    return Rows(1, args.length, skip=args.steps)[0]["input_ids"][None]


class Bar(ProgressCallback):
    """Trainer's progress bar with the loss on it, instead of a line a step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.4f}")


# ---- the comparison ------------------------------------------------------------------------------------------------


PARTS = {"one-process": one_process, "two-ranks": two_ranks, "reload": reload}


def run_part(part: str, title: str, threads: int, launcher: list[str]) -> None:
    """Runs one part by this same file in processes of its own, and ends the job if it fails."""
    print(f"\n{title}", flush=True)
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore::FutureWarning",  # transformers warns of names that it uses itself
    }
    began = time.perf_counter()
    command = [sys.executable, *launcher, __file__, *sys.argv[1:], "--part", part]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        sys.exit(f"First light failed in its part {part!r} (exit code {code}). The cause stands above.")
    print(f"{time.perf_counter() - began:.0f} s")


def compare(args: argparse.Namespace) -> list[str]:
    """Prints the table and returns what is not the same, in words."""
    alone, ring = (json.loads((args.output / name / "steps.json").read_text()) for name in ("sdpa", "ring_fp32"))
    print(f"\n    {'loss':>22}{'grad norm':>35}\nstep" + f"  {'1 process':>11}{'2 ranks':>11}{'relative':>11}" * 2)
    differences: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step, (a, b) in enumerate(zip(alone, ring, strict=True), 1):
        line = f"{step:4}"
        for name, relative in differences.items():
            relative.append(abs(a[name] - b[name]) / abs(a[name]))
            line += f"  {a[name]:11.7f}{b[name]:11.7f}{relative[-1]:11.1e}"
        print(line)
    worst = {name: torch.tensor(relative).max().item() for name, relative in differences.items()}  # of nan, nan
    logits = json.loads((args.output / "logits.json").read_text())
    worst["logits"] = logits["largest_difference"] / logits["largest"]
    adapter = os.path.relpath(args.output / "ring_fp32" / "adapter")
    print(f"\nLargest relative difference: loss {worst['loss']:.1e}, grad norm {worst['grad_norm']:.1e}.")
    print(f"The adapter that the ring has trained: {adapter}")
    print(f"Loaded without the plugin it gives the same logits, to {worst['logits']:.1e} of the largest.")
    return [
        f"{name}: relative difference {worst[name]:.1e}, but rounding explains no more than {allowed:.0e}"
        for name, allowed in ALLOWED.items()
        if not worst[name] <= allowed
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA on two ranks that share every row, against one process.")
    parser.add_argument("--quick", action="store_true", help="4 steps on rows of 1001 tokens")
    parser.add_argument("--steps", type=int, help="one row a step (default: 12)")
    parser.add_argument("--length", type=int, help="tokens a row (default: 4001; the ring pads it by itself)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "outputs" / "first_light")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.steps = args.steps or (4 if args.quick else 12)
    args.length = args.length or (1001 if args.quick else 4001)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of loading and saving, not of training
    if args.part:
        PARTS[args.part](args)
        return

    model = small_llama("sdpa", layers=4, width=192)
    model.save_pretrained(args.output / "model")
    size = model.num_parameters() / 1e6
    print(f"LoRA on a Llama of {size:.1f} M parameters: {args.steps} steps, each on a row of {args.length} tokens.")
    cores = torch.get_num_threads()
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(TWO_RANKS), "--main_process_port", "0"]
    run_part("one-process", "1 of 3: one process with transformers alone (sdpa)", cores, [])
    run_part("two-ranks", "2 of 3: two ranks share every row (ring_fp32)", max(1, cores // 2), launch)
    run_part("reload", "3 of 3: the ring's adapter in a process without the plugin", cores, [])
    if faults := compare(args):
        sys.exit("The two runs are not the same:\n  " + "\n  ".join(faults))
    print("The two runs are the same.")


if __name__ == "__main__":
    main()
