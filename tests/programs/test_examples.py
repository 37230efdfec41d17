"""Every example, run as its users run it on two CPU ranks, prints the losses of one process without a ring."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hf_ring_attn.biases import relative_buckets
from tests.helpers.programs import CPU_2RANKS, REPOSITORY, launched_by, start

EXAMPLES = REPOSITORY / "examples"
sys.path.insert(0, str(EXAMPLES))  # examples are programs that stand side by side, not a package

import embeddings  # noqa: E402  only now it can be found
import first_light  # noqa: E402  only now it can be found
from small import small_llama  # noqa: E402  only now it can be found
from text import Rows  # noqa: E402  only now it can be found

NUMBER = re.compile(r"^(?:step \d+: )?[\w' ]+ (\d[\d.e+-]*)$", re.MULTILINE)
"""A line of an example's answer, such as "step 3: loss 4.5160537"."""


def numbers(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


# ---- one process without a ring ------------------------------------------------------------------------------------


def plain_training(length: int, last: float = 1.0) -> list[float]:
    """Four steps of SGD by transformers' own attention: what every loop among the examples comes to.

    ``last``: the share of the learning rate that is left in the last step.
    """
    model = small_llama("sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last, total_iters=3)
    losses = []
    for batch in DataLoader(Rows(4, length)):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
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


def plain_embeddings(pool: str) -> list[float]:
    """The losses of embeddings.py, pooled from whole rows."""
    model = embeddings.small_encoder("sdpa") if pool == "mean" else small_llama("sdpa").model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for batch in embeddings.batches(4):
        hidden, real = model(**batch).last_hidden_state, batch["attention_mask"]
        mean = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        last = hidden[torch.arange(len(hidden)), real.sum(1) - 1]
        loss = embeddings.contrast(mean if pool == "mean" else last)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PLAIN: list[tuple[str, Path | None, Callable[[], list[float]]]] = [
    ("plain_loop", None, lambda: plain_training(1001)),
    ("accelerate_loop", CPU_2RANKS, lambda: plain_training(1000, last=0.25)),
    ("fsdp2_loop", CPU_2RANKS, lambda: plain_training(1001)),
    ("attention_only", None, plain_attention),
    ("learnable_bias", None, plain_bias),
    ("embeddings", None, lambda: plain_embeddings("mean")),
    ("embeddings --pool last", None, lambda: plain_embeddings("last")),
]
"""Each with its arguments and its launch config; None: torchrun starts it."""


# ---- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "plain"),
    [pytest.param(*row, id=row[0], marks=[pytest.mark.turns] if "--pool" in row[0] else []) for row in PLAIN],
)
def test_an_example_on_two_ranks_gives_the_numbers_of_plain_torch(
    name: str, config: Path | None, plain: Callable[[], list[float]], tmp_path: Path
) -> None:
    environment = {} if config is None else launched_by(config)
    name, *arguments = name.split()
    program = start(tmp_path, EXAMPLES / f"{name}.py", *arguments, ranks=2, environment=environment)
    want = plain()
    text = program.output()
    assert numbers(text) == pytest.approx(want, rel=1e-6), text
    assert "ring of 2" in text or name in ("attention_only", "learnable_bias"), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "apart"),
    [
        ("trainer", 4, 1e-6),
        ("sft_packing", 4, 1e-6),
        ("dpo", 4, 1e-5),  # which subtracts sums of log-probabilities
        pytest.param("grpo", 6, 1e-5, marks=pytest.mark.turns),
    ],
)
def test_a_trainer_on_two_ranks_gives_the_losses_of_one_process_with_sdpa(
    name: str, count: int, apart: float, tmp_path: Path
) -> None:
    (tmp_path / "ring").mkdir()
    (tmp_path / "alone.py").write_text(
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import {name}; {name}.main('sdpa')"
    )
    ring = start(tmp_path / "ring", EXAMPLES / f"{name}.py", ranks=2, environment=launched_by(CPU_2RANKS))
    alone = start(tmp_path, tmp_path / "alone.py")
    ring_text, alone_text = ring.output(), alone.output()
    assert len(numbers(ring_text)) == count, ring_text
    assert numbers(ring_text) == pytest.approx(numbers(alone_text), rel=apart), ring_text
    assert "ring of 2" in ring_text
    assert "[hf_ring_attn]" not in alone_text


def test_every_example_is_run_here_or_by_ci() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert programs == {row[0].split()[0] for row in PLAIN} | {"trainer", "sft_packing", "dpo", "grpo", "first_light"}


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
