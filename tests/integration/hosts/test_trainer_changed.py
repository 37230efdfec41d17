"""Trainers that a program has changed: a change that is the program's own affair holds, one of the loss is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer

from hf_ring_attn import RingAttentionError, RingConfig
from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.runs import Mesh, Pictures, Row, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, trainer_of
from tests.helpers.models.tiny_models import tiny

LEFT = Rows(shortest=9, pad_to="left", labelled="answers")
SHORT = Run(why="", model="gpt2", steps=2, rows=LEFT, evaluated=LEFT, metrics="logits", arguments={"eval_steps": 2})


# ---- batches ---------------------------------------------------------------------------------------------------------


class Positions(Trainer):
    """Counts positions from the first token that is no padding, as generation does."""

    prepared = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.prepared += 1
        inputs = super()._prepare_inputs(inputs)
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0) + 3 * self.prepared
        return inputs


def log_of(kind: type[Trainer], run: Run, mesh: Mesh) -> tuple[list[dict[str, float]], int]:
    """What a trainer logged, and how often it prepared a batch."""
    with launched(mesh), a_folder(None) as folder:
        attention = "ring_fp32" if mesh.cp > 1 else None
        model = tiny("gpt2", attention, **NO_DROPOUT) if run.model == "gpt2" else None
        trainer = trainer_of(run, mesh, folder, model, kind=kind)
        trainer.train()
        operations = {"total_flos": trainer.state.total_flos}
        return [*numbers(trainer.state.log_history), operations], getattr(trainer, "prepared", 0)


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def assert_same_log(ranks: Ranks, kind: type[Trainer], run: Run) -> None:
    want = ranks(1).run(log_of, kind, run, Mesh())[0]
    for log, prepared in ranks(2).run(log_of, kind, run, Mesh(cp=2)):
        assert prepared == want[1]
        assert [pytest.approx(entry, rel=LOSS) for entry in want[0]] == log


def test_a_batch_is_prepared_once_and_whole(ranks: Ranks) -> None:
    """transformers prepares it inside the step, where a rank has its share: positions were numbered anew there."""
    assert_same_log(ranks, Positions, SHORT)


class Again(Trainer):
    """Goes through the same batches in each epoch."""

    def get_train_dataloader(self) -> Any:
        self.ready = [LEFT.collate(LEFT.make()[at : at + 2]) for at in (0, 2)]
        self.kept = [{name: x.clone() for name, x in batch.items()} for batch in self.ready]
        return self.ready

    def train(self, *args: Any, **kwargs: Any) -> Any:
        super().train(*args, **kwargs)
        for ready, kept in zip(self.ready, self.kept, strict=True):
            assert ready.keys() == kept.keys()
            assert all(torch.equal(x, kept[name]) for name, x in ready.items())


def test_a_batch_is_not_changed(ranks: Ranks) -> None:
    """It was cut in place, and again in the second epoch."""
    assert_same_log(ranks, Again, replace(SHORT, steps=4, arguments={"eval_steps": 4}))


# ---- what is counted -------------------------------------------------------------------------------------------------


class Embedded(Trainer):
    """Rows are embedded by the collator."""

    def get_train_dataloader(self) -> Any:
        batch = Rows(count=2).collate(Rows(count=2).make())
        words = torch.randn(97, 32, generator=torch.Generator().manual_seed(0))
        return [{"inputs_embeds": words[batch["input_ids"]], "labels": batch["labels"]}] * 2


def test_a_batch_may_hold_embeddings_alone(ranks: Ranks) -> None:
    """The count of tokens looked for input_ids."""
    assert_same_log(ranks, Embedded, replace(SHORT, arguments={"eval_strategy": "no"}))


class Parameters(Trainer):
    """Notes how often the model's parameters are counted."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        kind: Any = type(self.model)
        with mock.patch.object(kind, "num_parameters", autospec=True, side_effect=kind.num_parameters) as count:
            trained = super().train(*args, **kwargs)
        self.prepared = count.call_count
        return trained


def test_the_operations_of_steps_are_counted_by_one_count_of_parameters(ranks: Ranks) -> None:
    """transformers counts parameters after each backward, while the GPU idles."""
    run = replace(SHORT, steps=4, arguments=NO)
    ((want, counted),) = ranks(1).run(log_of, Parameters, run, Mesh())
    assert counted == 4
    for log, once in ranks(2).run(log_of, Parameters, run, Mesh(cp=2)):
        assert once == 1
        assert [pytest.approx(entry, rel=LOSS) for entry in want] == log


@pytest.mark.parametrize("counted", ["all", "non_padding"])
def test_each_token_is_counted_once_with_images_too(ranks: Ranks, counted: str) -> None:
    """The mask of a batch with images is whole on every rank, and so are its tokens, and their operations."""
    run = replace(
        SHORT, model="gemma3 vision", rows=Masked(), arguments={"include_num_input_tokens_seen": counted, **NO}
    )
    assert_same_log(ranks, Trainer, run)


NO: dict[str, Any] = {"eval_strategy": "no"}


@dataclass(frozen=True, kw_only=True)
class Masked(Pictures):
    """Rows of pictures, the first of each batch with two tokens of padding."""

    def collate(self, rows: list[Row]) -> Row:
        batch = super().collate(rows)
        mask = batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        mask[0, :2] = 0
        batch["labels"][mask == 0] = -100
        return batch


class Summed(Trainer):
    """Computes its loss as Trainer does: a sum over labels, divided by their count, times the number of processes."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        shifted = inputs.pop("shift_labels", torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100))
        out = model(**inputs)
        flat = out.logits.flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(flat, shifted.flatten(), reduction="sum")
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch * self.accelerator.num_processes
        else:
            loss = loss / shifted.ne(-100).sum()
        return (loss, out) if return_outputs else loss


@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(dp=2, cp=2)], ids=str)
def test_an_own_loss_that_counts_processes_as_trainer_does_is_exact(ranks: Ranks, mesh: Mesh) -> None:
    """The self-check refused it: it computed the whole row as if by two processes."""
    run = replace(SHORT, metrics="", arguments={**NO})
    want = ranks(mesh.dp).run(log_of, Summed, run, Mesh(dp=mesh.dp))[0][0]
    for log, _ in ranks(mesh.size).run(log_of, Summed, run, mesh):
        assert [pytest.approx(entry, rel=LOSS) for entry in want] == log


# ---- steps that are exact --------------------------------------------------------------------------------------------


class PassesOn(Trainer):
    """As LLaMA-Factory's CustomSeq2SeqTrainer: it counts, and calls its parent's methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.prepared = 0

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        return super().create_optimizer(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.prepared += 1
        self.losses.append(0.0)
        return loss

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, _ = super().prediction_step(model, inputs, *args, **kwargs)
        return loss, logits, inputs["labels"]


class Penalises(Trainer):
    """A term that all ranks have alike was counted once for each rank."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.01 * self.accelerator.unwrap_model(model).lm_head.weight.square().sum()
        return (loss, outputs) if return_outputs else loss


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class WholeStep(Trainer):
    """A step that shards nothing: every rank computes whole rows, and each had W times their loss."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


LLAMA = replace(SHORT, model="llama")
NOT_AVERAGED = {"eval_steps": 2, "average_tokens_across_devices": False}


@pytest.mark.parametrize("averaged", [True, False], ids=["", "not averaged"])
@pytest.mark.parametrize("kind", [PassesOn, Penalises, OwnStep, WholeStep])
@pytest.mark.turns
def test_a_trainer_with_a_step_of_its_own_is_exact(ranks: Ranks, kind: type[Trainer], averaged: bool) -> None:
    assert_same_log(ranks, kind, LLAMA if averaged else replace(LLAMA, arguments=NOT_AVERAGED))


# ---- steps that are refused ------------------------------------------------------------------------------------------


def mean_of_labels(
    self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """A loss of its own: a mean over the labels that a rank holds."""
    outputs = model(**{name: x for name, x in inputs.items() if name not in ("labels", "shift_labels")})
    labels = (
        inputs["shift_labels"] if "shift_labels" in inputs else torch.nn.functional.pad(inputs["labels"], (0, 1))[:, 1:]
    )
    loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    return (loss, outputs) if return_outputs else loss


def failing(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    raise ValueError("not for this row")


def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
    return Trainer.get_batch_samples(self, *args, **kwargs)


def raised(change: Callable[[Trainer], Any], kind: type[Trainer] = Trainer) -> str:
    """What a trainer raises that was changed after it was made."""
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        try:
            run = replace(LLAMA, ring=RingConfig(loss="chunked"))  # by default such a loss gets whole rows
            trainer = trainer_of(run, Mesh(cp=2), folder, kind=kind)
            change(trainer)
            trainer.train()
        except RingAttentionError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def raised_by(function: Callable[..., Any], how: str, said: bool = False) -> str:
    name = "get_batch_samples" if function is get_batch_samples else "compute_loss"
    if how == "on the trainer":
        return raised(lambda trainer: setattr(trainer, name, MethodType(function, trainer)))
    if how == "on the class":
        with mock.patch.object(Trainer, name, function):
            return raised(lambda trainer: None)
    return raised(lambda trainer: None, type("Own", (Trainer,), {name: function, "ring_fp32_exact": said}))


REFUSED: list[tuple[Callable[..., Any], str, str]] = [
    (mean_of_labels, "in a subclass", "LossNotSharded: the loss of Own.compute_loss (the self-check found "),
    (mean_of_labels, "on the trainer", "LossNotSharded: the loss of Trainer.compute_loss (the self-check found "),
    (mean_of_labels, "on the class", "LossNotSharded: the loss of Trainer.compute_loss (the self-check found "),
    (failing, "in a subclass", "SelfCheckNotRun: the self-check could not run LlamaForCausalLM on 2 rows of 26 ran"),
    (
        get_batch_samples,
        "in a subclass",
        "UnknownTrainer: Own counts or shards its batches in Own.get_batch_samples, wh",
    ),
    (
        get_batch_samples,
        "on the trainer",
        "UnknownTrainer: Trainer counts or shards its batches in the trainer's own ge",
    ),
]


@pytest.mark.turns
@pytest.mark.parametrize(("function", "how", "text"), REFUSED, ids=[f"{f.__name__} {how}" for f, how, _ in REFUSED])
def test_a_step_that_is_not_exact_is_refused(ranks: Ranks, function: Callable[..., Any], how: str, text: str) -> None:
    for error in ranks(2).run(raised_by, function, how):
        assert error.startswith(text), error
        assert function is not mean_of_labels or "in the ring, " in error


def test_a_trainer_may_say_that_its_count_is_exact(ranks: Ranks) -> None:
    assert ranks(2).run(raised_by, get_batch_samples, "in a subclass", said=True) == ["", ""]


# ---- what a model adds to its loss -----------------------------------------------------------------------------------


def adds_a_penalty(model: Any, _args: Any, output: Any) -> Any:
    """A forward hook."""
    if output.loss is not None:
        output.loss = output.loss + 0.01 * model.lm_head.weight.square().sum()
    return output


def log_with_hook(mesh: Mesh) -> list[dict[str, float]]:
    with launched(mesh), a_folder(None) as folder:
        model = tiny("llama", "ring_fp32" if mesh.cp > 1 else None)
        model.register_forward_hook(adds_a_penalty)
        trainer = trainer_of(LLAMA, mesh, folder, model)
        trainer.train()
        return numbers(trainer.state.log_history)


def test_a_penalty_that_a_hook_adds_is_counted_once(ranks: Ranks) -> None:
    """It was counted once for each rank: 60.57 for 32.30."""
    want = ranks(1).run(log_with_hook, Mesh())[0]
    for log in ranks(2).run(log_with_hook, Mesh(cp=2)):
        assert [pytest.approx(entry, rel=LOSS) for entry in want] == log
