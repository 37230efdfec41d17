"""Forwards that are not transformers' own: refused where they may change the loss, trained where they do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import launched
from tests.helpers.models.tiny_models import tiny
from tests.integration.model.test_own_losses import error_of, of_class


def added(self: Any, input_ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> CausalLMOutputWithPast:
    """A forward in place of transformers', with a penalty of large logits."""
    told = {name: inputs.pop(name, None) for name in ("shift_labels", "num_items_in_batch")}
    logits = self.lm_head(self.model(input_ids=input_ids, **inputs).last_hidden_state)
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **told)
    loss = loss + 0.01 * logits.float().logsumexp(-1).square().mean()
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def alone(self: Any, input_ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> CausalLMOutputWithPast:
    """A forward in place of transformers', with its loss."""
    told = {name: inputs.pop(name, None) for name in ("shift_labels", "num_items_in_batch")}
    logits = self.lm_head(self.model(input_ids=input_ids, **inputs).last_hidden_state)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **told)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def unread(self: Any, *args: Any, **inputs: Any) -> CausalLMOutputWithPast:
    """The same, in a way that is not understood."""
    out = alone(self, *args, **inputs)
    return CausalLMOutputWithPast(loss=None if out.loss is None else 1 * out.loss, logits=out.logits)


@functools.wraps(LlamaForCausalLM.forward)
def wrapping(self: Any, *args: Any, **inputs: Any) -> Any:
    """Transformers' own with a penalty, which says that it is transformers' own."""
    out = LlamaForCausalLM.forward(self, *args, **inputs)
    out.loss = out.loss + 0.01 * out.logits.square().mean()
    return out


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny("llama", "ring_fp32")


class Wraps(Holds):
    """A module of the user's own around a model, with a penalty of its weights."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        out = self.inner(input_ids=input_ids, **inputs)
        out.loss = out.loss + self.inner.lm_head.weight.square().sum()
        return out


class WrapsExactly(Holds):
    ring_fp32_exact = True

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        return self.inner(input_ids=input_ids, **inputs)


def own_class(forward: Callable[..., Any], **attributes: Any) -> Any:
    return of_class(type("Own", (LlamaForCausalLM,), {"forward": forward, **attributes}))


def with_it_set(forward: Callable[..., Any], **attributes: Any) -> Any:
    model = tiny("llama", "ring_fp32")
    model.forward = MethodType(forward, model)
    vars(model).update(attributes)
    return model


def prepared(model: Any) -> Any:
    """As a trainer does for bf16=True."""
    with launched(Mesh(), ACCELERATE_MIXED_PRECISION="bf16"):
        return Accelerator(cpu=True).prepare_model(model)


def behind_its_name() -> Any:
    """With the class's forward replaced by one that says that it wraps it."""
    model, penalized = tiny("llama", "ring_fp32"), functools.wraps(LlamaForCausalLM.forward)(added)
    model.__class__ = type("LlamaForCausalLM", (LlamaForCausalLM,), {"forward": penalized})
    return model


SAID = {"ring_fp32_exact": True}
MAYBE_OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a class's": (lambda: own_class(added), "Own has a forward of its own, which does more than return the value of"),
    "set on a model": (lambda: with_it_set(added), "LlamaForCausalLM has a forward of its own, set on the model itsel"),
    "with its name": (behind_its_name, "LlamaForCausalLM has a forward of its own, which does more than return the v"),
    "around a model": (Wraps, "Wraps has a forward of its own around that of LlamaForCausalLM and may change the loss"),
    "around DDP": (lambda: DistributedDataParallel(Wraps()), "Wraps has a forward of its own around that of Llama"),
    "a class's, that wraps": (lambda: own_class(wrapping), "Own has a forward of its own, which does more than"),
    "that wraps, set on a model": (lambda: with_it_set(wrapping), "LlamaForCausalLM has a forward of its own, set on"),
    "of a class, prepared": (lambda: prepared(own_class(added)), "Own has a forward of its own, which does more "),
}
THE_SAME: dict[str, Callable[[], Any]] = {
    "a class's": lambda: own_class(alone),
    "a class's, which says so": lambda: own_class(unread, **SAID),
    "set on a model": lambda: with_it_set(alone),
    "set on a model, which says so": lambda: with_it_set(unread, **SAID),
    "around a model, which says so": WrapsExactly,
    "prepared": lambda: prepared(tiny("llama", "ring_fp32")),
    "of a class, prepared": lambda: prepared(own_class(unread, **SAID)),
    "compiled": lambda: torch.compile(tiny("llama", "ring_fp32"), backend="eager"),
}


@pytest.mark.parametrize("forward", MAYBE_OTHERS)
def test_a_forward_that_may_add_to_the_loss_is_refused(ranks: Ranks, forward: str) -> None:
    """Under a trainer what it adds was counted once for each rank."""
    for error in ranks(2).run(error_of_forward, forward, others=True):
        assert error.startswith(f"UnknownForward: {MAYBE_OTHERS[forward][1]}"), error
        assert "say so with the attribute `ring_fp32_exact = True` on " in error


@pytest.mark.parametrize("forward", THE_SAME)
def test_a_forward_that_leaves_the_loss_as_it_is_may_be_anyones(ranks: Ranks, forward: str) -> None:
    assert ranks(2).run(error_of_forward, forward, others=False) == ["", ""]


def error_of_forward(forward: str, others: bool) -> str:
    return error_of(MAYBE_OTHERS[forward][0] if others else THE_SAME[forward], tokens(23))
