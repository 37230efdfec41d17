"""Forwards, hooks and wrappers of a program's own: exact if their loss is a sum over tokens, else refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM, LlamaModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import gradients_of, tokens
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, trainer_of
from tests.helpers.models.tiny_models import tiny
from tests.integration.losses.test_own_losses import ONE_PROCESS, error_of

RUN = Run(why="", steps=2, arguments={"eval_strategy": "no"})


def penalty(model: Any) -> Tensor:
    """The same on every rank: under a trainer it was counted once for each."""
    found: Tensor = 0.01 * model.lm_head.weight.square().sum()
    return found


def added(self: Any, input_ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> CausalLMOutputWithPast:
    """A forward in place of transformers', with a penalty."""
    given = {name: inputs.pop(name, None) for name in ("shift_labels", "num_items_in_batch")}
    logits = self.lm_head(self.model(input_ids=input_ids, **inputs).last_hidden_state)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **given)
        loss = loss + penalty(self)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


@functools.wraps(LlamaForCausalLM.forward)
def wrapping(self: Any, *args: Any, **inputs: Any) -> Any:
    """Transformers' own with a penalty."""
    return with_penalty(self, args, LlamaForCausalLM.forward(self, *args, **inputs))


def with_penalty(model: Any, _args: Any, output: Any) -> Any:
    if output.loss is not None:
        output.loss = output.loss + penalty(model)
    return output


def mean_of_logits(model: Any, _args: Any, output: Any) -> Any:
    """A mean over the tokens that a rank holds: right in the mean over ranks, but for the ring's padding."""
    if output.loss is not None:
        output.loss = output.loss + 0.01 * output.logits.float().square().mean()
    return output


def mean_of_labels(self: Any, input_ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> CausalLMOutputWithPast:
    """A forward whose loss ignores num_items_in_batch."""
    targets = inputs.pop("shift_labels", None)
    inputs.pop("num_items_in_batch", None)
    logits = self.lm_head(self.model(input_ids=input_ids, **inputs).last_hidden_state)
    if labels is None:
        return CausalLMOutputWithPast(loss=None, logits=logits)
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if targets is None else targets
    return CausalLMOutputWithPast(
        loss=nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits=logits
    )


class Wraps(nn.Module):
    """A module of the program around a model."""

    def __init__(self, model: Any, adds: bool) -> None:
        super().__init__()
        self.inner, self.adds = model, adds

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        out = self.inner(input_ids=input_ids, **inputs)
        return with_penalty(self.inner, (), out) if self.adds else out


def of_class(model: Any, forward: Callable[..., Any]) -> Any:
    model.__class__ = type("Own", (LlamaForCausalLM,), {"forward": forward})
    return model


def with_it_set(model: Any, forward: Callable[..., Any]) -> Any:
    model.forward = MethodType(forward, model)
    return model


def with_hook(model: Any, hook: Callable[..., Any]) -> Any:
    model.register_forward_hook(hook)
    return model


EXACT: dict[str, Callable[[Any], Any]] = {
    "a class's": lambda model: of_class(model, added),
    "a class's, that wraps": lambda model: of_class(model, wrapping),
    "set on a model": lambda model: with_it_set(model, added),
    "that wraps, set on a model": lambda model: with_it_set(model, wrapping),
    "a hook": lambda model: with_hook(model, with_penalty),
    "around a model": lambda model: Wraps(model, True),
    "around a model, passing on": lambda model: Wraps(model, False),
    "compiled": lambda model: torch.compile(with_it_set(model, added), backend="eager"),
}
ELSE: dict[str, Callable[[Any], Any]] = {
    "a class's": lambda model: of_class(model, mean_of_labels),
    "set on a model": lambda model: with_it_set(model, mean_of_labels),
    "around DDP": lambda model: DistributedDataParallel(Wraps(of_class(model, mean_of_labels), True)),
    "a hook": lambda model: with_hook(model, mean_of_logits),
}


# ---- loops -----------------------------------------------------------------------------------------------------------


def step(change: Callable[[Any], Any], attention: str | None, labels: str = "") -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a step in a loop; without a ring if ``attention`` is None.

    Args:
        labels: "first": the first tokens alone have labels.
    """
    model, batch = change(tiny("llama", attention)), tokens(23)
    model.train()
    if labels:
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, 4:] = -100
    if attention is None:
        loss = model(**batch).loss
        loss.backward()
        return float(loss.detach()), gradients_of(model)
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        loss = model(**sharded.inputs).loss
    loss.backward()
    sharded.reduce_gradients(model)
    return float(sharded.reduce(loss)), gradients_of(model)


def step_of(forward: str, attention: str | None) -> tuple[float, dict[str, Tensor]]:
    return step(EXACT[forward], attention)


@pytest.mark.parametrize("forward", EXACT)
@pytest.mark.turns
def test_a_term_that_ranks_have_alike_is_exact_in_a_loop(ranks: Ranks, forward: str) -> None:
    assert_same_step(ranks(2).run(step_of, forward, "ring_fp32"), step_of(forward, None))


def assert_same_step(found: list[Any], want: tuple[float, dict[str, Tensor]]) -> None:
    for loss, gradients in found:
        assert loss == pytest.approx(want[0], rel=ONE_PROCESS)
        assert gradients.keys() == want[1].keys()
        for name, gradient in want[1].items():
            assert relative_error(gradients[name], gradient) < 1e-4, name


def error_of_forward(forward: str) -> str:
    return error_of(lambda: ELSE[forward](tiny("llama", "ring_fp32")), tokens(23))


@pytest.mark.parametrize("forward", ELSE)
def test_a_loss_that_is_no_sum_over_tokens_is_refused(ranks: Ranks, forward: str) -> None:
    for error in ranks(2).run(error_of_forward, forward):
        assert error.startswith("LossNotSharded: the loss of "), error
        assert "(the self-check found " in error and " in one process) cannot be computed exactly" in error


# ---- under a trainer -------------------------------------------------------------------------------------------------


def log_of(forward: str, mesh: Mesh) -> list[dict[str, float]]:
    with launched(mesh), a_folder(None) as folder:
        model = EXACT[forward](tiny("llama", "ring_fp32" if mesh.cp > 1 else None))
        trainer = trainer_of(RUN, mesh, folder, model)
        trainer.train()
        return numbers(trainer.state.log_history)


@pytest.mark.parametrize("forward", ["a class's", "that wraps, set on a model", "a hook"])
def test_a_term_that_ranks_have_alike_is_exact_under_a_trainer(ranks: Ranks, forward: str) -> None:
    """It was counted once for each rank."""
    want = ranks(1).run(log_of, forward, Mesh())[0]
    for log in ranks(2).run(log_of, forward, Mesh(cp=2)):
        assert [pytest.approx(entry, rel=ONE_PROCESS) for entry in want] == log


# ---- programs around a backbone --------------------------------------------------------------------------------------


class Headed(nn.Module):
    """A backbone with a head and a loss of the program's own, a sum over tokens by the count that it is given."""

    def __init__(self, attention: str | None) -> None:
        super().__init__()
        whole = tiny("llama", attention)
        self.backbone: LlamaModel = whole.model
        self.head = whole.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Any:
        targets, count = inputs.pop("shift_labels"), inputs.pop("num_items_in_batch")
        logits = self.head(self.backbone(input_ids=input_ids, **inputs).last_hidden_state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def headed() -> tuple[float, dict[str, Tensor]]:
    return step(lambda _: Headed("ring_fp32"), "ring_fp32")


def test_a_backbone_may_have_a_head_and_a_loss_of_its_own(ranks: Ranks) -> None:
    """It was refused as the loss of LlamaModel."""
    want = headed()
    assert want[0] == pytest.approx(step(lambda model: model, None)[0], rel=ONE_PROCESS)
    assert_same_step(ranks(2).run(headed), want)


def by_hand(attention: str | None) -> tuple[float, dict[str, Tensor]]:
    """A loop that computes logits and loss of a backbone's states by itself."""
    model, batch = tiny("llama", attention), tokens(23)
    sharded = hf_ring_attn.shard(batch)
    inputs = dict(sharded.inputs)
    targets, count, _ = inputs.pop("shift_labels"), inputs.pop("num_items_in_batch"), inputs.pop("labels")
    with sharded:
        states = model.model(**inputs).last_hidden_state
        logits = model.lm_head(states)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
    loss.backward()
    sharded.reduce_gradients(model)
    return float(sharded.reduce(loss)), gradients_of(model)


def test_a_loop_may_call_a_backbone(ranks: Ranks) -> None:
    assert_same_step(ranks(2).run(by_hand, "ring_fp32"), step(lambda model: model, None))


def by_forward(attention: str) -> tuple[float, dict[str, Tensor]]:
    """`model.forward(...)` in place of `model(...)`, which runs no hook of the model."""
    model = tiny("llama", attention).train()
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        loss = model.forward(**sharded.inputs).loss
    loss.backward()
    sharded.reduce_gradients(model)
    return float(sharded.reduce(loss)), gradients_of(model)


def test_forward_may_be_called_directly(ranks: Ranks) -> None:
    assert_same_step(ranks(2).run(by_forward, "ring_fp32"), step(lambda model: model, None))


# ---- a rank's own tokens ---------------------------------------------------------------------------------------------


def times_two(loss: Tensor, _labels: Tensor) -> Tensor:
    return loss * 2.0


def in_place(loss: Tensor, _labels: Tensor) -> Tensor:
    return loss.mul_(2.0)


def left_out(loss: Tensor, _labels: Tensor) -> Tensor:
    return loss * 0.0


CHANGES = {f.__name__: f for f in (times_two, in_place, left_out)}


def changed_if(model: Any, change: str, asks: Callable[[Tensor], bool]) -> Any:
    """A forward that changes the loss of rows in which it finds something."""

    def forward(self: Any, input_ids: Any = None, labels: Any = None, **inputs: Any) -> Any:
        out = LlamaForCausalLM.forward(self, input_ids=input_ids, labels=labels, **inputs)
        if out.loss is not None and asks(input_ids):
            out.loss = CHANGES[change](out.loss, labels)
        return out

    return of_class(model, forward)


def is_special(ids: Tensor) -> bool:
    """Such a token is in few rows, and in none of the self-check's."""
    return bool((ids == 0).any())


def step_with_factor(change: str, special: bool, attention: str | None) -> Any:
    """The error before an optimizer's step, or the gradients of the step."""
    model = changed_if(tiny("llama", attention), change, is_special if special else lambda ids: True).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = tokens(23)
    batch["input_ids"] = batch["input_ids"].clamp(min=1)
    batch["input_ids"][0, 0] = 0
    if attention is None:
        model(**batch).loss.backward()
        return gradients_of(model)
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        loss = model(**sharded.inputs).loss
    loss.backward()
    sharded.reduce_gradients(model)
    found = gradients_of(model)
    try:
        optimizer.step()
    except errors.RanksDiffer as error:
        return str(error)
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_factor_by_a_ranks_tokens_in_a_forward_is_refused(ranks: Ranks, change: str) -> None:
    """One rank took twice the loss, or none of it, and training went on."""
    for error in ranks(2).run(step_with_factor, change, True, "ring_fp32"):
        assert "must hold the same factor of the loss that the model's forward returns" in error


@pytest.mark.parametrize("change", ["times_two", "in_place"])
def test_a_factor_in_a_forward_is_exact(ranks: Ranks, change: str) -> None:
    want = step_with_factor(change, False, None)
    for got in ranks(2).run(step_with_factor, change, False, "ring_fp32"):
        assert all(relative_error(got[name], x) < 1e-4 for name, x in want.items())


def without_labels(attention: str | None) -> tuple[float, dict[str, Tensor]]:
    """A forward that calls no loss function where it sees no labels, as one rank does."""

    def forward(self: Any, input_ids: Any, labels: Any = None, shift_labels: Any = None, **inputs: Any) -> Any:
        given = {"shift_labels": shift_labels, "num_items_in_batch": inputs.pop("num_items_in_batch", None)}
        logits = self.lm_head(self.model(input_ids=input_ids, **inputs).last_hidden_state)
        if labels is None:
            return CausalLMOutputWithPast(logits=logits)
        if bool(((labels if shift_labels is None else shift_labels) != -100).any()):
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **given)
        else:
            loss = logits.sum() * 0.0
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    return step(lambda model: of_class(model, forward), attention, "first")


def test_a_rank_without_labels_may_leave_the_loss_function_out(ranks: Ranks) -> None:
    assert_same_step(ranks(2).run(without_labels, "ring_fp32"), without_labels(None))


def copied_inside() -> list[bool]:
    """If a copy of a model, made while a batch runs, and the model itself have the loss function of its class."""
    model = tiny("llama", "ring_fp32").train()
    with (sharded := hf_ring_attn.shard(tokens(23), model=model)):
        model(**sharded.inputs)
        copied = copy.deepcopy(model)
    return [one.loss_function is ForCausalLMLoss for one in (copied, model)]


def test_a_copy_of_a_model_in_a_batch_has_its_loss_function(ranks: Ranks) -> None:
    assert ranks(2).run(copied_inside) == [[True, True]] * 2
