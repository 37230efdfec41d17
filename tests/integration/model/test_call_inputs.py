"""Calls of a model in a ring with something else than `sharded.inputs`: exact, or refused by name on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, gradients_of, padded, tokens
from tests.helpers.models.tiny_models import tiny
from tests.helpers.programs import REPOSITORY

Inputs = dict[str, Any]
Call = Callable[[Any, Inputs], Any]
BATCH = padded(23, right=9)
GUIDE = (REPOSITORY / "docs" / "guides" / "own-loop.md").read_text()
LOSS = 1e-6
"""Relative bound of transformers' loss, which is computed in float32 from logits of any dtype."""


def without(*names: str) -> Call:
    return lambda model, inputs: model(**{name: x for name, x in inputs.items() if name not in names}).loss


def changed(**others: Callable[[Any], Any]) -> Call:
    return lambda model, inputs: model(**{**inputs, **{name: make(inputs[name]) for name, make in others.items()}}).loss


def each(make: Callable[[Tensor], Tensor]) -> Call:
    return lambda model, inputs: model(**{n: make(x) if isinstance(x, Tensor) else x for n, x in inputs.items()}).loss


# ---- what is exact ---------------------------------------------------------------------------------------------------


def by_position(model: Any, inputs: Inputs) -> Tensor:
    first = [inputs.pop(name) for name in ("input_ids", "attention_mask", "position_ids")]
    loss: Tensor = model(*first, **inputs).loss
    return loss


def of_embeddings(model: Any, inputs: Inputs) -> Tensor:
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
    loss: Tensor = model(**inputs, inputs_embeds=embeddings).loss
    return loss


def after_a_teacher(model: Any, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        without("labels")(tiny("llama", "ring_fp32").double(), inputs)
    loss: Tensor = model(**inputs).loss
    return loss


class Penalised(nn.Module):
    """A program's module around the model, which takes just some names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
        out = self.model(input_ids=input_ids, labels=labels, **others)
        out.loss = out.loss + 0.0 * next(self.model.parameters()).square().sum()
        return out


def loss_of_its_own(model: nn.Module, inputs: Inputs) -> Tensor:
    """Of the shifted labels, which it leaves among the inputs."""
    _, count = inputs.pop("labels"), inputs.pop("num_items_in_batch")
    logits = model(**inputs).logits.flatten(0, 1)
    loss: Tensor = nn.functional.cross_entropy(logits, inputs["shift_labels"].flatten(), reduction="sum") / count
    return loss


EXACT: dict[str, Call] = {
    "all of it": without(),
    "by position": by_position,
    "views": each(Tensor.detach),
    "copies": each(Tensor.clone),
    "a mask of truth values": changed(attention_mask=Tensor.bool),
    "embeddings": of_embeddings,
    "a loss of its own": loss_of_its_own,
    "after a teacher": after_a_teacher,
    "in DDP": lambda model, inputs: by_position(DistributedDataParallel(model), inputs),
    "in a module": lambda model, inputs: without()(Penalised(model), inputs),
    "in DDP of a module": lambda model, inputs: without()(DistributedDataParallel(Penalised(model)), inputs),
}


def exact(why: str) -> Tensor:
    model = tiny("llama", "ring_fp32").double()
    sharded = hf_ring_attn.shard(BATCH)
    with sharded:
        return sharded.reduce(EXACT[why](model, dict(sharded.inputs)))


@pytest.mark.parametrize("why", EXACT)
def test_a_call_with_what_was_shared_is_exact(ranks: Ranks, why: str) -> None:
    want = tiny("llama", None).double()(**BATCH).loss
    for got in ranks(2).run(exact, why):
        assert relative_error(got, want) < LOSS


def without_labels_on_a_rank() -> Inputs:
    """Of two ranks the first one holds the first and the last six tokens."""
    batch = tokens(24)
    place = torch.arange(24)
    return {**batch, "labels": batch["labels"].masked_fill((place < 8) | (place > 13), -100)}


def by_the_guide(batch: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss that loops compute of a rank's logits, in the words of the guide, and its gradients."""
    code = next(code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "shift_labels" in code)
    model = tiny("llama", "ring_fp32").double()
    names: Inputs = {"torch": torch, "hf_ring_attn": hf_ring_attn, "model": model, "batch": batch}
    exec(code, names)
    sharded = names["sharded"]
    sharded.reduce_gradients(model)
    return sharded.reduce(names["loss"]), gradients_of(model)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch", [BATCH, without_labels_on_a_rank()], ids=["padded", "a rank without labels"])
def test_a_loss_of_logits_as_the_guide_writes_it(ranks: Ranks, batch: Inputs, world_size: int) -> None:
    model = tiny("llama", None).double()
    want = model(**batch).loss
    want.backward()
    gradients = gradients_of(model)
    for loss, got in ranks(world_size).run(by_the_guide, batch):
        assert relative_error(loss, want) < LOSS
        assert all(relative_error(got[name], gradient) < LOSS for name, gradient in gradients.items())


# ---- what is refused -------------------------------------------------------------------------------------------------


def in_place(model: Any, inputs: Inputs) -> Any:
    inputs["attention_mask"][:, 0] = 0
    return model(**inputs)


def hides_the_prompt(inputs: Inputs) -> Tensor:
    """Of which only one of two ranks holds tokens."""
    kept: Tensor = inputs["attention_mask"] * (inputs["position_ids"] >= 6)
    return kept


WHOLE = {name: BATCH[name] for name in ("input_ids", "attention_mask", "labels")}
OTHER = "LlamaForCausalLM was called in a ring {}. One rank's tokens do not determine positions, padding and labels of"
REFUSED: dict[str, tuple[Call, str]] = {
    "no positions": (without("position_ids"), "without position_ids"),
    "no shifted labels": (without("shift_labels"), "without shift_labels"),
    "no count": (without("num_items_in_batch"), "without num_items_in_batch"),
    "no mask, with a cache": (without("attention_mask", "use_cache"), "without attention_mask"),
    "what one process takes": (
        lambda model, inputs: model(**{name: inputs[name] for name in WHOLE}),
        "without position_ids and shift_labels and num_items_in_batch",
    ),
    "a count of one's own": (changed(num_items_in_batch=lambda count: 2 * count), "with another num_items_in_batch"),
    "a count in a tensor": (
        changed(num_items_in_batch=lambda count: torch.tensor(7.0)),
        "with another num_items_in_batch",
    ),
    "other labels": (changed(labels=lambda labels: labels.clamp(max=50)), "with another labels"),
    "written in place": (in_place, "with another attention_mask"),
    "positions of the share": (
        changed(position_ids=lambda places: torch.arange(places.shape[1]).expand(2, -1)),
        "with another position_ids",
    ),
    "another mask on one rank": (
        lambda model, inputs: model(**{**inputs, "attention_mask": hides_the_prompt(inputs)}),
        "with another attention_mask",
    ),
}


def refused(call: Call) -> tuple[str, str] | None:
    model = tiny("llama", "ring_fp32")

    def run() -> None:
        with hf_ring_attn.shard(BATCH) as sharded:
            call(model, dict(sharded.inputs))

    return attempt(run)


def refused_by_name(why: str) -> tuple[str, str] | None:
    return refused(REFUSED[why][0])


@pytest.mark.parametrize("why", REFUSED)
def test_another_call_is_refused_on_every_rank(ranks: Ranks, why: str) -> None:
    for rank, raised in enumerate(ranks(2).run(refused_by_name, why)):
        assert raised is not None, "not refused"
        assert raised[0] == ("RefusedElsewhere" if rank and why == "another mask on one rank" else "OtherInputs")
        # A mask is compared where the text model makes its own of it.
        assert OTHER.format(REFUSED[why][1]).removeprefix("LlamaForCausalLM ") in raised[1]


KEEPS: dict[str, Call] = {
    "the last": lambda model, inputs: model(**inputs, logits_to_keep=1),
    "some": lambda model, inputs: model(**inputs, logits_to_keep=torch.tensor([2, 5])),
    "in DDP": lambda model, inputs: DistributedDataParallel(model)(**inputs, logits_to_keep=1),
    "all": lambda model, inputs: model(**inputs, logits_to_keep=0),
}


def keeps(which: str) -> tuple[str, str] | None:
    model = tiny("llama", "ring_fp32")

    def run() -> None:
        with hf_ring_attn.shard({"input_ids": BATCH["input_ids"]}) as sharded:
            KEEPS[which](model, dict(sharded.inputs))

    return attempt(run)


@pytest.mark.parametrize("which", KEEPS)
def test_logits_to_keep_is_refused(ranks: Ranks, which: str) -> None:
    """Each rank kept its own last token."""
    for raised in ranks(2).run(keeps, which):
        if which == "all":
            assert raised is None
            continue
        assert raised is not None, "not refused"
        assert raised[0] == "UnsupportedArgument"
        assert raised[1].startswith(
            "LlamaForCausalLM was called in a ring with logits_to_keep: each rank would select from its own tokens."
        )


def without_a_mask() -> tuple[str, str] | None:
    return refused(without("attention_mask"))


def test_a_mask_that_is_left_out_is_refused_on_every_rank(ranks: Ranks) -> None:
    """Of the first rank's positions transformers takes the second chunk for another document; of the last one's not."""
    for raised in ranks(2).run(without_a_mask):
        assert raised is not None, "not refused"
        assert raised[0] == "ShardedMask"
        assert "It was given position_ids without the attention_mask that shard() made" in raised[1]


# ---- outside of any ring ---------------------------------------------------------------------------------------------


def never_entered(wrapped: bool, entered: bool) -> tuple[tuple[str, str] | None, Tensor]:
    """A step whose loop forgot the context, or left it too early; and a row of another batch, which no ring shares."""
    model: Any = tiny("llama", "ring_fp32").double()
    called = DistributedDataParallel(model) if wrapped else model
    sharded = hf_ring_attn.shard(BATCH)
    if entered:
        with sharded:
            called(**sharded.inputs)
    return attempt(lambda: called(**sharded.inputs).loss.backward()), model(**BATCH).logits.detach()


@pytest.mark.parametrize(("wrapped", "entered"), [(True, False), (False, False), (False, True)])
def test_a_share_outside_of_its_context_is_refused(ranks: Ranks, wrapped: bool, entered: bool) -> None:
    want = tiny("llama", None).double()(**BATCH).logits[0]  # the row without padding
    for raised, logits in ranks(2).run(never_entered, wrapped, entered):
        assert raised is not None, "not refused"
        assert raised[0] == "NotEntered"
        assert "a model was called with inputs from shard(), but the model did not run in the context" in raised[1]
        assert relative_error(logits[0], want) < 1e-11


def teacher_outside(attention: str) -> tuple[str, str] | None:
    teacher, sharded = tiny("llama", attention), hf_ring_attn.shard(BATCH)
    with torch.no_grad():
        return attempt(lambda: without("labels")(teacher, dict(sharded.inputs)))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "ring_fp32"])
def test_a_teacher_that_is_given_a_share_is_refused_whatever_it_attends_by(ranks: Ranks, attention: str) -> None:
    """One that is no ring_fp32 model attended to each rank's tokens alone."""
    for raised in ranks(2).run(teacher_outside, attention):
        assert raised is not None, "not refused"
        assert raised[0] == "NotEntered"
        assert raised[1].startswith("a model was called with inputs from shard(), but the model did not run in the con")


def teacher_inside() -> tuple[str, str] | None:
    teacher = tiny("llama", "sdpa")

    def run() -> None:
        with torch.no_grad(), hf_ring_attn.shard(BATCH) as sharded:
            without("labels")(teacher, dict(sharded.inputs))

    return attempt(run)


def test_a_teacher_that_is_no_ring_model_is_refused_inside_too(ranks: Ranks) -> None:
    for raised in ranks(2).run(teacher_inside):
        assert raised is not None and raised[0] == "UnsupportedModel"


def generates(attention: str, entered: bool) -> tuple[tuple[str, str] | None, list[int]]:
    """From a share, and from whole rows."""
    net: Any = tiny("llama", attention)
    sharded = hf_ring_attn.shard(tokens(23))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with sharded if entered else nullcontext():
        raised = attempt(lambda: net.generate(sharded.inputs["input_ids"], **options))
    if entered:
        return raised, []
    return raised, net.generate(tokens(23)["input_ids"], **options)[0, 23:].tolist()


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "ring_fp32"])
def test_generation_from_a_share_is_refused(ranks: Ranks, attention: str, entered: bool) -> None:
    """Each rank continued its own tokens."""
    alone: Any = tiny("llama", None)
    whole = alone.generate(tokens(23)["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
    for raised, text in ranks(2).run(generates, attention, entered):
        assert raised is not None and raised[0] == "GenerationFromShare"
        assert raised[1].startswith("LlamaForCausalLM.generate() was called with one rank's share of a batch, so each ")
        assert entered or text == whole[0, 23:].tolist()


def test_a_ring_of_one_needs_no_context() -> None:
    loss = tiny("llama", "ring_fp32").double()(**hf_ring_attn.shard(BATCH).inputs).loss
    assert relative_error(loss, tiny("llama", None).double()(**BATCH).loss) < LOSS


# ---- embeddings that something outside of the model makes ------------------------------------------------------------


class SoftPrompt(nn.Module):
    """Four learned embeddings before each row."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        self.prompt = nn.Parameter(start)

    def forward(self, model: Any) -> Inputs:
        batch = tokens(19)
        words = model.get_input_embeddings()(batch["input_ids"])
        labels = nn.functional.pad(batch["labels"], (4, 0), value=-100)
        return {"inputs_embeds": torch.cat([self.prompt.expand(2, -1, -1), words], 1), "labels": labels}


def prompted(attention: str | None, reduced: bool = True) -> list[float]:
    """The losses of three steps that train such a prompt alone; without a ring by transformers' own attention."""
    model, prompt, losses = tiny("llama", attention).double().requires_grad_(False), SoftPrompt(), []
    optimizer = torch.optim.SGD(prompt.parameters(), lr=5.0)
    for _ in range(3):
        sharded = hf_ring_attn.shard(prompt(model))
        with sharded if attention else nullcontext():
            loss = model(**sharded.inputs).loss
        loss.backward()
        losses.append(float(sharded.ring.mean(loss.detach())))
        if reduced:
            sharded.reduce_gradients(prompt)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def prompted_without_reduction() -> tuple[str, str] | None:
    return attempt(prompted, "ring_fp32", False)


def test_a_soft_prompt_is_exact_where_it_is_reduced(ranks: Ranks) -> None:
    want = prompted(None)
    for losses in ranks(2).run(prompted, "ring_fp32"):
        assert losses == pytest.approx(want, rel=LOSS)


def test_a_soft_prompt_that_drifts_is_refused_in_words_about_it(ranks: Ranks) -> None:
    for raised in ranks(2).run(prompted_without_reduction):
        assert raised is not None, "not refused"
        assert raised[0] == "RanksDiffer"
        assert "the same inputs_embeds[0, 0, 0], but got rank 0: " in raised[1]
        assert "These inputs_embeds require a gradient" in raised[1]
        assert "Call sharded.reduce_gradients(module) with it, too" in raised[1]
