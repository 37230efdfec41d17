"""A batch's context: what it leaves in models and in memory, and entering it again."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.batch import binding
from hf_ring_attn.integration.batch.shard import shard_for
from hf_ring_attn.integration.context import batch_context
from hf_ring_attn.integration.context.trial_step import TrialStep
from hf_ring_attn.integration.context.whole_batch import LOSS_INPUTS
from tests.helpers.checks import Ranks
from tests.helpers.contexts import alone
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.models.tiny_models import tiny


class Failing(Exception):
    """Raised by a program."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, only counts of references free memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def survivors(loss: str, is_given: bool, fails: str) -> list[str]:
    """What is alive of each of three batches after its backward, once the program has dropped it."""
    found: list[str] = []
    model: Any = tiny("llama", "ring_fp32").train()

    def fail(*_: Any) -> None:
        if fails == "in the model":
            raise Failing

    model.lm_head.register_forward_pre_hook(fail)
    with without_collections():
        for step in range(3):
            batch, group = tokens(23), dist.new_group() if dist.is_initialized() and fails else None
            config = RingConfig(loss=loss)  # type: ignore[arg-type]
            sharded = hf_ring_attn.shard(batch, group, config=config, model=model if is_given else None)
            context, ids = weakref.ref(sharded.context), weakref.ref(sharded.inputs["input_ids"])
            out = None
            with suppress(Failing), sharded:
                out = model(**sharded.inputs)
                if fails:
                    raise Failing
            if out is not None:
                out.loss.backward()
            sharded.reduce_gradients(model) if not fails else None
            del batch, sharded, out
            found += [f"{name} of batch {step}" for name, x in (("context", context), ("ids", ids)) if x() is not None]
    return found


@pytest.mark.turns
@pytest.mark.parametrize("fails", ["", "in the model", "in the block"])
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("loss", ["chunked", "sharded"])
def test_a_batch_is_freed_without_a_collection(loss: str, is_given: bool, fails: str) -> None:
    assert survivors(loss, is_given, fails) == []


@pytest.mark.parametrize("is_given", [False, True])
def test_a_batch_of_a_ring_is_freed_without_a_collection(ranks: Ranks, is_given: bool) -> None:
    assert ranks(2).run(survivors, "chunked", is_given, "") == [[], []]


# ---- a context that begins with an error -----------------------------------------------------------------------------


def left_by_a_refused_start() -> tuple[Any, list[bool], int]:
    """What was raised where ranks' second models differ, if heads are as before, and hooks before every module."""
    models: list[Any] = [tiny("llama", "ring_fp32") for _ in range(2)]
    sharded = hf_ring_attn.shard(tokens(24), dist.new_group())
    with sharded:
        for model in models:
            model.eval()(**sharded.inputs)
    models[1].lm_head.weight.data.mul_(1 + dist.get_rank())
    for model in models:
        model.train()
    raised = attempt(sharded.__enter__)
    untouched = ["forward" not in vars(model.lm_head) and not model._forward_hooks for model in models]
    return raised and raised[0], untouched, len(nn.modules.module._global_forward_pre_hooks)


def test_a_context_that_is_refused_leaves_no_model_changed(ranks: Ranks) -> None:
    """The first model's head stayed the lazy one if the second model's weights differed."""
    assert ranks(2).run(left_by_a_refused_start) == [("RanksDiffer", [True, True], 0)] * 2


def test_a_context_that_a_hook_of_the_model_leaves_ends_all_hooks() -> None:
    """torch calls the other hooks of that call, too: ours then watched every module for the rest of the process."""
    model: Any = tiny("llama", "ring_fp32")
    for _ in range(3):  # the second batch on, the model's hook before every module leaves in its forward
        sharded = hf_ring_attn.shard(tokens(24))
        handle = model.register_forward_hook(lambda *_, sharded=sharded: sharded.__exit__(None, None, None))
        sharded.__enter__()
        model(**sharded.inputs)
        handle.remove()
    assert not nn.modules.module._global_forward_pre_hooks
    assert not model._forward_hooks


# ---- entered again ---------------------------------------------------------------------------------------------------


def entered_twice(given: bool) -> list[float]:
    """Losses before, in and after an inner context of the same batch, and in one around another batch."""
    model = tiny("llama", "ring_fp32").train()
    sharded, other = hf_ring_attn.shard(tokens(24), model=model if given else None), hf_ring_attn.shard(tokens(16))
    losses = []
    with sharded:
        losses.append(model(**sharded.inputs).loss)
        with sharded:
            pass
        with sharded as inner:
            losses.append(model(**inner.inputs).loss)
        losses.append(model(**sharded.inputs).loss)
        with other:
            with sharded:
                losses.append(model(**sharded.inputs).loss)
            model(**other.inputs)
    with sharded:
        losses.append(model(**sharded.inputs).loss)
    torch.stack(losses).sum().backward()
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("given", [False, True])
def test_a_batch_can_be_entered_twice(ranks: Ranks, given: bool) -> None:
    """The inner context deactivated the outer one, which then ended in an AssertionError."""
    for losses in ranks(2).run(entered_twice, given):
        assert len(losses) == 5
        assert len(set(losses)) == 1


def test_an_outer_context_may_attend_where_an_inner_one_does_not() -> None:
    model = tiny("llama", "ring_fp32")
    with hf_ring_attn.shard(tokens(8)) as sharded:
        with sharded:
            model(**sharded.inputs)
        with sharded:
            pass


def test_each_context_counts_its_own_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is entered again, in itself or in another: by them an error's rank knows if others are under way."""
    ran, activate = 0, batch_context.activate
    monkeypatch.setattr(batch_context, "attentions", lambda: ran)
    monkeypatch.setattr(batch_context, "_counted", 0)
    first, second, third = (alone() for _ in range(3))
    with activate(first):
        ran += 1
        with activate(second):
            ran += 2
            with activate(first):
                ran += 4
                with activate(third):
                    with activate(second):
                        ran += 8
                    ran += 16
                assert ran - third.log.before == 16
            with activate(second):
                ran += 32
        assert ran - second.log.before == 2 + 8 + 32
        ran += 64
    assert ran - first.log.before == 1 + 4 + 64


# ---- further models --------------------------------------------------------------------------------------------------


def teacher() -> nn.Module:
    """A model whose RoPE depends on the longest position of the row, so a ring must prepare it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return tiny("llama", "ring_fp32", rope_parameters=rope, max_position_embeddings=8)


class Student(nn.Module):
    """A model inside a program's module."""

    def __init__(self, model: nn.Module, beside: nn.Module) -> None:
        super().__init__()
        self.model, self.beside = model, beside

    def forward(self, **inputs: Any) -> Any:
        return self.beside(**inputs)


@torch.no_grad()
def losses_of_a_teacher(when: str) -> tuple[float, float]:
    """Its loss in a batch of another model, and that of the whole row alone."""
    model, other = tiny("llama", "ring_fp32"), teacher()
    called = Student(model, other) if when == "in a module around the given one" else other
    sharded = hf_ring_attn.shard(tokens(24), model=model if "given" in when else None)
    if when == "in the second entry":
        with sharded:
            model(**sharded.inputs)
    with sharded:
        if "after" in when:
            model(**sharded.inputs)
        got = sharded.reduce(called(**sharded.inputs).loss)
    return float(got), float(teacher()(**tokens(24), use_cache=False).loss)


@pytest.mark.parametrize(
    "when",
    ["after another", "before the given one", "after the given one", "in the second entry",
     "in a module around the given one"],
)  # fmt: skip
def test_every_model_in_a_batch_is_prepared(ranks: Ranks, when: str) -> None:
    """Only models of a batch's first entry were, if none was given by name: the loss was silently 7e-4 off."""
    for got, want in ranks(2).run(losses_of_a_teacher, when):
        assert got == pytest.approx(want, rel=1e-12)


@torch.no_grad()
def losses_beside_a_compiled_model(how: str) -> tuple[list[float], float, list[str]]:
    """A teacher's losses in two batches of a compiled model that is given, the loss of the whole row, and warnings."""
    model, other = tiny("llama", "ring_fp32"), teacher()
    if how == "its layers":
        for layer in model.get_submodule("model.layers").children():
            layer.compile(backend="eager")
    if how == "in place":
        model.compile(backend="eager")
        compiled: Any = model._compiled_call_impl

        def call(*args: Any, **given: Any) -> Any:
            assert not torch.nn.modules.module._global_forward_pre_hooks, "a compiler would trace the hook"
            return compiled(*args, **given)

        model.__dict__["_compiled_call_impl"] = call
    called: Any = torch.compile(model, backend="eager") if how == "wrapped" else model
    got = []
    with warnings.catch_warnings(record=True) as warned:
        binding._silence_compiled_modules.cache_clear()
        for first in (called, other):
            sharded = hf_ring_attn.shard(tokens(24), model=called)
            with sharded:
                first(**sharded.inputs)
                (other if first is called else called)(**sharded.inputs)
                got.append(float(sharded.reduce(other(**sharded.inputs).loss)))
    return got, float(teacher()(**tokens(24), use_cache=False).loss), [str(one.message) for one in warned]


@pytest.mark.parametrize("how", ["wrapped", "in place", "its layers"])
def test_a_model_beside_a_compiled_one_is_prepared(ranks: Ranks, how: str) -> None:
    """It was not looked at if the compiled one was given: its loss was silently 5e-3 off."""
    for got, want, warned in ranks(2).run(losses_beside_a_compiled_model, how):
        assert got == pytest.approx([want, want], rel=1e-12)
        assert not any("global hooks" in text for text in warned)


@torch.no_grad()
def admitted_of(number: int) -> int:
    """How many models are admitted of those that follow each other in one batch, each in the memory of others."""
    sharded = hf_ring_attn.shard(tokens(24))
    with mock.patch.object(binding, "admit", wraps=binding.admit) as admit:
        for _ in range(number):
            model = tiny("llama", "ring_fp32")
            with sharded:
                model(**sharded.inputs)
    return admit.call_count


def test_a_model_in_the_memory_of_one_that_is_gone_is_another_one(ranks: Ranks) -> None:
    assert ranks(2).run(admitted_of, 8) == [8, 8]


def refusals_of_two_calls() -> list[str]:
    model: Any = tiny("llama", "ring_fp32").train()
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, nn.Dropout1d(0.5))
    sharded, found = hf_ring_attn.shard(tokens(24)), []
    with sharded:
        found += [attempt(lambda: model(**sharded.inputs)) for _ in range(2)]
    return [raised[0] if raised else "" for raised in found]


def test_a_model_that_was_refused_is_refused_again(ranks: Ranks) -> None:
    assert ranks(2).run(refusals_of_two_calls) == [["UnsupportedModel"] * 2] * 2


@torch.no_grad()
def loss_beside_a_host() -> tuple[float, float]:
    """The loss of a model that a host's loss calls with whole rows, and the same without a ring."""
    model, judge = tiny("llama", "ring_fp32"), tiny("llama", "sdpa")
    step = TrialStep(lambda model, _row, local: model(**local.inputs).loss)
    with shard_for(tokens(24), None, None, model, step=step) as sharded:
        model(**sharded.inputs)
        got = float(judge(**tokens(24), use_cache=False).loss)
    return got, float(judge(**tokens(24), use_cache=False).loss)


def test_a_model_without_a_ring_may_run_beside_a_hosts(ranks: Ranks) -> None:
    """The trial of the host's own loss shows if it is exact."""
    for got, want in ranks(2).run(loss_beside_a_host):
        assert got == want


# ---- parts of a model that a program calls before it -----------------------------------------------------------------


def step_after(part: str, attention: str | None) -> tuple[float, Tensor]:
    """The square of a loss, and a gradient of it, after a call of a part of the model in the same batch."""
    model: Any = tiny("llama", attention).train()
    sharded = hf_ring_attn.shard(tokens(23)) if attention else None
    with sharded or nullcontext():
        inputs = {**(sharded.inputs if sharded else {**tokens(23), "use_cache": False})}
        if part == "head":
            model.lm_head(torch.ones_like(model.lm_head.weight[:1]))
        if part == "body":
            model.model(**{name: x for name, x in inputs.items() if name not in LOSS_INPUTS})
        if part == "embeddings":
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
        loss = model(**inputs).loss ** 2
    loss.backward()
    if sharded:
        sharded.reduce_gradients(model)
    return float(loss), model.lm_head.weight.grad


@pytest.mark.parametrize("part", ["embeddings", "head", "body"])
def test_a_model_is_admitted_though_a_part_of_it_was_called_before(ranks: Ranks, part: str) -> None:
    """The model itself was not: its loss was that of a rank's part, silently, and no self-check ran."""
    want, gradient = step_after(part, None)
    for loss, got in ranks(2).run(step_after, part, "ring_fp32"):
        assert loss == pytest.approx(want, rel=1e-6)
        torch.testing.assert_close(got, gradient)
