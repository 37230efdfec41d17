"""Gradients that a loop averages: ranks that changed them, or their weights, stop together."""

from __future__ import annotations

import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_ring_attn
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens, told
from tests.helpers.models.tiny_models import tiny


def trained(model: Any) -> Any:
    """The batch of a forward and a backward."""
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        out = model(**sharded.inputs)
    out.loss.backward()
    return sharded


def changed_on(rank: int, what: str) -> tuple[str, str, bool, float]:
    """What was raised if one rank changes something before the average; if gradients are untouched; seconds."""
    model: Any = tiny("llama", "ring_fp32").train()
    sharded, weights = trained(model), list(model.parameters())
    with torch.no_grad():
        for x in weights if dist.get_rank() == rank else ():
            x.add_(1.0) if what == "weights" else x.grad.mul_(2.0)
    before, started = [x.grad.clone() for x in weights], time.monotonic()
    name, text = attempt(sharded.reduce_gradients, model) or ("", "")
    seconds = time.monotonic() - started
    dist.barrier()  # no rank is in another collective
    return name, text, all(map(torch.equal, before, [x.grad for x in weights])), seconds


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_that_one_rank_changed_stop_all_ranks(ranks: Ranks, rank: int) -> None:
    """The others waited in the average until the time-out."""
    for here, (name, text, untouched, seconds) in enumerate(ranks(3).run(changed_on, rank, "weights")):
        assert name == ("GradientsChanged" if here == rank else "RefusedElsewhere")
        assert "weights were changed after the forward" in text and untouched and seconds < 10
        assert here == rank or f"rank {rank}: GradientsChanged: sharded.reduce_gradients" in text


@pytest.mark.parametrize("rank", [0, 2])
def test_gradients_that_one_rank_scaled_stop_all_ranks(ranks: Ranks, rank: int) -> None:
    """Ranks that had scaled nothing took a step with gradients that the other one refused."""
    for name, text, untouched, _ in ranks(3).run(changed_on, rank, "gradients"):
        assert name == "GradientsChanged" and untouched
        assert "another factor (from 1 to 2)" in text


def scaled() -> tuple[torch.Tensor, tuple[str, str] | None]:
    """The gradient of a weight beside the model; what is raised for no weight."""
    model: Any = tiny("llama", "ring_fp32").double().requires_grad_(False)
    scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        loss = model(**sharded.inputs).loss * scale
    loss.backward()
    sharded.reduce_gradients(scale)
    assert scale.grad is not None
    return scale.grad, attempt(sharded.reduce_gradients, [scale])


def test_one_weight_beside_the_model_is_averaged(ranks: Ranks) -> None:
    model: Any = tiny("llama", None).double()
    want = model(**tokens(23)).loss.detach().double()
    for got, raised in ranks(2).run(scaled):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert raised is not None and raised[0] == "BadOption" and "a torch.nn.Module, or a weight" in raised[1]


def sent_by_an_average() -> list[str]:
    model: Any = tiny("llama", "ring_fp32").train()
    sharded = trained(model)
    names = ("all_reduce", "all_gather_object", "all_gather_into_tensor", "batch_isend_irecv", "broadcast")
    calls = {name: mock.Mock(side_effect=getattr(dist, name)) for name in names}
    with mock.patch.multiple(dist, **calls):
        sharded.reduce_gradients(model)
    return [name for name, call in calls.items() for _ in range(call.call_count)]


def test_an_average_of_a_small_model_is_one_message(ranks: Ranks) -> None:
    assert ranks(2).run(sent_by_an_average) == [["all_reduce"]] * 2


def held_without_an_average() -> list[bool]:
    """If each batch is alive once the program has dropped it, in a loop that averages nothing yet."""
    model: Any = tiny("llama", "ring_fp32").train()
    alive = []
    for _ in range(2):
        sharded = trained(model)
        context = weakref.ref(sharded.context)
        del sharded
        alive.append(context() is not None)
    return alive


def test_a_batch_goes_before_the_next_one_comes(ranks: Ranks) -> None:
    """The check of its gradients held the batch of an accumulated step until the next one."""
    assert ranks(2).run(held_without_an_average) == [[False, False]] * 2


def sharpened(again: bool) -> tuple[list[torch.Tensor | None], tuple[str, str] | None]:
    """Gradients of a SAM step: of weights moved along the averaged gradient, by two forwards of one batch; the refusal
    if the program averages ``again`` before it moves them, or only at the end."""
    model: Any = tiny("llama", "ring_fp32").double().train()
    weights = list(model.parameters())
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        model(**sharded.inputs).loss.backward()
        if again:
            sharded.reduce_gradients(model)
        moved(weights)
        model(**sharded.inputs).loss.backward()
    raised = attempt(sharded.reduce_gradients, model)
    return [x.grad for x in weights], raised


def moved(weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for x in weights:
            assert x.grad is not None
            x.add_(x.grad, alpha=0.1)
            x.grad = None


@pytest.mark.parametrize("again", [True, False])
def test_weights_may_change_between_two_forwards_of_one_batch(ranks: Ranks, again: bool) -> None:
    """The second average was refused: the weights' versions were those of the first forward."""
    model: Any = tiny("llama", None).double().train()
    model(**tokens(23)).loss.backward()
    moved(weights := list(model.parameters()))
    model(**tokens(23)).loss.backward()
    for got, raised in ranks(2).run(sharpened, again):
        assert raised is None
        for x, want in zip(got, weights, strict=True):
            torch.testing.assert_close(x, want.grad, rtol=1e-5, atol=1e-7)


def left_by_models_that_went(number: int) -> tuple[str, str] | None:
    """The refusal of the last of several models in one batch, whose weights may lie in the memory of the others'."""
    sharded, raised = hf_ring_attn.shard(tokens(23)), None
    for changes in range(number):
        model: Any = tiny("llama", "ring_fp32").train()
        with torch.no_grad():
            for x in model.parameters():
                for _ in range(changes):  # each raises its version
                    x.mul_(1)
        with sharded:
            loss = model(**sharded.inputs).loss
        if changes == number - 1:
            loss.backward()
            raised = attempt(sharded.reduce_gradients, model)
        del model, loss, x
    return raised


def test_versions_of_weights_that_are_gone_are_not_those_of_others(ranks: Ranks) -> None:
    assert ranks(2).run(left_by_models_that_went, 6) == [None, None]


def after_uninstall() -> tuple[list[str], list[str]]:
    """The hooks left on the weights of a model that trained in a ring, and what a later batch logs."""
    model: Any = tiny("llama", "ring_fp32").train()
    trained(model)
    hf_ring_attn.uninstall()
    hf_ring_attn.install()
    left: list[str] = [name for name, x in model.named_parameters() if x._post_accumulate_grad_hooks]
    with torch.no_grad():
        next(model.parameters()).add_(1)
    return left, told(trained, tiny("llama", "ring_fp32").train())


def test_uninstall_forgets_models_whose_gradients_nobody_averaged(ranks: Ranks) -> None:
    """A hook stayed on a weight, which copied its gradient after each backward."""
    for left, lines in ranks(2).run(after_uninstall):
        assert left == []
        assert not any("drift apart" in line for line in lines)
