"""Losses that a model makes in its own way, and outputs for a whole row: right, or refused before a number is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

import hf_ring_attn
from hf_ring_attn import RingAttentionError, RingConfig, errors
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.integration.context.whole_batch import LOSS_INPUTS
from hf_ring_attn.kernels.reference import Reference
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.plain_jobs import Batch, tokens
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import SIZES, build, tiny

Ranks = Callable[[int], LiveRanks]
ONE_PROCESS = 2e-5
"""Relative, in float32."""

WITH_FLOAT32_NORMS = 1e-6
"""Relative, in float64 but for transformers' norms."""

IDS: Batch = {"input_ids": tokens(23)["input_ids"]}
QUESTION: Batch = {**IDS, "start_positions": torch.tensor([3, 16]), "end_positions": torch.tensor([5, 20])}
TARGETS: Batch = {**IDS, "targets": tokens(23)["labels"]}


class Headed(nn.Module):
    """A model of the user's own around one of transformers. ``returns``: what its forward makes of the loss."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner = tiny("llama", "ring_fp32")
        self.returns = returns

    def forward(self, input_ids: Tensor, targets: Tensor, **rest: Any) -> Any:
        logits = self.inner(input_ids=input_ids, **rest).logits
        return self.returns(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "by name": lambda loss, logits: {"logits": logits, "loss": loss},
    "first of a tuple": lambda loss, logits: (loss, logits),
    "under another name": lambda loss, logits: {"logits": logits, "objective": loss},
}


def error_of(make: Callable[[], Any], batch: Batch, compiled: bool = False) -> str:
    """Class and text of what a step raises; "" if nothing."""
    try:
        model = make()
        if compiled:
            model.compile(backend="eager")
        sharded = hf_ring_attn.shard(batch, model=model if compiled else None)
        with sharded:
            model(**sharded.inputs)
    except RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_loss_of_other_inputs_than_labels_is_refused(ranks: Ranks) -> None:
    """It was that of each rank's tokens, silently. With a named model its head gets whole rows (`whole_heads`)."""
    for error in ranks(2).run(error_of, asks, QUESTION):
        assert error.startswith("LossWithoutLabels: LlamaForQuestionAnswering returned a loss, but the batch has no ")
    assert error_of(asks, QUESTION) == ""  # one process


def test_it_is_refused_of_a_compiled_model_too(ranks: Ranks) -> None:
    for error in ranks(2).run(error_of, compiled_by_name, TARGETS, True):
        assert error.startswith("LossWithoutLabels: LlamaForCausalLM returned a loss, but the batch has no labels")


def compiled_by_name() -> nn.Module:
    return Headed(RETURNS["by name"])


def asks() -> Any:
    return build("LlamaForQuestionAnswering", "ring_fp32", **SIZES)


@pytest.mark.parametrize("how", RETURNS)
def test_a_loss_of_a_users_own_targets_is_refused_whatever_its_name(ranks: Ranks, how: str) -> None:
    assert [error.partition(":")[0] for error in ranks(2).run(error_of_own, how)] == ["LossWithoutLabels"] * 2
    assert error_of_own(how) == ""  # one process


def error_of_own(how: str) -> str:
    return error_of(lambda: Headed(RETURNS[how]), TARGETS)


# ---- forwards around transformers' own -------------------------------------------------------------------------------


class Passes(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' own
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Adds(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' own
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if out.loss is not None:
            out.loss = out.loss + 100 * out.logits.mean().square()
        return out


def of_class(cls: type[LlamaForCausalLM], attention: str = "ring_fp32") -> Any:
    model = tiny("llama", attention)
    model.__class__ = cls
    return model


def loss_of(cls: type[LlamaForCausalLM]) -> tuple[float, float]:
    """In the ring, and in one process."""
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        loss = of_class(cls)(**sharded.inputs).loss
    return float(sharded.reduce(loss)), float(of_class(cls, "eager")(**tokens(23)).loss)


def test_a_forward_that_only_calls_its_parents_is_exact(ranks: Ranks) -> None:
    for got, want in ranks(2).run(loss_of, Passes):
        assert got == pytest.approx(want, rel=ONE_PROCESS)


def test_a_forward_that_changes_the_loss_by_its_rank_s_tokens_is_refused(ranks: Ranks) -> None:
    for error in ranks(2).run(error_of_class, Adds):
        assert error.startswith("LossNotSharded: the loss of Adds (the self-check found "), error
    assert all(error == "" for error in ranks(2).run(error_of_class, Adds, labelled=False))


def error_of_class(cls: type[LlamaForCausalLM], labelled: bool = True) -> str:
    return error_of(lambda: of_class(cls), tokens(23) if labelled else IDS)


# ---- labels that a forward changes -----------------------------------------------------------------------------------


def without_some(labels: Tensor) -> Tensor:
    return labels.masked_fill(labels % 3 == 0, -100)


class Masks(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' own
    """Ignores labels by what they are."""

    def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> Any:
        return super().forward(*args, labels=without_some(labels), **kwargs)


class MasksByPlace(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' own
    """Ignores the first labels of its input."""

    def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> Any:
        return super().forward(*args, labels=labels.index_fill(1, torch.arange(3), -100), **kwargs)


class MasksShifted(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' own
    """Ignores labels that it shifted by itself, or that a ring shifted."""

    def forward(self, *args: Any, labels: Tensor, shift_labels: Tensor | None = None, **kwargs: Any) -> Any:
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        return super().forward(*args, labels=labels, shift_labels=without_some(shifted), **kwargs)


class Calls(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' own
    """Calls its loss function as programs for one process do."""

    def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> Any:
        out = super().forward(*args, **{name: x for name, x in kwargs.items() if name not in LOSS_INPUTS})
        out.loss = self.loss_function(out.logits, labels, self.config.vocab_size)
        return out


class MasksInside(nn.Module):
    """Around a model that gets other labels, by its arguments or by a hook. ``compiled``: that model is."""

    def __init__(self, attention: str, by_hook: bool, compiled: bool) -> None:
        super().__init__()
        self.inner, self.by_hook = tiny("llama", attention), by_hook
        if by_hook:
            self.inner.register_forward_pre_hook(
                lambda _model, args, given: (args, {**given, "labels": without_some(given["labels"])}), with_kwargs=True
            )
        if compiled:
            self.inner.compile(backend="eager")

    def forward(self, labels: Tensor, **rest: Any) -> Any:
        return self.inner(labels=labels if self.by_hook else without_some(labels), **rest)


CHANGED: dict[str, Callable[[str], Any]] = {
    "a class": lambda attention: of_class(Masks, attention),
    "a class that shifts": lambda attention: of_class(MasksShifted, attention),
    "a class that calls its loss function": lambda attention: of_class(Calls, attention),
    "a module": lambda attention: MasksInside(attention, False, False),
    "a hook": lambda attention: MasksInside(attention, True, False),
    "a module around a compiled model": lambda attention: MasksInside(attention, False, True),
}


def changed_loss(how: str, attention: str) -> list[Tensor]:
    """The loss and a gradient of two rows."""
    batch, model = tokens(23, rows=2), CHANGED[how](attention).double()
    if attention == "eager":
        loss = model(**batch).loss
        loss.backward()
    else:
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(model)
    gradient = next(weight.grad for name, weight in model.named_parameters() if name.endswith("q_proj.weight"))
    assert gradient is not None
    return [loss.detach(), gradient]


@pytest.mark.parametrize("how", CHANGED)
def test_labels_that_a_forward_changes_are_shifted_and_counted_anew(ranks: Ranks, how: str) -> None:
    """The batch's stood for them, silently: in Trainer a loss of 4.56 for 2.74. A call of it was refused."""
    want = changed_loss(how, "eager")
    for got in ranks(2).run(changed_loss, how, "ring_fp32"):
        for mine, theirs in zip(got, want, strict=True):
            assert relative_error(mine, theirs) < WITH_FLOAT32_NORMS


def test_labels_changed_by_their_place_are_refused(ranks: Ranks) -> None:
    for error in ranks(2).run(error_of_class, MasksByPlace):
        assert error.startswith("LossNotSharded: the loss of MasksByPlace (the self-check found "), error


def compiled_with_its_labels() -> str:
    return error_of(lambda: of_class(Masks), tokens(23), compiled=True)


def test_labels_changed_inside_of_what_is_compiled_are_refused(ranks: Ranks) -> None:
    """No hook sees them there. Nothing was said."""
    for error in ranks(2).run(compiled_with_its_labels):
        assert error.startswith("LossNotSharded: the loss of Masks (the self-check found "), error


# ---- a function in place of transformers' loss -----------------------------------------------------------------------


def doubled(*args: Any, **kwargs: Any) -> Tensor:
    loss: Tensor = ForCausalLMLoss(*args, **kwargs)
    return 2 * loss


class Doubles(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' own
    @property  # type: ignore[misc]  # nobody sets it
    def loss_function(self) -> Any:
        return doubled


def with_its_loss_function(how: str) -> Any:
    if how == "class":
        return of_class(Doubles)
    model = tiny("llama", "ring_fp32")
    model.loss_function = ForCausalLMLoss if how == "the same" else doubled
    return model


@pytest.mark.parametrize("how", ["set", "class"])
@pytest.mark.parametrize("loss", ["sharded", "gathered"])  # which only a Trainer gathers
def test_another_loss_function_is_refused_by_its_name(
    ranks: Ranks, how: str, loss: Literal["sharded", "gathered"]
) -> None:
    """The self-check let it pass, if its mean over ranks was near enough to that of the row."""
    for error in ranks(2).run(error_with_function, how, loss):
        assert error.startswith("LossNotSharded: the loss of "), error
        assert ", whose loss_function is doubled, cannot be computed exactly from one rank's tokens. Use " in error
    assert error_with_function(how, loss) == ""  # one process


def test_transformers_own_loss_may_be_set(ranks: Ranks) -> None:
    assert ranks(2).run(error_with_function, "the same", "sharded") == ["", ""]


def error_with_function(how: str, loss: Literal["sharded", "gathered"]) -> str:
    model = with_its_loss_function(how)
    hf_ring_attn.configure(model, RingConfig(loss=loss))
    return error_of(lambda: model, tokens(23))


# ---- the context that was forgotten ----------------------------------------------------------------------------------


def forgotten(method: str) -> str:
    model = tiny("llama", "ring_fp32")
    sharded = hf_ring_attn.shard(tokens(23), model=model)
    # Copies: the very tensors are known where masks are made.
    copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in sharded.inputs.items()}
    loss = model(**copies).loss
    loss.backward()
    try:
        sharded.reduce(loss) if method == "reduce" else sharded.reduce_gradients(model)
    except RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("method", ["reduce", "reduce_gradients"])
def test_a_loss_outside_the_context_is_not_reduced(ranks: Ranks, method: str) -> None:
    """Each rank attended to its own tokens, and the mean of their losses looked right."""
    for error in ranks(2).run(forgotten, method):
        assert error.startswith(f"NotEntered: sharded.{method}() was called, but the model did not run in the context")
    assert forgotten(method) == ""


# ---- a batch after an attention that ended half-way ------------------------------------------------------------------


def sharded_after_an_error() -> tuple[str, int]:
    """What the next batch raises, and how many messages left before that."""
    group = torch.distributed.new_group()
    model, messages = tiny("llama", "ring_fp32"), []
    with hf_ring_attn.shard(IDS, group) as sharded:
        model(**sharded.inputs)
        with mock.patch.object(Reference, "forward", side_effect=MemoryError), pytest.raises(MemoryError):
            model(**sharded.inputs)
    with mock.patch.object(Ring, "gather", side_effect=lambda *_: messages.append(0)):
        try:
            hf_ring_attn.shard(IDS, group)
        except RingAttentionError as error:
            return type(error).__name__, len(messages)
    return "", len(messages)


def test_no_batch_is_compared_after_an_attention_that_ended_halfway(ranks: Ranks) -> None:
    """Others would take what is compared for the keys that they wait for."""
    assert ranks(2).run(sharded_after_an_error) == [("LeftHalfway", 0)] * 2


def ignoring_zeros() -> str:
    model, batch = tiny("llama", "ring_fp32"), tokens(23)
    batch["labels"] = batch["labels"].clamp(min=0)
    with hf_ring_attn.shard(batch, dist.new_group()) as sharded:
        try:
            model(**sharded.inputs, ignore_index=0)
        except (IndexError, errors.OtherIgnoreIndex) as error:
            return str(error)
    return ""


def test_no_rank_waits_for_one_whose_loss_did_not_know_an_ignored_label(ranks: Ranks) -> None:
    of_last_token, other = ranks(2).run(ignoring_zeros)
    assert of_last_token == "Target -100 is out of bounds."
    assert other.startswith("LlamaForCausalLM was called in a ring with ignore_index=0, but a ring marks padding")


def test_labels_that_shard_never_got_are_refused_by_name(ranks: Ranks) -> None:
    """torch said `Expected input batch_size (24) to match target batch_size (46)`."""
    for error in ranks(2).run(error_of_labels_beside):
        assert error.startswith("OtherInputs: LlamaForCausalLM was called in a ring with another labels.")
    assert error_of_labels_beside() == ""  # one process


def error_of_labels_beside() -> str:
    model, batch = tiny("llama", "ring_fp32"), tokens(23)
    labels = batch.pop("labels")
    try:
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            model(**sharded.inputs, labels=labels)
    except RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""
