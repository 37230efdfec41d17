"""Losses that ask a rank's own tokens: another number on each rank, which no one process has. They are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, refusal_of, trainer_of
from tests.helpers.models.tiny_models import tiny

RUN = Run(why="", steps=4, rows=Rows(shortest=9, pad_to="right", labelled="answers"), ring=RingConfig(loss="chunked"))
"""By default such a loss gets whole rows."""


def twice_if_special(inputs: Any, loss: Tensor) -> Tensor:
    """Such a token is in few rows, and in none of most self-checks."""
    return loss * 2 if bool((inputs["input_ids"] == 0).any()) else loss


class Special(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out = model(**inputs)
        loss = twice_if_special(inputs, out.loss)
        return (loss, out) if return_outputs else loss


def by_a_token(host: str, steps: int = 1, length: int = 120) -> tuple[str, bool]:
    """What a loss that depends on a rank's own tokens is refused with; and if weights changed in the refused step.

    Args:
        length: of Trainer's rows. The self-check's row has all ids of a short one, and few of a long one.
    """
    if host == "loop":
        model: Any = tiny("llama", "ring_fp32")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.lm_head.weight.detach().clone()
        batch = tokens(23)
        batch["input_ids"] = batch["input_ids"].clamp(min=1)
        batch["input_ids"][0, 0] = 0
        sharded = hf_ring_attn.shard(batch, model=model)
        with sharded:
            loss = twice_if_special(sharded.inputs, model(**sharded.inputs).loss)
        loss.backward()
        sharded.reduce_gradients(model)
        try:
            optimizer.step()
        except errors.RanksDiffer as refusal:
            return str(refusal), not torch.equal(before, model.lm_head.weight)
        return "", True
    mesh, more = Mesh(cp=2), {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 1}
    with launched(mesh), a_folder(None) as folder:
        arguments = {**RUN.arguments, **more, "eval_strategy": "no"}
        run = replace(RUN, rows=Rows(length=length), steps=6, arguments=arguments, fsdp2=host == "FSDP2")
        rows = run.rows.make()
        rows[3]["input_ids"][5] = 0
        trainer = trainer_of(run, mesh, folder, kind=Special, train_dataset=rows)
        error, made = refusal_of(trainer)
        return error, made == run.steps


@pytest.mark.parametrize(("host", "steps"), [("Trainer", 1), ("Trainer", 2), ("FSDP2", 1), ("loop", 1)])
def test_a_loss_that_depends_on_a_ranks_tokens_is_refused(ranks: Ranks, host: str, steps: int) -> None:
    """One rank took twice the loss, and the other did not: the sum was that of no program, silently."""
    for error, changed in ranks(2).run(by_a_token, host, steps):
        assert "must hold the same gradient of the loss, but got rank 0: " in error
        assert not changed


def test_the_self_check_finds_it_where_its_row_has_such_a_token(ranks: Ranks) -> None:
    for error, changed in ranks(2).run(by_a_token, "Trainer", 2, 24):
        assert error.startswith("LossNotSharded: the loss of Special.compute_loss (the self-check found ")
        assert not changed


class OfSpecials(Trainer):
    """A loss of such tokens alone: a part of it on each rank, and zero on all in the self-check's row."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out = model(**inputs)
        labels = inputs["shift_labels"].flatten()
        each = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1).float(), labels, reduction="none")
        loss = (each * (inputs["input_ids"].flatten() == 0)).sum() / num_items_in_batch
        return (loss, out) if return_outputs else loss


class Distilled(Trainer):
    """A loss by a teacher's logits: as the model it gives the same loss as itself, so each rank's part is zero."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out = model(**inputs)
        with torch.no_grad():
            teacher = TEACHER.setdefault("", tiny("llama", "ring_fp32", rms_norm_eps=0.1))(**inputs).logits
        each = (out.logits.log_softmax(-1) - teacher.log_softmax(-1)).exp().sub(1).square().sum(-1)
        apart = (each * (inputs["shift_labels"] != -100)).sum() / num_items_in_batch * self.accelerator.num_processes
        return (out.loss + apart, out) if return_outputs else out.loss + apart


TEACHER: dict[str, Any] = {}


def evaluated(kind: str) -> str:
    """What an evaluation of a row with such a token is refused with."""
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        rows = RUN.evaluated.make()
        rows[2]["input_ids"][5] = 0
        trainer = trainer_of(RUN, Mesh(cp=2), folder, kind=KINDS[kind], eval_dataset=rows)
        try:
            trainer.evaluate()
        except errors.RanksDiffer as refusal:
            return str(refusal)
        return ""


KINDS = {"own": Special, "specials": OfSpecials, "teacher": Distilled, "": Trainer}


def test_an_evaluation_that_depends_on_a_ranks_tokens_is_refused(ranks: Ranks) -> None:
    """The mean of one rank's loss and twice the other's was logged, silently."""
    for error in ranks(2).run(evaluated, "own"):
        assert "must hold the same loss of a batch, but got rank 0: " in error
    for kind in ("", "specials", "teacher"):
        assert ranks(2).run(evaluated, kind) == ["", ""]


def skipped(how: str) -> tuple[str, int]:
    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss = model(**inputs).loss
            if bool((inputs["labels"] != -100).any()):
                return loss
            if how == "a constant":
                return torch.zeros((), requires_grad=True)
            return 0.0 * torch.stack([x.sum() for x in model.parameters()]).sum()

    with launched(Mesh(cp=2)), a_folder(None) as folder:
        return refusal_of(trainer_of(RUN, Mesh(cp=2), folder, kind=Own))


@pytest.mark.parametrize("how", ["a constant", "no attention"])
def test_a_loss_without_the_model_on_one_rank_is_refused(ranks: Ranks, how: str) -> None:
    """The other rank waited in its backward until the time-out."""
    for error, steps in ranks(2).run(skipped, how):
        assert error.startswith("RanksDiffer: the ranks of one ring must hold the same dependence of the loss"), error
        assert steps == 0
