"""Losses of a program's own in Trainer: with a state, of pooled rows, with random numbers."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import Trainer

from hf_ring_attn import RingConfig
from hf_ring_attn.integration.selfcheck import trial
from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.runs import Mesh, Row, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, capped_loss, launched, numbers, refusal_of, trainer_of
from tests.helpers.models.remote_models import remote
from tests.helpers.models.tiny_models import tiny

PADDED = Rows(shortest=9, pad_to="right")
STEPS = Run(why="", steps=3, rows=PADDED, arguments={"eval_strategy": "no"})
GATHERED = RingConfig(loss="gathered")


# ---- losses with a state ---------------------------------------------------------------------------------------------


class Annealed:
    """A compute_loss_func whose second term falls with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        self.calls += 1
        logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        peak = logits.logsumexp(-1).square().masked_fill(targets == -100, 0).sum()
        total: Tensor = (loss + peak / self.calls) / num_items_in_batch
        return total


class Counts(Trainer):
    """A compute_loss whose factor grows with each call, counted by an object beside the trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = Annealed()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.factor.calls += 1
        loss = super().compute_loss(*args, **kwargs)
        return loss * self.factor.calls


def log_of(how: str, mesh: Mesh) -> list[dict[str, float]]:
    with launched(mesh), a_folder(None) as folder:
        if how == "compute_loss_func":
            run = replace(STEPS, ring=GATHERED, loss_function=True)
            trainer = trainer_of(run, mesh, folder, compute_loss_func=Annealed())
        else:
            trainer = trainer_of(STEPS, mesh, folder, kind=Counts)
        trainer.train()
        return numbers(trainer.state.log_history)


@pytest.mark.parametrize("how", ["compute_loss_func", "compute_loss"])
def test_a_loss_that_counts_its_calls_counts_none_of_the_self_check(ranks: Ranks, how: str) -> None:
    """The trial step moved its counter, so the first loss was that of a later step: 7.2 for 10.1."""
    want = ranks(1).run(log_of, how, Mesh())[0]
    for log in ranks(2).run(log_of, how, Mesh(cp=2)):
        assert [pytest.approx(entry, rel=LOSS) for entry in want] == log


def refusal_of_a_models_term() -> tuple[str, int]:
    """What a model is refused with that adds a term to its loss, in a trainer that gathers logits."""
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        return refusal_of(trainer_of(replace(STEPS, ring=GATHERED), Mesh(cp=2), folder, model=remote("loss")))


def test_a_term_that_a_gathered_loss_would_leave_out_is_refused(ranks: Ranks) -> None:
    """The loss of the gathered logits was taken in place of the model's, silently: 4.71 for 5.81."""
    for error, steps in ranks(2).run(refusal_of_a_models_term):
        assert error.startswith("LossNotSharded: the loss of RemoteModel (the self-check found "), error
        assert "Compute it outside of the model, in compute_loss or compute_loss_func, with " in error
        assert steps == 0


@dataclass
class Weighed:
    """A loss without a hash that holds its model, as objects of configs do."""

    model: Any = None

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return capped_loss(outputs, labels, num_items_in_batch)


def trained_by(own: bool) -> tuple[int, bool]:
    """The steps made by a loss that holds its model, or its trainer, and if both are freed afterwards."""
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        trainer = trainer_of(STEPS if own else replace(STEPS, ring=GATHERED), Mesh(cp=2), folder)
        if own:
            vars(trainer)["compute_loss"] = partial(Trainer.compute_loss, trainer)
        else:
            trainer.compute_loss_func = Weighed(trainer.model)
        trainer.train()
        steps, model = trainer.state.global_step, weakref.ref(trainer.model)
        del trainer
    gc.collect()
    return steps, model() is None


@pytest.mark.parametrize("own", [False, True])
def test_a_loss_is_known_by_identity_and_not_kept(ranks: Ranks, own: bool) -> None:
    """A dataclass ended in a TypeError, since it has no hash; and the model that any loss held was never freed."""
    assert ranks(2).run(trained_by, own) == [(3, True)] * 2


# ---- losses without labels -------------------------------------------------------------------------------------------


class Contrasts(Trainer):
    """A loss of pooled rows: each rank takes the last of its own tokens for the last of the row."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        hidden = model(**inputs).last_hidden_state
        rows = normalize(hidden[:, -1], dim=-1)
        loss = cross_entropy(rows @ rows.T / 0.5, torch.arange(len(rows)))
        return (loss, {"hidden": hidden}) if return_outputs else loss


class ContrastsBeside(Trainer):
    """The same as a term beside the loss of labels."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = {**inputs, "output_hidden_states": True}
        loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
        rows = normalize(out.hidden_states[-1][:, -1], dim=-1)
        loss = loss + cross_entropy(rows @ rows.T / 0.5, torch.arange(len(rows), device=rows.device))
        return (loss, out) if return_outputs else loss


class Later(Trainer):
    """A term of each row's last token that begins at the third step."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.state.global_step >= 2:
            loss = loss + 0.1 * out.logits[:, -1].float().square().mean()
        return (loss, out) if return_outputs else loss


class Unlabelled(Rows):
    def make(self) -> list[Row]:
        return [{"input_ids": row["input_ids"]} for row in super().make()]


def refusal(kind: type[Trainer], rows: Rows, body: bool = False, **arguments: Any) -> tuple[str, int]:
    """What a trainer raises, and the optimizer steps until then."""
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        model = tiny("llama", "ring_fp32")
        run = replace(STEPS, rows=rows, arguments={**STEPS.arguments, **arguments}, ring=RingConfig(loss="chunked"))
        return refusal_of(trainer_of(run, Mesh(cp=2), folder, model.base_model if body else model, kind=kind))


def test_a_loss_of_pooled_rows_is_refused_before_a_step(ranks: Ranks) -> None:
    """A batch without labels had no trial step, and the loss was that of each rank's tokens, silently."""
    for error, steps in ranks(2).run(refusal, Contrasts, Unlabelled(), True):
        assert error.startswith("PooledLoss: the loss of Contrasts.compute_loss (the self-check found "), error
        assert "RingConfig(loss='gathered')): then compute_loss gets whole rows" in error
        assert steps == 0


class AfterMark(Trainer):
    """Tokens after a mark count three times, as answers after the end of a thought."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        targets, logits = inputs["shift_labels"], model(input_ids=inputs["input_ids"]).logits.float()
        each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        weight = 1 + 2 * (inputs["input_ids"] == Marked.MARK).cumsum(1)
        return (each * weight).sum() / num_items_in_batch * self.accelerator.num_processes


class Marked(Rows):
    """A token that a tokenizer added is in each row once."""

    MARK = 96

    def make(self) -> list[Row]:
        rows = super().make()
        for row in rows:
            row["input_ids"] = row["input_ids"].clamp(max=self.MARK - 1).index_fill(0, torch.tensor([7]), self.MARK)
        return rows


def test_a_loss_that_looks_for_an_added_token_is_refused_before_a_step(ranks: Ranks) -> None:
    """No token of the self-check's row was such a one: a loss of 9.5 for 11.8, silently."""
    for error, steps in ranks(2).run(refusal, AfterMark, Marked()):
        assert error.startswith("LossNotSharded: the loss of AfterMark.compute_loss (the self-check found "), error
        assert steps == 0


def test_a_term_that_compares_rows_is_refused_before_a_step(ranks: Ranks) -> None:
    """The trial step had one row, in which the term is 0: a loss of 5.407 for 5.417, silently."""
    for error, steps in ranks(2).run(refusal, ContrastsBeside, Rows()):
        assert error.startswith("LossNotSharded: the loss of ContrastsBeside.compute_loss (the self-check found ")
        assert steps == 0


def test_a_term_that_begins_later_is_refused_then(ranks: Ranks) -> None:
    """Only the first step was tried, and from the third one on the loss was another one, silently."""
    for error, steps in ranks(2).run(refusal, Later, Rows(), max_steps=4):
        assert error.startswith("LossNotSharded: the loss of Later.compute_loss (the self-check found ")
        assert steps == 2


class Targets(Trainer):
    """A mean over targets of another name than labels."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        targets = inputs.pop("targets")
        out = model(**inputs)
        loss = cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())
        return (loss, out) if return_outputs else loss


class Targeted(Rows):
    def make(self) -> list[Row]:
        return [{"input_ids": row["input_ids"], "targets": row["input_ids"].roll(-1)} for row in super().make()]


def test_a_loss_of_targets_of_another_name_is_refused_too(ranks: Ranks) -> None:
    for error, steps in ranks(2).run(refusal, Targets, Targeted(), label_names=["targets"]):
        assert error.startswith("PooledLoss: the loss of Targets.compute_loss (the self-check found "), error
        assert "give the targets as labels" in error
        assert steps == 0


# ---- means over tokens -----------------------------------------------------------------------------------------------


class Calms(Trainer):
    """The mean of log Z squared over all tokens: that of each rank's, of which some are the ring's padding."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 1e-4 * out.logits.float().logsumexp(-1).square().mean()
        return (loss, out) if return_outputs else loss


class Explores(Trainer):
    """The mean of the entropy of real tokens, of which ranks have different numbers."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
        logs = out.logits.float().log_softmax(-1)
        loss = loss + 0.01 * (logs.exp() * logs).sum(-1)[inputs["attention_mask"].bool()].mean()
        return (loss, out) if return_outputs else loss


@pytest.mark.parametrize("kind", [Calms, Explores])
def test_a_small_mean_over_a_ranks_tokens_is_refused(ranks: Ranks, kind: type[Trainer]) -> None:
    """Gradients were about 1e-4 off on the check's row, below its tolerance: both trained."""
    for error, steps in ranks(2).run(refusal, kind, PADDED):
        assert error.startswith(("GradientDiffers", "LossNotSharded")), error
        assert "Each term of compute_loss must add up over ranks" in error
        assert steps == 0


# ---- losses with random numbers --------------------------------------------------------------------------------------


class Masks(Trainer):
    """Hides tokens at random."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        labels, shifted = inputs.pop("labels"), inputs.pop("shift_labels", None)
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shifted is None else shifted
        hidden = torch.rand(labels.shape) < 0.3
        out = model(**{**inputs, "input_ids": inputs["input_ids"].masked_fill(hidden, 1)})
        loss = cross_entropy(out.logits.flatten(0, 1).float(), shifted.flatten(), reduction="sum")
        loss = loss / num_items_in_batch * self.accelerator.num_processes
        return (loss, out) if return_outputs else loss


def warned(kind: type[Trainer]) -> tuple[str, list[str]]:
    said: list[str] = []
    with mock.patch.object(trial, "warn", said.append):
        error, _ = refusal(kind, PADDED)
    return error, said


def test_a_random_loss_trains_with_a_warning(ranks: Ranks) -> None:
    """It cannot be tried, and the line at start said only that the self-check had passed."""
    for error, said in ranks(2).run(warned, Masks):
        assert error == ""
        assert len({*said}) == 1
        assert said[0].startswith("the loss of Masks.compute_loss draws random numbers, so the self-check could not ")
