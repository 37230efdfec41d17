"""Weights that begin or cease to train after DDP wrapped their model train as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, refusal_of, trainer_of
from tests.helpers.models.tiny_models import tiny


class Thaws(TrainerCallback):
    """Lets the second layer train from the second step on."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["model"].requires_grad_(True)


class ThawsBefore(Thaws):
    """Lets it train from the first step on, after DDP wrapped the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["model"].requires_grad_(True)


def losses_of(mesh: Mesh, callback: type[TrainerCallback], layer: int) -> list[float]:
    """The losses of a trainer whose model begins with a frozen layer."""
    with launched(mesh), a_folder(None) as folder:
        model = tiny("llama", "ring_fp32" if mesh.cp > 1 else "sdpa")
        model.model.layers[layer].requires_grad_(False)
        run = Run(why="", steps=4, arguments={"eval_strategy": "no", "ddp_find_unused_parameters": False})
        trainer = trainer_of(run, mesh, folder, model, callbacks=[callback()])
        trainer.train()
        return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]


@pytest.mark.parametrize("callback", [Thaws, ThawsBefore])
def test_a_layer_that_a_trainer_thaws_trains_as_in_one_process(ranks: Ranks, callback: type[TrainerCallback]) -> None:
    """Ranks stepped by the gradients of their own tokens, and were refused since."""
    want = ranks(1).run(losses_of, Mesh(), callback, 1)[0]
    for got in ranks(2).run(losses_of, Mesh(cp=2), callback, 1):
        assert got == pytest.approx(want, rel=1e-5)


def outcome_of_a_step(model: DistributedDataParallel) -> str:
    """What a step is refused with; "": it is not."""
    sharded = hf_ring_attn.shard(tokens(23))

    def step() -> None:
        with sharded:
            model(**sharded.inputs).loss.backward()

    raised = attempt(step)
    torch.distributed.barrier()
    return "" if raised is None else raised[0]


def steps_of_a_loop(wraps_again: bool) -> list[str]:
    model = tiny("llama", "ring_fp32").train()
    model.model.layers[1].requires_grad_(False)
    wrapped, found = DistributedDataParallel(model), []
    for step in range(4):  # after a refusal, too
        if step == 1:  # fewer weights than before are no matter
            model.model.layers[0].mlp.requires_grad_(False)
            wrapped = DistributedDataParallel(model)
        if step == 2:
            model.requires_grad_(True)
            wrapped = DistributedDataParallel(model) if wraps_again else wrapped
        found.append(outcome_of_a_step(wrapped))
    return found


@pytest.mark.parametrize("wraps_again", [True, False])
def test_a_model_that_is_wrapped_anew_trains(ranks: Ranks, wraps_again: bool) -> None:
    assert ranks(2).run(steps_of_a_loop, wraps_again) == [["", "", "", ""]] * 2


class Swaps(TrainerCallback):
    """Trains one layer in place of the other from the second step on: as many weights as before."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        first, second = given["model"].model.layers
        first.requires_grad_(False)
        second.requires_grad_(True)


def test_one_layer_in_place_of_another_trains_as_in_one_process(ranks: Ranks) -> None:
    want = ranks(1).run(losses_of, Mesh(), Swaps, 1)[0]
    for got in ranks(2).run(losses_of, Mesh(cp=2), Swaps, 1):
        assert got == pytest.approx(want, rel=1e-5)


class Warms(Thaws):
    """Freezes the second layer for the first step, after DDP wrapped the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["model"].model.layers[1].requires_grad_(False)


def warmed(mesh: Mesh) -> list[float]:
    with launched(mesh), a_folder(None) as folder:
        arguments = {"eval_strategy": "no", "ddp_find_unused_parameters": True}
        run = Run(why="", steps=3, arguments=arguments)
        model = tiny("llama", "ring_fp32" if mesh.cp > 1 else "sdpa")
        trainer = trainer_of(run, mesh, folder, model, callbacks=[Warms()])
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_layer_that_is_frozen_for_the_first_step_alone_trains_later(ranks: Ranks) -> None:
    """DDP averages its gradients, since it trained when it was wrapped."""
    want = ranks(1).run(warmed, Mesh())[0]
    for got in ranks(2).run(warmed, Mesh(cp=2)):
        assert got == pytest.approx(want, rel=1e-6)


# ---- weights that cease to train -------------------------------------------------------------------------------------


class Freezes(TrainerCallback):
    """Freezes the first layer for the last step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 2:
            given["model"].model.layers[0].requires_grad_(False)


class FreezesBefore(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["model"].model.layers[0].requires_grad_(False)


def trained_while_freezing(mesh: Mesh, callback: type[TrainerCallback], finds: bool) -> tuple[str, list[float], float]:
    """What a trainer raises; the norms of the gradients of its steps; the norm of a weight at the end."""
    with launched(mesh), a_folder(None) as folder:
        arguments = {"eval_strategy": "no", "ddp_find_unused_parameters": finds}
        run = Run(why="", steps=3, arguments=arguments)
        model = tiny("llama", "ring_fp32" if mesh.cp > 1 else "sdpa")
        trainer = trainer_of(run, mesh, folder, model, callbacks=[callback()])
        error, _ = refusal_of(trainer)
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
        return error, norms, float(model.model.layers[1].mlp.down_proj.weight.double().norm())


@pytest.mark.parametrize("finds", [True, False])
@pytest.mark.parametrize("callback", [Freezes, FreezesBefore])
def test_a_layer_that_is_frozen_after_ddp_wrapped_it_leaves_the_others_exact(
    ranks: Ranks, callback: type[TrainerCallback], finds: bool
) -> None:
    """DDP waited for its gradients, and left others as they were: the last step of each rank was its own."""
    _, norms, last = ranks(1).run(trained_while_freezing, Mesh(), callback, finds)[0]
    for error, got, end in ranks(2).run(trained_while_freezing, Mesh(cp=2), callback, finds):
        assert error == "" and got == pytest.approx(norms, rel=1e-5) and end == pytest.approx(last, rel=1e-6)


def outcome_of_steps_inside() -> str:
    """What a loop is refused with whose optimizers step in hooks on the weights, by gradients of a rank's tokens."""
    model = tiny("llama", "ring_fp32").train()
    wrapped = DistributedDataParallel(model)
    for weight in model.parameters():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _weight, one=optimizer: one.step())
    return outcome_of_a_step(wrapped)


def test_optimizers_that_step_inside_the_backward_are_refused(ranks: Ranks) -> None:
    assert ranks(2).run(outcome_of_steps_inside) == ["UnsupportedModel"] * 2


def weight_of_steps_by_ddp(in_ring: bool, late: bool) -> tuple[str, Tensor]:
    """What a loop is refused with whose optimizers step inside the backward; a weight after three steps.

    Args:
        late: they are set after DDP's first forward, so torch's hooks step them, before DDP has averaged.
    """
    model: Any = tiny("llama", "ring_fp32").train()
    wrapped = DistributedDataParallel(model) if in_ring else model

    def run(batches: int, trains: bool) -> None:
        for _ in range(batches):
            with torch.set_grad_enabled(trains), hf_ring_attn.shard(tokens(23)) as sharded:
                loss = wrapped(**sharded.inputs).loss
            if trains:
                loss.backward()

    run(int(late), trains=False)
    _apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters()), {"lr": 0.1})
    # Without a GPU torch 2.13's DDP fails to ask for the stream of such steps.
    with mock.patch.object(torch.accelerator, "current_stream"):
        raised = attempt(run, 3, True)
    return "" if raised is None else raised[0], model.lm_head.weight.detach()


def test_optimizers_that_ddp_steps_inside_its_backward(ranks: Ranks) -> None:
    """The first step asked DDP's reducer, which was locked, and hung."""
    _, want = weight_of_steps_by_ddp(in_ring=False, late=False)
    for error, got in ranks(2).run(weight_of_steps_by_ddp, True, False):
        assert error == "" and relative_error(got, want) < 1e-6


def outcome_with_a_nameless_hook() -> str:
    """What an optimizer's step is refused with, if DDP has a hook of the program's own without a __name__."""
    model: Any = tiny("llama", "ring_fp32").train()
    wrapped, hook = DistributedDataParallel(model), partial(allreduce_hook)
    wrapped._comm_hooks.append((hook, None))  # DDP itself would call it, too
    outcome = outcome_of_a_step(wrapped)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return outcome


def test_a_hook_of_ddp_needs_no_name(ranks: Ranks) -> None:
    assert ranks(2).run(outcome_with_a_nameless_hook) == ["", ""]


def refused_with_a_hook(divides: bool) -> str:
    """What a backward is refused with whose DDP has a hook that sums gradients over ranks, or divides the sum."""
    wrapped = DistributedDataParallel(tiny("llama", "ring_fp32").train())

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent = bucket.buffer().div_(dist.get_world_size()) if divides else bucket.buffer()
        summed: torch.futures.Future[Tensor] = dist.all_reduce(sent, async_op=True).get_future()
        return summed.then(lambda future: future.value()[0])

    # DDP compares the annotations with classes, which are texts in this file.
    hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    wrapped.register_comm_hook(None, hook)
    with hf_ring_attn.shard(tokens(23)) as sharded:
        loss = wrapped(**sharded.inputs).loss
    raised = attempt(loss.backward)
    dist.barrier()
    return "" if raised is None else raised[1]


def test_a_hook_of_ddp_gives_the_mean(ranks: Ranks) -> None:
    """Gradients were twice the mean, silently."""
    assert ranks(2).run(refused_with_a_hook, True) == ["", ""]
    for raised in ranks(2).run(refused_with_a_hook, False):
        assert "gives 2 times the mean of the ranks' gradients" in raised


def test_optimizers_that_torch_steps_before_ddp_has_averaged(ranks: Ranks) -> None:
    assert [error for error, _ in ranks(2).run(weight_of_steps_by_ddp, True, True)] == ["RanksDiffer"] * 2


def weight_beside_a_probe(in_ring: bool) -> tuple[str, Tensor]:
    """What a loop is refused with whose first rank steps a probe between DDP's forward and backward; a weight then."""
    model: Any = tiny("llama", "ring_fp32").train()
    wrapped = DistributedDataParallel(model) if in_ring else model
    optimizer, probe = torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.Linear(2, 2)

    def run() -> None:
        for _ in range(2):
            with hf_ring_attn.shard(tokens(23)) as sharded:
                loss = wrapped(**sharded.inputs).loss
            if sharded.ring.rank == 0:
                torch.optim.SGD(probe.parameters(), lr=0.1).step()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    raised = attempt(run)
    return "" if raised is None else raised[0], model.lm_head.weight.detach()


def test_a_rank_may_step_other_weights_before_ddp_has_averaged(ranks: Ranks) -> None:
    """It compared gradients of DDP's weights at its next step, alone."""
    _, want = weight_beside_a_probe(in_ring=False)
    for error, got in ranks(2).run(weight_beside_a_probe, True):
        assert error == "" and relative_error(got, want) < 1e-6


# ---- gradients that DDP was told not to average ----------------------------------------------------------------------


def outcomes_without_sync(averages: bool) -> tuple[list[str], float]:
    """Of two steps whose last backward is in no_sync, what each raises; the sum of a weight.

    Args:
        averages: the program averages by itself.
    """
    model = tiny("llama", "ring_fp32").train()
    wrapped, found = DistributedDataParallel(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        with wrapped.no_sync(), (sharded := hf_ring_attn.shard(tokens(23))):
            wrapped(**sharded.inputs).loss.backward()
        for weight in model.parameters() if averages else ():
            torch.distributed.all_reduce(weight.grad)
            weight.grad /= 2
        optimizer.step()

    for _ in range(2):
        raised = attempt(step)
        found.append("" if raised is None else raised[0])
        optimizer.zero_grad()
    return found, float(model.lm_head.weight.detach().double().sum())


def test_a_step_after_no_sync_needs_gradients_that_were_averaged_by_hand(ranks: Ranks) -> None:
    """The last step of a run was silently that of each rank's tokens."""
    before = float(tiny("llama").lm_head.weight.detach().double().sum())
    for said, weight in ranks(2).run(outcomes_without_sync, False):
        assert said == ["RanksDiffer"] * 2 and weight == before
    (said, weight), other = ranks(2).run(outcomes_without_sync, True)
    assert said == ["", ""] and other == (said, weight) and weight != before


class PastDDP(Trainer):
    """Calls the model that it knows, not the one that it gets."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        known: Any = self.model
        out = known(**inputs)
        return (out.loss, out) if return_outputs else out.loss


class AlsoPastDDP(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out, known = model(**inputs), self.model
        loss = out.loss + known(**inputs).loss  # type: ignore[misc]  # Trainer says that it may be None
        return (loss, out) if return_outputs else loss


def losses_past_ddp(mesh: Mesh, kind: type[Trainer]) -> list[float]:
    with launched(mesh), a_folder(None) as folder:
        run = Run(why="", steps=3, arguments={"eval_strategy": "no", "ddp_find_unused_parameters": False})
        model = tiny("llama", "ring_fp32" if mesh.cp > 1 else "sdpa")
        trainer = trainer_of(run, mesh, folder, model, kind=kind)
        trainer.train()
        return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]


@pytest.mark.parametrize("kind", [PastDDP, AlsoPastDDP])
def test_a_trainer_that_calls_the_model_inside_ddp_is_exact(ranks: Ranks, kind: type[Trainer]) -> None:
    """The first step was silently that of each rank's tokens; the second batch found weights that differ."""
    want = ranks(1).run(losses_past_ddp, Mesh(), kind)[0]
    for got in ranks(2).run(losses_past_ddp, Mesh(cp=2), kind):
        assert got == pytest.approx(want, rel=1e-5)


class AccumulatesLater(TrainerCallback):
    """Trainer counts batches of two steps together from here on, and steps within its no_sync."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        args.gradient_accumulation_steps = 2


def test_a_trainer_whose_accumulation_changes_is_told_why(ranks: Ranks) -> None:
    for error, steps in ranks(2).run(raised_by_trainer_that_accumulates):
        assert error.startswith("RanksDiffer: the ranks of one ring must hold the same gradient of "), error
        assert "Trainer does so if gradient_accumulation_steps changes while it trains" in error
        assert steps == 1


def raised_by_trainer_that_accumulates() -> tuple[str, int]:
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        run = Run(why="", steps=3, arguments={"eval_strategy": "no"})
        trainer = trainer_of(run, Mesh(cp=2), folder, tiny("llama", "ring_fp32"), callbacks=[AccumulatesLater()])
        return refusal_of(trainer)
