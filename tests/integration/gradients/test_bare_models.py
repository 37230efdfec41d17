"""Gradients of a model without a wrapper are averaged at the end of each backward: a program may read them then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens, told
from tests.helpers.models.tiny_models import tiny

Forward = Callable[[int], Tensor]
"""Maps a batch's seed to its loss."""


def fgm(model: Any, forward: Forward) -> None:
    """Adds the gradients of embeddings that were moved along their gradient."""
    forward(1).backward()
    weight = model.model.embed_tokens.weight
    kept = weight.data.clone()
    weight.data.add_(weight.grad / weight.grad.norm())
    forward(1).backward()
    weight.data.copy_(kept)


def moved_under_no_grad(model: Any, forward: Forward) -> None:
    forward(1).backward()
    weight = model.model.embed_tokens.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight += weight.grad / weight.grad.norm()
    forward(1).backward()
    with torch.no_grad():
        weight.copy_(kept)


def projects(model: Any, forward: Forward) -> None:
    """Removes from the second task's gradient what is against the first's."""
    forward(1).backward()
    first = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    forward(2).backward()
    for x, one in zip(model.parameters(), first, strict=True):
        dot = (x.grad * one).sum()
        x.grad += one - dot.clamp(max=0) / one.square().sum() * one


def clips_each_batch(model: Any, forward: Forward) -> None:
    total = [torch.zeros_like(x) for x in model.parameters()]
    for seed in (1, 2):
        forward(seed).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for x, one in zip(model.parameters(), total, strict=True):
            one += x.grad
        model.zero_grad()
    for x, one in zip(model.parameters(), total, strict=True):
        x.grad = one


def accumulates(model: Any, forward: Forward) -> None:
    for seed in (1, 2, 3):
        forward(seed).backward()


def leaves_some_out(model: Any, forward: Forward) -> None:
    model.model.layers[0].requires_grad_(False)
    forward(1).backward()
    model.model.layers[0].requires_grad_(True)
    forward(2).backward()


def of_logits(model: Any, forward: Forward) -> None:
    fgm(model, lambda seed: forward(-seed))


PROGRAMS = {
    one.__name__: one
    for one in (fgm, moved_under_no_grad, projects, clips_each_batch, accumulates, leaves_some_out, of_logits)
}


def trained(
    name: str, in_ring: bool, checkpoints: str = "", reduces: bool = True, evaluates: bool = False
) -> dict[str, Tensor]:
    """The weights after two steps of a program. Batches of negative seeds have a loss of their own.

    Args:
        evaluates: the model stays in evaluation mode, as `from_pretrained` leaves it.
    """
    model = tiny("llama", "ring_fp32" if in_ring else None).train(not evaluates)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    latest: list[Any] = []

    def forward(seed: int) -> Tensor:
        batch: Any = tokens(23, seed=abs(seed))
        told = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        inputs, count = batch, int((told != -100).sum())
        if in_ring:
            latest[:] = [hf_ring_attn.shard(batch)]
            inputs = latest[0].inputs
            told, count = inputs["shift_labels"], inputs["num_items_in_batch"]
        with latest[0] if in_ring else torch.enable_grad():
            out = model(**inputs)
        if seed > 0:
            loss: Tensor = out.loss
            return loss
        return nn.functional.cross_entropy(out.logits.flatten(0, 1), told.flatten(), reduction="sum") / count

    for _ in range(2):
        PROGRAMS[name](model, forward)
        if in_ring and reduces:
            latest[0].reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.detach() for name, x in model.named_parameters()}


CASES = [(name, kind) for name in PROGRAMS for kind in ("", "recomputed", "reentrant")]


@pytest.mark.turns(4)
@pytest.mark.parametrize(("name", "checkpoints"), CASES)
def test_a_plain_loop_that_reads_gradients_steps_as_one_process(ranks: Ranks, name: str, checkpoints: str) -> None:
    want = trained(name, False)
    for got in ranks(2).run(trained, name, True, checkpoints):
        assert max(relative_error(got[one], x) for one, x in want.items()) < 1e-5


@pytest.mark.parametrize("name", ["fgm", "accumulates", "leaves_some_out"])
def test_one_that_does_not_reduce_them_does_too(ranks: Ranks, name: str) -> None:
    """Replicas drifted apart, with a warning."""
    want = trained(name, False)
    for got in ranks(2).run(trained, name, True, "", False):
        assert max(relative_error(got[one], x) for one, x in want.items()) < 1e-5


@pytest.mark.parametrize("reduces", [True, False])
@pytest.mark.parametrize("name", ["fgm", "clips_each_batch", "of_logits"])
def test_a_loop_that_never_calls_train_does_too(ranks: Ranks, name: str, reduces: bool) -> None:
    """Ranks clipped by the norm of their own tokens' gradients."""
    want = trained(name, False)
    for got in ranks(2).run(trained, name, True, "", reduces, True):
        assert max(relative_error(got[one], x) for one, x in want.items()) < 1e-5


def loss_of_captured_states(model: Any, forward: Forward) -> None:
    """Of hidden states that a hook takes out of the model: nothing that it returns is in this backward."""
    found: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda _module, _args, out: found.append(out))
    forward(-1)
    hook.remove()
    (found[0].square().sum() / 100).backward()


PROGRAMS["loss_of_captured_states"] = loss_of_captured_states


@pytest.mark.parametrize("checkpoints", ["recomputed", "reentrant"])
def test_a_backward_whose_end_is_not_seen_is_told_of_if_nothing_reduces(ranks: Ranks, checkpoints: str) -> None:
    for texts in ranks(2).run(told, attempt, trained, "loss_of_captured_states", True, checkpoints, False):
        assert ["replicas drift apart" in text for text in texts] == [True] * (checkpoints == "reentrant")
