"""A loop's own loss of a rank's tokens: exact as a sum over shift_labels, refused if it shifts or averages by hand."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import hf_ring_attn
from hf_ring_attn import Sharded
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.integration.losses.local_logits import LocalLogits
from hf_ring_attn.integration.losses.origins import Origin
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.plain_jobs import Batch, gradients_of, tokens
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import tiny

Ranks = Callable[[int], LiveRanks]
Inputs = dict[str, Any]
Loss = Callable[[Any, Sharded], Tensor]
BATCH = tokens(23)
WITHOUT_LABELS: Batch = {"input_ids": BATCH["input_ids"]}
EVEN: Batch = {"input_ids": BATCH["input_ids"][:, :20]}
"""A ring of two adds no padding."""
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


class Same(torch.autograd.Function):
    """A function of a program's own whose result is a view of its input."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def by_a_function(logits: Any, inputs: Inputs) -> Tensor:
    negative: Any = Negative.apply(logits)  # type: ignore[no-untyped-call]
    return summed(-negative, inputs)


def by_a_view(logits: Any, inputs: Inputs) -> Tensor:
    return summed(Same.apply(logits), inputs)  # type: ignore[no-untyped-call]


def checkpointed_head(model: Any, sharded: Any) -> Tensor:
    """The loss of a head that a checkpoint of the program's own calls, and calls again after the batch."""
    hidden = model(**sharded.inputs, output_hidden_states=True).hidden_states[-1]
    loss: Tensor = checkpoint(lambda x: summed(model.lm_head(x), sharded.inputs), hidden, use_reentrant=False)
    return loss


def compiled(logits: Any, inputs: Inputs) -> Tensor:
    loss: Tensor = torch.compile(summed, backend="aot_eager")(logits, inputs)
    return loss


def hidden_of(model: Any, sharded: Sharded) -> Any:
    names = {"input_ids", "position_ids", "attention_mask", "use_cache"} & sharded.inputs.keys()
    return model.model(**{name: sharded.inputs[name] for name in names}).last_hidden_state


def each_loss(logits: Any, inputs: Inputs) -> tuple[Any, Tensor]:
    """The loss of each token, and which tokens have one."""
    targets = inputs["shift_labels"].flatten()
    return cross_entropy(logits.flatten(0, 1), targets, reduction="none"), targets != -100


def over_a_count_of_all_ranks(logits: Any, inputs: Inputs) -> Tensor:
    losses, counts = each_loss(logits, inputs)
    count = counts.sum().double()
    dist.all_reduce(count)
    loss: Tensor = (losses * counts).sum() / (count / dist.get_world_size())
    return loss


def beside_means_for_a_log(logits: Any, inputs: Inputs) -> Tensor:
    losses, counts = each_loss(logits, inputs)
    assert losses[counts].mean().item() > 0
    assert losses.sum() / counts.sum() > 0
    loss: Tensor = losses[counts].sum() / inputs["num_items_in_batch"]
    return loss


def in_parts_of_any_number(logits: Any, inputs: Inputs) -> Tensor:
    """More parts on one rank than on another, which has a loss of nothing."""
    parts = 2 + dist.get_rank()
    each = zip(logits.chunk(parts, 1), inputs["shift_labels"].chunk(parts, 1), strict=True)
    found = torch.stack([summed(x, {**inputs, "shift_labels": labels}) for x, labels in each]).sum()
    return found + 0.0 * logits.sum() if dist.get_rank() else found


def a_mean_by_its_part_of_all_labels(logits: Any, inputs: Inputs, is_wide: bool = False) -> Tensor:
    losses, counts = each_loss(logits, inputs)
    mean: Tensor = losses[counts][:, None].mean(0).sum() if is_wide else losses[counts].mean()
    return mean * (counts.sum() / float(inputs["num_items_in_batch"]))


def token_by_token(logits: Any, inputs: Inputs) -> Tensor:
    targets = inputs["shift_labels"]
    each = [cross_entropy(logits[:, at], targets[:, at], reduction="sum") for at in range(targets.shape[1])]
    return torch.stack(each).sum() / float(inputs["num_items_in_batch"])


def beside_numbers_for_a_log(logits: Any, inputs: Inputs) -> Tensor:
    """What is computed of a rank's tokens for a log may be anything, and be sent to other ranks."""
    losses, counts = each_loss(logits, inputs)
    assert logits.detach()[:, :-1].argmax(-1).tolist()
    with torch.no_grad():
        found = logits.argmax(-1)
        hardest = losses.topk(3).values.mean() + losses.quantile(0.5) + (found == inputs["shift_labels"]).sum()
    assert found.numpy().shape == found.shape and copy.deepcopy(found).tolist() == found.tolist()
    dist.all_reduce(hardest)
    parts: list[Tensor] = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, found)
    loss: Tensor = losses[counts].sum() / inputs["num_items_in_batch"]
    return loss


def scaled_by_all(logits: Any, inputs: Inputs) -> Tensor:
    """The loss, as a program has it that knows the largest loss of all ranks' tokens."""
    losses, _ = each_loss(logits, inputs)
    largest = losses.detach().max().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    loss: Tensor = (losses / largest).sum() * largest.item() / float(inputs["num_items_in_batch"])
    return loss


def by_a_loss_of_its_own(logits: Any, inputs: Inputs) -> Tensor:
    found: Any = OwnLoss.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, 1), inputs["shift_labels"].flatten(), "sum"
    )
    loss: Tensor = found / float(inputs["num_items_in_batch"])
    return loss


class OwnLoss(torch.autograd.Function):
    """A loss of a rank's labels, with a gradient of the program's own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        with torch.enable_grad():
            x = logits.detach().requires_grad_()
            loss = cross_entropy(x, targets, reduction=reduction)
            (gradient,) = torch.autograd.grad(loss, x)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient, None, None


def in_two_uneven_parts(logits: Any, inputs: Inputs) -> Tensor:
    parts = [slice(None, 5), slice(5, None)]
    each = [summed(logits[:, one], {**inputs, "shift_labels": inputs["shift_labels"][:, one]}) for one in parts]
    return torch.stack(each).sum()


def by_weights_of_each(logits: Any, inputs: Inputs) -> Tensor:
    """Weights of two kinds of tokens, as of a prompt: of one kind times two, of both by half of it, is all."""
    losses, counts = each_loss(logits, inputs)
    kinds = torch.where(inputs["input_ids"].flatten() % 2 == 0, 0.1, 1.0)
    loss: Tensor = ((losses * kinds).sum() + (losses * (1 - kinds) * counts).sum()) / float(
        inputs["num_items_in_batch"]
    )
    return loss


EXACT: dict[str, Loss] = {
    "a sum": lambda model, sharded: summed(logits_of(model, sharded), sharded.inputs),
    "without labels": lambda model, sharded: summed(logits_alone(model, sharded), sharded.inputs),
    "scaled": lambda model, sharded: summed(logits_alone(model, sharded) * 2 / 2.0, sharded.inputs),
    "in parts": lambda model, sharded: in_parts(logits_alone(model, sharded), sharded.inputs),
    "in slices": lambda model, sharded: in_slices(logits_of(model, sharded), sharded.inputs),
    "a function of its own": lambda model, sharded: by_a_function(logits_alone(model, sharded), sharded.inputs),
    "a function of its own that gives a view": lambda model, sharded: by_a_view(
        logits_alone(model, sharded), sharded.inputs),
    "a head in a checkpoint": checkpointed_head,
    "compiled": lambda model, sharded: compiled(logits_alone(model, sharded), sharded.inputs),
    "of a tuple": lambda model, sharded: summed(
        model(**{**sharded.inputs, "labels": None}, return_dict=False)[0], sharded.inputs),
    "of hidden states": lambda model, sharded: summed(model.lm_head(hidden_of(model, sharded)), sharded.inputs),
    "of all hidden states": lambda model, sharded: summed(
        model.lm_head(model(**sharded.inputs, output_hidden_states=True).hidden_states[-1]), sharded.inputs),
    "over a count of all ranks": lambda model, sharded: over_a_count_of_all_ranks(
        logits_alone(model, sharded), sharded.inputs),
    "by place, then over rows": lambda model, sharded: each_loss(
        logits_alone(model, sharded), sharded.inputs)[0].unflatten(0, (2, -1)).mean(0).sum() * (
            2 / float(sharded.inputs["num_items_in_batch"])),
    "and nothing of tokens without a label": lambda model, sharded: summed(
        logits_of(model, sharded), sharded.inputs) + 0.0 * logits_of(model, sharded).sum(),
    "beside means for a log": lambda model, sharded: beside_means_for_a_log(
        logits_of(model, sharded), sharded.inputs),
    "a mean, by its part of all labels": lambda model, sharded: a_mean_by_its_part_of_all_labels(
        logits_alone(model, sharded), sharded.inputs),
    "a mean of rows of numbers, by its part": lambda model, sharded: a_mean_by_its_part_of_all_labels(
        logits_alone(model, sharded), sharded.inputs, is_wide=True),
    "token by token": lambda model, sharded: token_by_token(logits_alone(model, sharded), sharded.inputs),
    "summed over each row": lambda model, sharded: each_loss(
        logits_alone(model, sharded), sharded.inputs)[0].unflatten(0, (2, -1)).sum(1).sum() / float(
            sharded.inputs["num_items_in_batch"]),
    "beside numbers for a log": lambda model, sharded: beside_numbers_for_a_log(
        logits_alone(model, sharded), sharded.inputs),
    "scaled by all": lambda model, sharded: scaled_by_all(logits_alone(model, sharded), sharded.inputs),
    "a loss of its own": lambda model, sharded: by_a_loss_of_its_own(logits_alone(model, sharded), sharded.inputs),
    "in two uneven parts": lambda model, sharded: in_two_uneven_parts(logits_alone(model, sharded), sharded.inputs),
    "by weights of each": lambda model, sharded: by_weights_of_each(logits_alone(model, sharded), sharded.inputs),
    "sorted": lambda model, sharded: each_loss(logits_alone(model, sharded), sharded.inputs)[0].sort().values.sum()
        / float(sharded.inputs["num_items_in_batch"]),
    "in parts of any number": lambda model, sharded: in_parts_of_any_number(
        logits_alone(model, sharded), sharded.inputs),
}  # fmt: skip


def trained(batch: Batch, loss_of: Loss, in_ring: bool, trains: str = "") -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of a step; outside of a ring ``loss_of`` gets the whole batch's inputs."""
    model = tiny("llama", "ring_fp32" if in_ring else None).double()
    for name, weight in model.named_parameters():
        weight.requires_grad_(trains in name)
    sharded: Any = hf_ring_attn.shard(batch) if in_ring else SimpleNamespace(inputs=batch, gather=lambda x: x)
    with sharded if in_ring else nullcontext():
        loss = loss_of(model, sharded)
    loss.backward()
    if in_ring:
        sharded.reduce_gradients(model)
        torch.optim.SGD(model.parameters(), lr=0.0).step()  # ranks have compared
    return sharded.reduce(loss) if in_ring else loss.detach(), gradients_of(model)


def assert_same(found: list[Any], want: tuple[Tensor, dict[str, Tensor]], exact: float) -> None:
    for loss, gradients in found:
        assert relative_error(loss, want[0]) < exact
        assert all(relative_error(gradients[name], gradient) < exact for name, gradient in want[1].items())


def summed_up(loss_of: str, trains: str = "") -> tuple[Tensor, dict[str, Tensor]]:
    return trained(BATCH, EXACT[loss_of], in_ring=True, trains=trains)


@pytest.mark.parametrize("loss_of", EXACT)
def test_a_sum_over_the_shifted_labels_is_exact(ranks: Ranks, loss_of: str) -> None:
    want = trained(BATCH, lambda model, sharded: model(**sharded.inputs).loss, in_ring=False)
    assert_same(ranks(2).run(summed_up, loss_of), want, 1e-6)  # transformers' loss is float32 in any dtype


def test_a_sum_is_exact_where_only_the_head_trains(ranks: Ranks) -> None:
    """Ranks compare once, though one computes more parts of the loss than the other."""
    want = trained(BATCH, lambda model, sharded: model(**sharded.inputs).loss, in_ring=False, trains="lm_head")
    assert_same(ranks(2).run(summed_up, "in parts of any number", "lm_head"), want, 1e-6)


def shifted(logits: Any, labels: Tensor) -> Tensor:
    return cross_entropy(logits[..., :-1, :].flatten(0, 1), labels[..., 1:].flatten())


def gathered(batch: Batch, in_ring: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of whole rows, whose logits a program may shift."""
    return trained(
        batch, lambda model, sharded: shifted(sharded.gather(logits_of(model, sharded)), batch["input_ids"]), in_ring
    )


@pytest.mark.parametrize("batch", [BATCH, WITHOUT_LABELS], ids=["labels", "no labels"])
def test_gathered_logits_may_be_shifted(ranks: Ranks, batch: Batch) -> None:
    assert_same(ranks(2).run(gathered, batch, True), gathered(batch, in_ring=False), FLOAT64)


POOLED: dict[str, tuple[Loss, Callable[[Tensor], Tensor]]] = {
    "gathered": (lambda model, sharded: sharded.gather(hidden_of(model, sharded))[:, -1], lambda x: x[:, -1]),
    "the last token": (lambda model, sharded: sharded.last_token(hidden_of(model, sharded)), lambda x: x[:, -1]),
    "a mean": (lambda model, sharded: sharded.row_mean(hidden_of(model, sharded)), lambda x: x.mean(1)),
    "a sum": (lambda model, sharded: sharded.row_sum(hidden_of(model, sharded)), lambda x: x.sum(1)),
}
"""Of whole rows in a ring, and in one process."""


def in_bfloat16() -> torch.dtype:
    """The dtype of the losses of tokens, whose mean a program takes by its part of all labels."""
    model = tiny("llama", "ring_fp32").bfloat16()
    with (sharded := hf_ring_attn.shard(BATCH)):
        logits = logits_alone(model, sharded)
        loss = a_mean_by_its_part_of_all_labels(logits, sharded.inputs)
    loss.backward()
    sharded.reduce_gradients(model)
    torch.optim.SGD(model.parameters()).step()  # ranks have compared
    dtype: torch.dtype = each_loss(logits.detach(), sharded.inputs)[0].dtype
    return dtype


def test_weights_in_16_bits_may_differ_by_rounding(ranks: Ranks) -> None:
    assert ranks(2).run(in_bfloat16) == [torch.bfloat16] * 2


def pooled(name: str, in_ring: bool) -> tuple[Tensor, dict[str, Tensor]]:
    in_rows, alone = POOLED[name]
    take: Loss = in_rows if in_ring else lambda model, sharded: alone(hidden_of(model, sharded))
    return trained(BATCH, lambda model, sharded: take(model, sharded).mul(0.01).sigmoid().sum(), in_ring)


@pytest.mark.parametrize("name", POOLED)
def test_states_of_whole_rows_may_be_pooled(ranks: Ranks, name: str) -> None:
    assert_same(ranks(2).run(pooled, name, True), pooled(name, in_ring=False), FLOAT64)


FULL: Batch = {"input_ids": BATCH["input_ids"][:, :20], "targets": BATCH["input_ids"][:, 3:23]}
"""Every token has a target, so the mean of the ranks' means is the row's: 20 tokens are chunks of 5."""
TARGETS: dict[str, Batch] = {
    "targets": FULL,
    "shift_labels": {"input_ids": FULL["input_ids"], "labels": FULL["targets"], "shift_labels": FULL["targets"]},
}


def averaged(name: str, in_ring: bool) -> tuple[Tensor, dict[str, Tensor]]:
    def loss_of(model: Any, sharded: Sharded) -> Tensor:
        names = {"input_ids", "position_ids", "attention_mask"} & sharded.inputs.keys()
        logits = model(**{name: sharded.inputs[name] for name in names}).logits
        return cross_entropy(logits.flatten(0, 1), sharded.inputs[name].flatten())

    return trained(TARGETS[name], loss_of, in_ring)


@pytest.mark.parametrize("name", TARGETS)
def test_a_mean_over_as_many_targets_on_each_rank_is_exact(ranks: Ranks, name: str) -> None:
    assert_same(ranks(2).run(averaged, name, True), averaged(name, in_ring=False), FLOAT64)


# ---- as a tensor -----------------------------------------------------------------------------------------------------


def test_they_are_used_like_the_tensor_that_they_hold() -> None:
    weight = torch.randn(2, 8, 11, dtype=torch.float64, requires_grad=True)
    origin = Origin(Ring.simulated(2, 0), rows=2, tokens=8, padding=[])
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
