"""Trainers that a program has changed: a change that is the program's own affair holds, one of the loss is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer
from trl.trainer.sft_trainer import SFTTrainer

from hf_ring_attn import RingAttentionError, errors
from hf_ring_attn.integration.hosts.trainer_overrides import refuse_unknown
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


# ---- steps -----------------------------------------------------------------------------------------------------------


def compute_loss(
    self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    raise AssertionError("it was called")


def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    raise AssertionError("it was called")


def raised(change: Callable[[Trainer], Any], said: bool = False) -> str:
    """What a trainer raises that was changed after it was made, and on which `ring_fp32_exact` was ``said``."""
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        try:
            trainer = trainer_of(SHORT, Mesh(cp=2), folder)
            if said:
                trainer.ring_fp32_exact = True  # type: ignore[attr-defined]  # ours
            change(trainer)
            trainer.train()
        except (RingAttentionError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def on_the_trainer(function: Callable[..., Any]) -> Callable[[Trainer], Any]:
    return lambda trainer: setattr(trainer, function.__name__, MethodType(function, trainer))


@pytest.mark.parametrize("function", [compute_loss, training_step])
def test_a_step_that_is_set_on_a_trainer_is_refused(ranks: Ranks, function: Callable[..., Any]) -> None:
    """It was called on each rank's tokens, or on whole rows by every rank."""
    name = function.__name__
    for error in ranks(2).run(raised_on_the_trainer, function):
        assert error.startswith(
            f"UnknownTrainer: Trainer computes its loss or its predictions in {name}, set as the trainer's own {name}, "
            "which is not known to be exact in a ring. Use transformers.Trainer or trl.SFTTrainer as they are; if the"
        )
    assert ranks(2).run(raised_on_the_trainer, function, said=True) == ["AssertionError: it was called"] * 2


def raised_on_the_trainer(function: Callable[..., Any], said: bool = False) -> str:
    return raised(on_the_trainer(function), said)


@pytest.mark.parametrize("function", [compute_loss, training_step])
def test_a_step_that_is_set_on_a_known_class_is_refused(ranks: Ranks, function: Callable[..., Any]) -> None:
    for error in ranks(2).run(raised_on_the_class, function):
        name = function.__name__
        assert error.startswith(f"UnknownTrainer: Trainer computes its loss or its predictions in {name}, set as Tra")


def raised_on_the_class(function: Callable[..., Any]) -> str:
    with mock.patch.object(Trainer, function.__name__, function):
        return raised(lambda trainer: None)


def test_no_step_hides_behind_a_name_or_below_a_known_class() -> None:
    disguised = functools.wraps(Trainer.training_step)(training_step)
    refusal = pytest.raises(errors.UnknownTrainer, match=r"set as Trainer\.training_step, which is not known")
    with mock.patch.object(Trainer, "training_step", disguised), refusal:
        refuse_unknown(object.__new__(SFTTrainer))
    refuse_unknown(object.__new__(SFTTrainer))
