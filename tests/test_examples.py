"""Every example, run as its users run it on two CPU ranks, prints the losses of one process without a ring."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hf_ring_attn.biases import relative_buckets

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
sys.path.insert(0, str(EXAMPLES))  # examples are programs that stand side by side, not a package

import first_light  # noqa: E402  only now it can be found
from small import small_llama  # noqa: E402  only now it can be found
from text import Rows  # noqa: E402  only now it can be found

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--main_process_port", "0"),
    *("--config_file", str(REPOSITORY / "recipes/accelerate/cpu_2ranks.yaml")),
]
SECONDS = 110
NUMBER = re.compile(r"^(?:step \d+: )?[\w' ]+ (\d[\d.e+-]*)$", re.MULTILINE)
"""A line of an example's answer, such as "step 3: loss 4.5160537"."""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Python with these arguments, in a folder of its own, on the CPU."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


GLOO_AT_EXIT = "terminate called without an active exception"
"""A race of gloo's threads with the end of a process whose work is done, in one run of some thirty: run it again."""


def output(program: subprocess.Popen[str], folder: Path | None = None) -> str:
    try:
        text, _ = program.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        program.terminate()  # a launcher ends its ranks
        text, _ = program.communicate(timeout=10)
    if program.returncode != 0 and folder is not None and GLOO_AT_EXIT in text:
        _, *arguments = program.args  # type: ignore[misc]  # as `start` gave them: a list
        return output(start(folder, *map(str, arguments)))
    assert program.returncode == 0, text
    return text


def numbers(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


# ---- one process without a ring ------------------------------------------------------------------------------------


def plain_training(length: int) -> list[float]:
    """Four steps of SGD by transformers' own attention: what every loop among the examples comes to."""
    model = small_llama("sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in DataLoader(Rows(4, length)):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_attention() -> list[float]:
    """The sums that attention_only.py prints, with a full matrix of scores."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1001, heads, 32).transpose(1, 2).requires_grad_() for heads in (8, 2, 2))
    distance = torch.arange(1001)[:, None] - torch.arange(1001)[None]
    visible = (distance >= 0) & (distance <= 255)
    scores = (q @ k.repeat_interleave(4, 1).transpose(2, 3) * 32**-0.5).masked_fill(~visible, -torch.inf)
    loss: Tensor = (scores.softmax(-1) @ v.repeat_interleave(4, 1)).square().sum()
    loss.backward()
    assert k.grad is not None
    return [loss.item(), k.grad.square().sum().item()]


def plain_bias() -> list[float]:
    """The losses of learnable_bias.py, with a full matrix of biases."""
    torch.manual_seed(0)
    table, importance = torch.randn(16, 4).requires_grad_(), torch.zeros(301, requires_grad=True)
    q, k, v, target = (torch.randn(1, 301, 4, 16).transpose(1, 2) for _ in range(4))
    place = torch.arange(301)
    buckets = relative_buckets(place - place[:, None], 16, 100)
    losses = []
    for _ in range(3):
        scores = (q @ k.transpose(2, 3) * 16**-0.5 + table[buckets].permute(2, 0, 1)) * importance.exp()
        weights = scores.masked_fill(place > place[:, None], -torch.inf).softmax(-1)
        loss = (weights @ v - target).square().sum()
        gradients = torch.autograd.grad(loss, [table, importance])
        with torch.no_grad():
            for weight, gradient in zip((table, importance), gradients, strict=True):
                weight -= 1e-3 * gradient
        losses.append(loss.item())
    return losses


PLAIN: list[tuple[str, list[str], Callable[[], list[float]]]] = [
    ("plain_loop", TORCHRUN, lambda: plain_training(1001)),
    ("accelerate_loop", ACCELERATE, lambda: plain_training(1000)),
    ("fsdp2_loop", ACCELERATE, lambda: plain_training(1001)),
    ("attention_only", TORCHRUN, plain_attention),
    ("learnable_bias", TORCHRUN, plain_bias),
]


# ---- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "launcher", "plain"), PLAIN, ids=[row[0] for row in PLAIN])
def test_an_example_on_two_ranks_gives_the_numbers_of_plain_torch(
    name: str, launcher: list[str], plain: Callable[[], list[float]], tmp_path: Path
) -> None:
    program = start(tmp_path, *launcher, str(EXAMPLES / f"{name}.py"))
    want = plain()
    text = output(program, tmp_path)
    assert numbers(text) == pytest.approx(want, rel=1e-6), text
    assert "ring of 2" in text or name in ("attention_only", "learnable_bias"), text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "sft_packing"])
def test_a_trainer_on_two_ranks_gives_the_losses_of_one_process_with_sdpa(name: str, tmp_path: Path) -> None:
    ring = start(tmp_path, *ACCELERATE, str(EXAMPLES / f"{name}.py"))
    path = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})"
    alone = start(tmp_path, "-c", f"{path}; import {name}; {name}.main('sdpa')")
    ring_text, alone_text = output(ring, tmp_path), output(alone)
    assert len(numbers(ring_text)) == 4, ring_text
    assert numbers(ring_text) == pytest.approx(numbers(alone_text), rel=1e-6), ring_text
    assert "ring of 2" in ring_text
    assert "[hf_ring_attn]" not in alone_text


def test_every_example_is_run_here_or_by_ci() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert programs == {row[0] for row in PLAIN} | {"trainer", "sft_packing", "first_light"}


@pytest.mark.parametrize("wrong", ["loss", "grad_norm", "logits", "nan"])
def test_the_main_job_fails_in_words_when_the_runs_differ(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planted differences are ten times what it allows, in the second of three steps."""
    steps = [{"loss": 5.0 - step, "grad_norm": 1.0} for step in range(3)]
    for attention in ("sdpa", "ring_fp32"):
        (tmp_path / attention).mkdir()
        (tmp_path / attention / "steps.json").write_text(json.dumps(steps))
        if wrong == "nan":
            steps[1]["loss"] = float("nan")
        elif wrong in steps[1]:
            steps[1][wrong] *= 1 + 10 * first_light.ALLOWED[wrong]
    logits = {"largest_difference": 2e-4 if wrong == "logits" else 1e-7, "largest": 2.0}
    (tmp_path / "logits.json").write_text(json.dumps(logits))
    faults = first_light.compare(argparse.Namespace(output=tmp_path))
    assert [fault.partition(":")[0] for fault in faults] == ["loss" if wrong == "nan" else wrong]
    assert "rounding explains no more than" in faults[0]
    assert len(capsys.readouterr().out.splitlines()) == 10
