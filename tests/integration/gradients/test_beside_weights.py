"""Weights beside the model, whose gradients no wrapper averages: exact if the program does, else refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn.integration.gradients import beside_weights
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.models.tiny_models import tiny

KINDS = ["head", "head on a frozen model", "vector", "vector of whole rows", "sparse table"]


def of_tokens(model: Any, extra: nn.Parameter, kind: str, in_ring: bool) -> tuple[Any, Tensor]:
    """What reduces gradients, and a loss that uses a weight beside the model."""
    batch = tokens(23)
    labels = batch["labels"]
    if kind == "vector of whole rows":
        with hf_ring_attn.whole_rows(model) if in_ring else nullcontext() as rows:
            return rows, model(**batch).loss
    inputs: dict[str, Any] = batch
    sharded: Any = nullcontext()
    targets, count = nn.functional.pad(labels[:, 1:], (0, 1), value=-100), (labels[:, 1:] != -100).sum()
    if in_ring:
        sharded = hf_ring_attn.shard(batch)
        inputs, targets = sharded.inputs, sharded.inputs["shift_labels"]
        count = sharded.inputs["num_items_in_batch"]
    with sharded, torch.set_grad_enabled("frozen" not in kind):
        output = model(**inputs) if kind == "vector" else model(**{**inputs, "labels": None}, output_hidden_states=True)
    if kind == "vector":
        return sharded, output.loss
    states = output.hidden_states[-1]
    if kind == "sparse table":
        states = states + nn.functional.embedding(inputs["input_ids"], extra, sparse=True)
        logits = states @ states.new_ones(states.shape[-1], 5).cumsum(1)
        return sharded, cross_entropy(
            logits.flatten(0, 1), targets.where(targets < 0, targets % 5).flatten(), reduction="sum"
        ) / count
    return sharded, cross_entropy((states @ extra).flatten(0, 1), targets.flatten(), reduction="sum") / count


def steps(kind: str, wrap: str, reduces: bool, in_ring: bool = True) -> tuple[Tensor, tuple[str, str] | None]:
    """The weight beside the model after two steps, and what was raised in the second of them."""
    model: Any = tiny("llama", "ring_fp32" if in_ring else None).train()
    torch.manual_seed(0)
    width, words = model.config.hidden_size, model.config.vocab_size
    shape = (width,) if "vector" in kind else (words, width) if kind == "sparse table" else (width, words)
    extra = nn.Parameter(torch.randn(shape) * 0.1)
    if "vector" in kind:
        model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output + extra)
    if "frozen" in kind:
        model.requires_grad_(False)
    wrapped = model
    if wrap == "DDP":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    if wrap == "FSDP2":
        wrapped = fully_shard(model)
    optimizer = torch.optim.SGD([*model.parameters(), extra], 0.1)

    def step() -> None:
        reducer, loss = of_tokens(wrapped, extra, kind, in_ring)
        loss.backward()
        if in_ring and not wrap:
            reducer.reduce_gradients(model)
        if in_ring and reduces:
            reducer.reduce_gradients(extra)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return extra.detach(), attempt(step)


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [("head", ""), ("head", "DDP"), ("head", "FSDP2"), ("head on a frozen model", ""), ("vector", ""),
     ("vector", "DDP"), ("vector of whole rows", "FSDP2"), ("sparse table", "")],
)  # fmt: skip
def test_a_weight_that_nobody_averages_is_refused(ranks: Ranks, kind: str, wrap: str) -> None:
    """Each rank stepped by the gradient of its tokens, silently, and the copies drifted apart."""
    for _, raised in ranks(2).run(steps, kind, wrap, False):
        assert raised is not None and raised[0] == "RanksDiffer"
        assert "beside the model" in raised[1] and "call reduce_gradients for them" in raised[1]


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [("head", ""), ("head", "DDP"), ("head", "FSDP2"), ("vector", "DDP"), ("vector of whole rows", "FSDP2")],
)
def test_one_that_the_program_averages_is_that_of_one_process(ranks: Ranks, kind: str, wrap: str) -> None:
    want, _ = steps(kind, "", False, in_ring=False)
    for got, raised in ranks(2).run(steps, kind, wrap, True):
        assert raised is None
        assert relative_error(got, want) < 1e-5


def of_one_value() -> None:
    """A weight that every rank uses alike needs no average."""
    model: Any = tiny("llama", "ring_fp32").train()
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)
    for _ in range(2):
        with hf_ring_attn.shard(tokens(23)) as sharded:
            loss = model(**sharded.inputs).loss
        (loss * scale).backward()
        sharded.reduce_gradients(model)
        optimizer.step()


def of_whole_rows() -> None:
    """A head of whole rows needs none either."""
    model: Any = tiny("llama", "ring_fp32").train()
    head = nn.Linear(model.config.vocab_size, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    for _ in range(2):
        with hf_ring_attn.whole_rows(model) as rows:
            logits = model(input_ids=tokens(23)["input_ids"]).logits
        head(logits).square().mean().backward()
        rows.reduce_gradients(model)
        optimizer.step()


def of_one_rank() -> None:
    """A probe that the first rank trains alone, for a log: nobody waits for the others."""
    model: Any = tiny("llama", "ring_fp32").train()
    probe = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([probe], 0.1)
    for _ in range(2):
        with hf_ring_attn.shard(tokens(23)) as sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(model)
        if dist.get_rank() == 0:
            probe.sum().backward()
            optimizer.step()


@pytest.mark.parametrize("program", [of_one_value, of_whole_rows, of_one_rank])
def test_what_needs_no_average_is_left_alone(ranks: Ranks, program: Callable[[], None]) -> None:
    assert ranks(2).run(attempt, program) == [None, None]


def beside_a_large_one(averages: bool) -> None:
    """A head whose large gradient is averaged, and a scale whose small one is only if ``averages``."""
    model: Any = tiny("llama", "ring_fp32").train()
    head, scale = nn.Linear(model.config.hidden_size, model.config.vocab_size), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters(), scale], 1e-3)
    for _ in range(2):
        with hf_ring_attn.shard(tokens(23)) as sharded:
            states = model(**{**sharded.inputs, "labels": None}, output_hidden_states=True).hidden_states[-1]
        logits, targets = head(states).flatten(0, 1), sharded.inputs["shift_labels"].flatten()
        total = cross_entropy(logits * (1 + 1e-3 * (scale - 1)), targets, reduction="sum")
        (total / sharded.inputs["num_items_in_batch"]).backward()
        for weight in (model, head, *([scale] * averages)):
            sharded.reduce_gradients(weight)
        optimizer.step()


def test_a_small_gradient_beside_a_large_one_is_seen(ranks: Ranks) -> None:
    assert ranks(2).run(attempt, beside_a_large_one, True) == [None, None]
    for error in ranks(2).run(attempt, beside_a_large_one, False):
        assert error is not None and error[0] == "RanksDiffer" and "a weight of shape () beside" in error[1]


def of_other_training(between: int) -> tuple[int, tuple[str, str] | None]:
    """The most that was kept of so many steps of each rank's own model, and what a head meets that is not averaged."""
    model: Any = tiny("llama", "ring_fp32").train()
    head, other = nn.Parameter(torch.randn(model.config.hidden_size, 5)), nn.Linear(3, 3)
    optimizer, others = torch.optim.SGD([head], 0.1), torch.optim.SGD(other.parameters(), 0.1)
    kept = 0

    def step(averages: bool) -> None:
        with hf_ring_attn.shard(tokens(23)) as sharded:
            states = model(**{**sharded.inputs, "labels": None}, output_hidden_states=True).hidden_states[-1]
        counts = sharded.inputs["shift_labels"] != -100
        (states @ head)[counts].square().sum().backward()
        sharded.reduce_gradients(model)
        if averages:
            sharded.reduce_gradients(head)
        optimizer.step()

    step(True)
    for _ in range(between):
        other(torch.randn(2, 3) + dist.get_rank()).sum().backward()
        others.step()
        kept = max(kept, sum(map(len, beside_weights._stepped)))
    step(False)
    return kept, attempt(step, True)


def test_a_training_without_a_ring_leaves_nothing_behind(ranks: Ranks) -> None:
    """Each of its steps left tensors in memory, for ever without a further batch, and its gradients were compared."""
    for kept, raised in ranks(2).run(of_other_training, 10 * beside_weights.MOST):
        assert 0 < kept <= 2 * beside_weights.MOST
        assert raised is not None and raised[0] == "RanksDiffer" and "5) beside the model" in raised[1]
