"""Trainers that a program has changed: a change that is the program's own affair holds, one of the loss is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest import mock

import pytest
from transformers import Trainer
from trl.trainer.sft_trainer import SFTTrainer

from comparison import LOSS, Ranks
from hf_ring_attn import RingAttentionError, errors
from hf_ring_attn.integration.steps import refuse_unknown
from jobs import a_folder, launched, numbers, trainer_of
from runs import Mesh, Rows, Run
from tiny_models import tiny

LEFT = Rows(shortest=9, pad_to="left", labelled="answers")
SHORT = Run(why="", steps=2, rows=LEFT, evaluated=LEFT, metrics="logits", arguments={"eval_steps": 2})


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
        model = tiny("gpt2", "ring_fp32" if mesh.cp > 1 else None, **NO_DROPOUT)
        trainer = trainer_of(run, mesh, folder, model, kind=kind)
        trainer.train()
        return numbers(trainer.state.log_history), getattr(trainer, "prepared", 0)


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def assert_same_log(ranks: Ranks, kind: type[Trainer], run: Run) -> None:
    want = ranks(1).run(log_of, kind, run, Mesh())[0]
    for log, prepared in ranks(2).run(log_of, kind, run, Mesh(cp=2)):
        assert prepared == want[1]
        assert [pytest.approx(entry, rel=LOSS) for entry in want[0]] == log


def test_a_batch_is_prepared_once_and_whole(ranks: Ranks) -> None:
    """transformers prepares it inside the step, where a rank has its share: positions were numbered anew there."""
    assert_same_log(ranks, Positions, SHORT)


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
