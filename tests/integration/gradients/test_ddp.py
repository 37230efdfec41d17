"""Gradients that DDP leaves as each rank has them are averaged at the end of the backward: steps of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, trainer_of
from tests.helpers.models.tiny_models import tiny

Weights = dict[str, torch.Tensor]


def adapted(attention: str | None) -> Any:
    """A model with two adapters, of which the first is active."""
    torch.manual_seed(5)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model: Any = get_peft_model(tiny("llama", attention), lora, "first")
    model.add_adapter("second", lora)
    model.set_adapter("first")
    return model.train()


def in_steps(
    model: Any, rings: int, program: Callable[[Any, Any, Any], Iterator[Any]], **options: Any
) -> tuple[Weights, list[float]]:
    """The weights after a program of forwards, and the norms of gradients that it yields."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    wrapped = DistributedDataParallel(model, **options) if rings > 1 else model
    with ExitStack() as batches:
        seeds = iter(range(1, 100))

        def forward() -> Any:
            batch: Any = tokens(23, seed=next(seeds))
            if rings > 1:
                sharded = batches.enter_context(hf_ring_attn.shard(batch))
                out = wrapped(**sharded.inputs)
                batches.close()
                return out
            return wrapped(**batch)

        norms = [float(norm) for norm in program(wrapped, forward, optimizer)]
    return {name: x.detach() for name, x in model.named_parameters() if "lora" in name or "layers.1" in name}, norms


def step(model: Any, optimizer: Any) -> torch.Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def inside(model: Any) -> Any:
    return getattr(model, "module", model)


def switches(model: Any, forward: Any, optimizer: Any) -> Iterator[Any]:
    for turn in range(5):
        inside(model).set_adapter(["first", "second"][turn % 2])
        forward().loss.backward()
        yield step(model, optimizer)


def switches_inside_a_step(model: Any, forward: Any, optimizer: Any) -> Iterator[Any]:
    for turn in range(4):
        for adapter in ("second", "first", "second")[turn % 2 :]:
            inside(model).set_adapter(adapter)
            forward().loss.backward()
        yield step(model, optimizer)


def switches_without_sync(model: Any, forward: Any, optimizer: Any) -> Iterator[Any]:
    for _ in range(3):
        for adapter in ("first", "second", "first"):
            inside(model).set_adapter(adapter)
            with model.no_sync() if hasattr(model, "no_sync") else ExitStack():
                forward().loss.backward()
        inside(model).set_adapter("second")
        forward().loss.backward()
        yield step(model, optimizer)


def thaws(model: Any, forward: Any, optimizer: Any) -> Iterator[Any]:
    for turn in range(4):
        inside(model).model.layers[1].requires_grad_(turn >= 2)
        forward().loss.backward()
        yield step(model, optimizer)


def freezes(model: Any, forward: Any, optimizer: Any) -> Iterator[Any]:
    for turn in range(4):
        inside(model).model.layers[0].requires_grad_(turn < 1)
        forward().loss.backward()
        yield step(model, optimizer)


def two_backwards(model: Any, forward: Any, optimizer: Any) -> Iterator[Any]:
    loss = forward().loss
    loss.backward(retain_graph=True)
    (loss * loss).backward()
    yield step(model, optimizer)


def two_forwards_first(model: Any, forward: Any, optimizer: Any) -> Iterator[Any]:
    for _ in range(2):
        first, second = forward().loss, forward().loss
        first.backward()
        second.backward()
        yield step(model, optimizer)


def reads_between(model: Any, forward: Any, optimizer: Any) -> Iterator[Any]:
    for _ in range(2):
        loss = forward().loss
        loss.backward(retain_graph=True)
        norm = float(inside(model).lm_head.weight.grad.norm())
        (loss * norm).backward()
        yield step(model, optimizer)


def asks_for_a_gradient_first(model: Any, forward: Any, optimizer: Any) -> Iterator[Any]:
    for _ in range(3):
        loss = forward().loss
        torch.autograd.grad(loss, [inside(model).lm_head.weight], retain_graph=True)
        loss.backward()
        yield step(model, optimizer)


PROGRAMS = {
    one.__name__: (one, make)
    for make, programs in {
        adapted: (switches, switches_inside_a_step, switches_without_sync),
        tiny: (thaws, freezes, two_backwards, two_forwards_first, reads_between, asks_for_a_gradient_first),
    }.items()
    for one in programs
}


STATIC = ("two_backwards", "two_forwards_first", "reads_between", "asks_for_a_gradient_first")


def run(name: str, rings: int, **options: Any) -> tuple[Weights, list[float]]:
    program, make = PROGRAMS[name]
    model = (
        adapted("ring_fp32" if rings > 1 else None)
        if make is adapted
        else tiny("llama", "ring_fp32" if rings > 1 else None)
    )
    return in_steps(model.train(), rings, program, **options)


@pytest.mark.turns(4)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_under_ddp_steps_as_one_process(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    want, norms = run(name, 1)
    for got, found in ranks(2).run(run, name, 2, **options):
        assert found == pytest.approx(norms, rel=1e-5)
        assert max(relative_error(got[one], x) for one, x in want.items()) < 1e-5


@pytest.mark.parametrize("name", STATIC)
def test_a_loop_under_ddp_with_a_static_graph_does_too(ranks: Ranks, name: str) -> None:
    """The second backward of a step was each rank's own."""
    want, norms = run(name, 1)
    for got, found in ranks(2).run(run, name, 2, static_graph=True):
        assert found == pytest.approx(norms, rel=1e-5)
        assert max(relative_error(got[one], x) for one, x in want.items()) < 1e-5


def by_autograd_grad(in_ring: bool = True, **options: Any) -> dict[str, Tensor]:
    """Gradients that torch.autograd.grad returns, after a step by them."""
    model: Any = tiny("llama", "ring_fp32" if in_ring else None).train()
    called: Any = DistributedDataParallel(model, **options) if in_ring else model
    optimizer, weights = torch.optim.SGD(model.parameters(), lr=0.1), dict(model.named_parameters())
    with hf_ring_attn.shard(tokens(23)) if in_ring else nullcontext() as sharded:
        gradients = torch.autograd.grad(called(**(sharded.inputs if sharded else tokens(23))).loss, [*weights.values()])
    for x, gradient in zip(weights.values(), gradients, strict=True):
        x.grad = gradient
    optimizer.step()
    return dict(zip(weights, gradients, strict=True))


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_gradients_by_autograd_grad_are_those_of_one_process(ranks: Ranks, options: dict[str, Any]) -> None:
    """DDP does not see them, so the ring averages them."""
    want = by_autograd_grad(in_ring=False)
    for got in ranks(2).run(by_autograd_grad, **options):
        assert max(relative_error(got[name], x) for name, x in want.items()) < 1e-5


class Switches(TrainerCallback):
    """Makes the other adapter active after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        inside(given["model"]).set_adapter(["first", "second"][state.global_step % 2])


def dropping(attention: str | None, kind: Any) -> Any:
    torch.manual_seed(5)
    config = kind(r=2, target_modules="all-linear", module_dropout=0.3, init_weights=False)
    return get_peft_model(tiny("llama", attention), config)


def trained(mesh: Mesh, kind: Any, accumulates: int) -> list[float]:
    with launched(mesh), a_folder(None) as folder:
        attention = "ring_fp32" if mesh.cp > 1 else "sdpa"
        arguments = {
            "eval_strategy": "no", "ddp_find_unused_parameters": False, "gradient_accumulation_steps": accumulates,
            "optim": "adamw_torch", "weight_decay": 0.1,
        }  # fmt: skip
        run = Run(why="", steps=5, arguments=arguments)
        model = adapted(attention) if kind is None else dropping(attention, kind)
        trainer = trainer_of(run, mesh, folder, model, callbacks=[Switches()] if kind is None else [])
        trainer.train()
        return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]


@pytest.mark.turns(4)
@pytest.mark.parametrize("accumulates", [1, 2])
@pytest.mark.parametrize("kind", [None, LoHaConfig, LoKrConfig])
def test_a_trainer_that_switches_adapters_or_drops_modules_steps_as_one_process(
    ranks: Ranks, kind: Any, accumulates: int
) -> None:
    """Both were refused without ddp_find_unused_parameters."""
    want = ranks(1).run(trained, Mesh(), kind, accumulates)[0]
    for got in ranks(2).run(trained, Mesh(cp=2), kind, accumulates):
        assert got == pytest.approx(want, rel=1e-5)
