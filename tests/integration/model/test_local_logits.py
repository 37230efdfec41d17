"""A loop's own loss of a rank's logits: exact as a sum over shift_labels, refused if it shifts or averages by hand."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hf_ring_attn
from hf_ring_attn import Sharded
from hf_ring_attn.integration.model.local_logits import LocalLogits, Origin
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.plain_jobs import Batch, attempt, gradients_of, tokens
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import tiny

Ranks = Callable[[int], LiveRanks]
Inputs = dict[str, Any]
Loss = Callable[[Any, Sharded], Tensor]
BATCH = tokens(23)
WITHOUT_LABELS: Batch = {"input_ids": BATCH["input_ids"]}
FLOAT64 = 1e-12


def logits_of(model: nn.Module, sharded: Sharded) -> Any:
    return model(**sharded.inputs).logits


def logits_alone(model: nn.Module, sharded: Sharded) -> Any:
    return model(**{**sharded.inputs, "labels": None}).logits


def summed(logits: Any, inputs: Inputs) -> Tensor:
    total = cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten(), reduction="sum")
    return total / float(inputs["num_items_in_batch"])


def in_parts(logits: Any, inputs: Inputs) -> Tensor:
    parts = zip(logits.split(5, 1), inputs["shift_labels"].split(5, 1), strict=True)
    return torch.stack([summed(x, {**inputs, "shift_labels": labels}) for x, labels in parts]).sum()


def in_slices(logits: Any, inputs: Inputs) -> Tensor:
    slices = [slice(at, at + 11) for at in range(0, logits.shape[1], 11)]  # of 12 tokens: all but the last, the last
    each = [summed(logits[:, one], {**inputs, "shift_labels": inputs["shift_labels"][:, one]}) for one in slices]
    return torch.stack(each).sum()


class Negative(torch.autograd.Function):
    """A function of a program's own, which reads its input below Python's functions."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def by_a_function(logits: Any, inputs: Inputs) -> Tensor:
    negative: Any = Negative.apply(logits)  # type: ignore[no-untyped-call]
    return summed(-negative, inputs)


def compiled(logits: Any, inputs: Inputs) -> Tensor:
    loss: Tensor = torch.compile(summed, backend="aot_eager")(logits, inputs)
    return loss


EXACT: dict[str, Loss] = {
    "a sum": lambda model, sharded: summed(logits_of(model, sharded), sharded.inputs),
    "without labels": lambda model, sharded: summed(logits_alone(model, sharded), sharded.inputs),
    "scaled": lambda model, sharded: summed(logits_alone(model, sharded) * 2 / 2.0, sharded.inputs),
    "in parts": lambda model, sharded: in_parts(logits_alone(model, sharded), sharded.inputs),
    "in slices": lambda model, sharded: in_slices(logits_of(model, sharded), sharded.inputs),
    "a function of its own": lambda model, sharded: by_a_function(logits_alone(model, sharded), sharded.inputs),
    "compiled": lambda model, sharded: compiled(logits_alone(model, sharded), sharded.inputs),
}


def step(loss_of: str, in_ring: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = tiny("llama", "ring_fp32" if in_ring else None).double()
    if not in_ring:
        loss = model(**BATCH).loss
        loss.backward()
        return loss.detach(), gradients_of(model)
    sharded = hf_ring_attn.shard(BATCH)
    with sharded:
        loss = EXACT[loss_of](model, sharded)
    loss.backward()
    sharded.reduce_gradients(model)
    return sharded.reduce(loss), gradients_of(model)


@pytest.mark.parametrize("loss_of", EXACT)
def test_a_sum_over_the_shifted_labels_is_exact(ranks: Ranks, loss_of: str) -> None:
    loss, gradients = step(loss_of, in_ring=False)
    for got, found in ranks(2).run(step, loss_of, True):
        assert relative_error(got, loss) < 1e-6  # transformers' loss is float32 in any dtype
        assert all(relative_error(found[name], gradient) < 1e-6 for name, gradient in gradients.items())


def whole(batch: Batch, in_ring: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of gathered logits, which a program may shift."""
    model = tiny("llama", "ring_fp32" if in_ring else None).double()
    sharded = hf_ring_attn.shard(batch) if in_ring else None
    if sharded is None:
        logits = model(**batch).logits
    else:
        with sharded:
            logits = sharded.gather(model(**sharded.inputs).logits)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    loss.backward()
    if sharded is not None:
        sharded.reduce_gradients(model)
    return loss.detach(), gradients_of(model)


@pytest.mark.parametrize("batch", [BATCH, WITHOUT_LABELS], ids=["labels", "no labels"])
def test_gathered_logits_may_be_shifted(ranks: Ranks, batch: Batch) -> None:
    loss, gradients = whole(batch, in_ring=False)
    for got, found in ranks(2).run(whole, batch, True):
        assert relative_error(got, loss) < FLOAT64
        assert all(relative_error(found[name], gradient) < FLOAT64 for name, gradient in gradients.items())


FULL: Batch = {"input_ids": BATCH["input_ids"][:, :20], "targets": BATCH["input_ids"][:, 3:23]}
"""Every token has a target, so the mean of the ranks' means is the row's: 20 tokens are chunks of 5."""
TARGETS: dict[str, Batch] = {
    "targets of its own": FULL,
    "shifted labels": {"input_ids": FULL["input_ids"], "labels": FULL["targets"], "shift_labels": FULL["targets"]},
}


def averaged(name: str, in_ring: bool) -> tuple[Tensor, dict[str, Tensor]]:
    batch, names = TARGETS[name], {"input_ids", "position_ids", "attention_mask"}
    target = batch.keys() - {"input_ids", "labels"}
    model = tiny("llama", "ring_fp32" if in_ring else None).double()
    sharded = hf_ring_attn.shard(batch) if in_ring else None
    given = batch if sharded is None else sharded.inputs
    with nullcontext() if sharded is None else sharded:
        logits: Any = model(**{name: x for name, x in given.items() if name in names}).logits
    loss = cross_entropy(logits.flatten(0, 1), given[target.pop()].flatten())
    loss.backward()
    if sharded is None:
        return loss.detach(), gradients_of(model)
    sharded.reduce_gradients(model)
    return sharded.reduce(loss), gradients_of(model)


@pytest.mark.parametrize("name", TARGETS)
def test_a_mean_over_as_many_targets_on_each_rank_is_exact(ranks: Ranks, name: str) -> None:
    loss, gradients = averaged(name, in_ring=False)
    for got, found in ranks(2).run(averaged, name, True):
        assert relative_error(got, loss) < FLOAT64
        assert all(relative_error(found[name], gradient) < FLOAT64 for name, gradient in gradients.items())


# ---- what is refused -------------------------------------------------------------------------------------------------


def shifted(logits: Any, labels: Tensor) -> Tensor:
    return cross_entropy(logits[..., :-1, :].flatten(0, 1), labels[..., 1:].flatten())


REFUSED: dict[str, tuple[Batch, Loss]] = {
    "ShiftedByHand": (BATCH, lambda model, sharded: shifted(logits_of(model, sharded), sharded.inputs["labels"])),
    "ShiftedByHand: in float32": (
        BATCH, lambda model, sharded: shifted(logits_of(model, sharded).float(), sharded.inputs["labels"])),
    "ShiftedByHand: without labels": (
        BATCH, lambda model, sharded: shifted(logits_alone(model, sharded).float(), sharded.inputs["labels"])),
    "ShiftedByHand: of ids": (
        WITHOUT_LABELS,
        lambda model, sharded: shifted(logits_of(model, sharded).float(), sharded.inputs["input_ids"])),
    "ShiftedByHand: log-probabilities": (
        WITHOUT_LABELS, lambda model, sharded: -torch.log_softmax(logits_of(model, sharded), -1)[:, 1:].mean()),
    "MeanOfOneRank": (
        BATCH, lambda model, sharded: cross_entropy(
            logits_of(model, sharded).flatten(0, 1), sharded.inputs["shift_labels"].flatten())),
    "MeanOfOneRank: a module's": (
        BATCH, lambda model, sharded: nn.CrossEntropyLoss()(
            logits_alone(model, sharded).transpose(1, 2), sharded.inputs["shift_labels"])),
}  # fmt: skip


def refused(why: str) -> None:
    batch, loss_of = REFUSED[why]
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        loss_of(tiny("llama", "ring_fp32"), sharded)


@pytest.mark.parametrize("why", REFUSED)
def test_a_loss_by_hand_is_refused_on_every_rank(ranks: Ranks, why: str) -> None:
    """Shifted on each rank, labels of chunks' last tokens were lost; a mean counted ranks with few labels too much."""
    for error in ranks(2).run(attempt, refused, why):
        assert error is not None
        assert error[0] == why.partition(":")[0]


def test_one_process_may_shift_and_average(ranks: Ranks) -> None:
    for why in REFUSED:
        assert ranks(1).run(attempt, refused, why) == [None]


# ---- as a tensor -----------------------------------------------------------------------------------------------------


def test_they_are_used_like_the_tensor_that_they_hold() -> None:
    weight = torch.randn(2, 8, 11, dtype=torch.float64, requires_grad=True)
    origin = Origin(11, None, 16, None)
    local = LocalLogits.of(weight * 1, origin)
    assert (local.shape, local.dtype, local.requires_grad) == (weight.shape, weight.dtype, True)
    (local**2).sum().backward()
    assert torch.equal(weight.grad, 2 * weight.detach())  # type: ignore[arg-type]
    traced = torch.compile(lambda x: torch.log_softmax(x, -1).square().sum(), backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(LocalLogits.of(weight * 1, origin)), torch.log_softmax(weight, -1).square().sum())
    values = LocalLogits.of(weight.detach().clone(), origin)
    assert values.numpy().sum() == pytest.approx(float(weight.sum()))
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is Tensor and torch.equal(loaded, weight.detach())
    values.mul_(2.0)
    assert torch.equal(values.softmax(-1), (2 * weight.detach()).softmax(-1))
    for index in ((..., slice(0, 5), slice(None)), (0,), (slice(None), -1), (weight[..., 0] > 0,), ([1],), (None, ...)):
        assert torch.equal(values[index], (2 * weight.detach())[index])
