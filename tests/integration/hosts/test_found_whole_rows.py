"""A Trainer's own loss that one rank's tokens do not give: the self-check finds it, and it gets whole rows.

Nothing is set: each is trained and evaluated as in one process.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DistributedSampler
from transformers import Trainer

from hf_ring_attn import RingConfig
from hf_ring_attn.integration.batch import whole_outputs
from tests.helpers.jobs import whole_row_jobs as jobs
from tests.helpers.jobs.comparison import Ranks, assert_trains_as_without_ring, by_turns
from tests.helpers.jobs.refusal_jobs import without_keywords
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, refusal_of, trainer_of
from tests.integration.hosts import test_own_compute_loss as own
from tests.integration.hosts import test_own_tokens as tokens
from tests.integration.hosts import test_skipped_model as skipped
from tests.integration.hosts import test_trainer_losses as losses

PADDED = Rows(shortest=9, pad_to="right", length=23, labelled="answers")
RUN = Run(why="", rows=PADDED, evaluated=replace(PADDED, count=5, seed=2))
ALONE = {"average_tokens_across_devices": False}
ACCUMULATED = {"gradient_accumulation_steps": 2}


class Named(Trainer):
    """The arguments as many write them."""

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **named)


class StepsByTheModel(Trainer):
    """Its training_step has the loss of transformers' own lines."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss: torch.Tensor = model(**inputs, num_items_in_batch=num_items_in_batch).loss
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        rows = self.accelerator.gather(torch.ones(len(inputs["input_ids"]), device=self.args.device))
        assert len(rows) == self.accelerator.num_processes * len(inputs["input_ids"])
        self.accelerator.backward(loss)
        return loss.detach()


class Counts(Trainer):
    """Its steps and its predictions count the labelled tokens of their batch by Trainer's own method."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss: torch.Tensor = self._loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        with torch.no_grad():
            return self._loss(model, self._prepare_inputs(inputs)), None, None

    def _loss(self, model: Any, inputs: Any) -> Any:
        count = self._get_num_items_in_batch([inputs], self.args.device)
        return self.compute_loss(model, inputs, num_items_in_batch=count)


class TimesProcesses(Trainer):
    """Its loss of logits times the number of processes, by the arguments, since gradients are averaged."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        out = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        total = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        if num_items_in_batch is None:
            loss = total / (labels[:, 1:] != -100).sum()
        else:
            loss = total / num_items_in_batch * self.args.world_size
        return (loss, out) if return_outputs else loss


class SetOnItself(Trainer):
    """Its loss is set on the trainer itself, not on its class."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.compute_loss = MethodType(TimesProcesses.compute_loss, self)  # type: ignore[method-assign]


class Twice(Trainer):
    """R-Drop as its authors wrote it: each row is there twice in one call."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        twice = {name: torch.cat([x, x]) for name, x in inputs.items()}
        out = model(**twice)
        first, second = out.logits.log_softmax(-1).chunk(2)
        labelled = inputs["labels"] != -100
        apart = F.kl_div(0.9 * first, second, log_target=True, reduction="none").sum(-1)
        loss = out.loss + (apart * labelled).sum() / labelled.sum()
        return (loss, {"loss": loss, "logits": out.logits[: len(labelled)]}) if return_outputs else loss


class OneLayerMore(Trainer):
    """Multi-token prediction: a layer of its own, called without a mask, reads states and the next tokens."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out, inner = model(**inputs, output_hidden_states=True), self.accelerator.unwrap_model(model)
        states = out.hidden_states[-1][:, :-1] + inner.get_input_embeddings()(inputs["input_ids"][:, 1:])
        places = torch.arange(states.shape[1], device=states.device)[None]
        angles = inner.model.rotary_emb(states, places)
        states = inner.model.layers[-1](states, position_ids=places, position_embeddings=angles)
        logits, labels = inner.lm_head(states)[:, :-1], inputs["labels"][:, 2:]
        loss = out.loss + 0.3 * F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, {"loss": loss, "logits": out.logits}) if return_outputs else loss


class FeedsItself(Trainer):
    """Scheduled sampling: some tokens are what the model predicts from the tokens before them."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids, labels = inputs["input_ids"], inputs.pop("labels")
        with torch.no_grad():
            predicted = model(**inputs).logits.argmax(-1).roll(1, 1)
        mixed = ids.where((ids % 3 != 0) | (torch.arange(ids.shape[1], device=ids.device) == 0), predicted)
        inputs = {**inputs, "input_ids": mixed, "labels": labels}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class HidesWords(Trainer):
    """Word dropout, from the third step on, of words at random."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids = inputs["input_ids"]
        if self.state.global_step > 1 and model.training:
            inputs = {**inputs, "input_ids": ids.masked_fill((torch.rand(ids.shape) < 0.1).to(ids.device), 7)}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class HidesRare(Trainer):
    """Hides a rare word if it is there: in some steps no rank calls its model with other ids, in others one does."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if (found := inputs["input_ids"] == 31).any():
            inputs = {**inputs, "input_ids": inputs["input_ids"].masked_fill(found, 7)}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class GroupsByLength(Trainer):
    """LLaVA's sampler: the rows of a step of all processes are of about one length."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        size = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        lengths = [int((torch.tensor(row["labels"]) != -100).sum()) for row in rows]
        groups = [range(at, min(at + size, len(rows))) for at in range(0, len(rows), size)]
        return [index for group in groups for index in sorted(group, key=lambda index: -lengths[index])]


class GroupsByStep(GroupsByLength):
    """As many rows are grouped, by Trainer's own number."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        of_a_step = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        assert self.get_total_train_batch_size(self.args) == of_a_step
        return super()._get_train_sampler(train_dataset)


class DealsByHand(Trainer):
    """The sampler of older hosts: each process gets rows of its own."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        sampler: Any = DistributedSampler(rows, self.args.world_size, self.args.process_index, seed=1)
        return sampler


class StepsByItsLoss(jobs.Weighs):
    """Its training_step calls its own compute_loss. The self-check never saw it before the first evaluation."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss: torch.Tensor = self.compute_loss(model, self._prepare_inputs(inputs), False, num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class Gathers(Trainer):
    """An evaluation loop that gathers numbers of rows after the host's own."""

    def evaluation_loop(self, dataloader: Any, *given: Any, **named: Any) -> Any:
        output: Any = super().evaluation_loop(dataloader, *given, **named)
        rows = sum(len(batch["input_ids"]) for batch in dataloader)
        counted = torch.tensor(float(rows), device=self.args.device)
        output.metrics["eval_rows"] = float(self.accelerator.reduce(counted, "sum"))
        return output


class ReturnsAScore(Trainer):
    """Its outputs in an evaluation are of rows, not of tokens."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
        score = out.logits.float().logsumexp(-1).mean(1)
        return (loss, {"loss": loss, "score": score}) if return_outputs else loss


class CountsRight(Trainer):
    """Logs how many tokens are right, of those of all processes. No check tries what it gathers."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.state.num_input_tokens_seen += 10_000  # once, though the first step starts again
        loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
        labelled = inputs["labels"] != -100
        counts = torch.stack([((out.logits.argmax(-1) == inputs["labels"]) & labelled).sum(), labelled.sum()])
        right, of = self.accelerator.gather_for_metrics(counts[None]).sum(0)
        self.state.num_input_tokens_seen += int(right) + 100 * int(of)  # which is logged
        return (loss, out) if return_outputs else loss


class LearnsPairs(Trainer):
    """BERT's pretraining, whose second head reads the pooler's output. It was refused by that output."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids, labels = inputs["input_ids"], inputs["labels"]
        out = model(input_ids=ids, attention_mask=inputs["attention_mask"])
        loss = F.cross_entropy(out.prediction_logits.transpose(1, 2), labels)
        loss = loss + F.cross_entropy(out.seq_relationship_logits, ids[:, 0] % 2)
        return (loss, {"loss": loss, "logits": out.prediction_logits}) if return_outputs else loss


class HidesLabels(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        return super().compute_loss(model, {**inputs, "labels": own.half_of_the_labels(inputs)}, *given, **named)


RUNS = [
    replace(RUN, why="arguments by name", kind=Named),
    replace(
        RUN, why="BERT's pretraining", model="bert of pairs", kind=LearnsPairs, arguments={"label_names": ["labels"]}
    ),
    replace(RUN, why="a model that takes no count", change=without_keywords),
    replace(RUN, why="a model that takes no count, accumulated", change=without_keywords, arguments=ACCUMULATED),
    replace(RUN, why="twice if a token is special", kind=tokens.Special, arguments=ACCUMULATED),
    replace(RUN, why="no call without labels", kind=skipped.OnlyWithLabels, rows=skipped.RUN.rows),
    replace(
        RUN, why="two calls with labels", kind=skipped.TwiceWithLabels, rows=skipped.RUN.rows,
        arguments={"eval_strategy": "no"},
    ),
    replace(RUN, why="rows compared", kind=losses.ContrastsBeside, rows=Rows(), evaluated=Rows(count=6, seed=2)),
    replace(RUN, why="a term that begins later", kind=losses.Later, rows=Rows(), evaluated=Rows(count=4, seed=2)),
    replace(RUN, why="a mean of tokens", kind=losses.Calms, arguments=ACCUMULATED),
    replace(RUN, why="a mean of real tokens", kind=losses.Explores),
    replace(RUN, why="padding trimmed", kind=own.TrimsALoss),
    replace(RUN, why="labels hidden", kind=HidesLabels),
    replace(RUN, why="each row twice", kind=Twice),
    replace(
        RUN, why="each row twice, packed", kind=Twice, rows=Rows(packed=True), evaluated=Rows(packed=True, count=5)
    ),
    replace(
        RUN, why="a layer more", kind=OneLayerMore, rows=Rows(), evaluated=Rows(count=5, seed=2),
        arguments={"ddp_find_unused_parameters": False},
    ),
    replace(RUN, why="tokens that it predicted", kind=FeedsItself),
    replace(RUN, why="tokens that it hides later", kind=HidesWords, steps=4),
    replace(RUN, why="tokens that it hides if there are some", kind=HidesRare),
    replace(RUN, why="weights by places", kind=jobs.Weighs, arguments=ACCUMULATED),
    replace(
        RUN, why="logits of some tokens", kind=jobs.KeepsSome, arguments={"eval_strategy": "no", "learning_rate": 1e-3}
    ),
    replace(RUN, why="its own step, by the model's loss", kind=StepsByTheModel, arguments=ACCUMULATED),
    replace(RUN, why="its own step, counts that are not averaged", kind=StepsByTheModel, arguments=ALONE),
    replace(RUN, why="its own counts", kind=Counts),
    replace(RUN, why="its own counts, not averaged", kind=Counts, arguments=ALONE),
    replace(RUN, why="times the processes of its arguments", kind=TimesProcesses, arguments=ACCUMULATED),
    replace(RUN, why="times the processes, set on the trainer", kind=SetOnItself, arguments=ACCUMULATED),
    replace(RUN, why="a sampler that counts processes", kind=GroupsByLength, rows=replace(PADDED, count=12)),
    replace(RUN, why="a sampler of a step's rows", kind=GroupsByStep, rows=replace(PADDED, count=12)),
    replace(RUN, why="a sampler that deals out rows", kind=DealsByHand, rows=replace(PADDED, count=16)),
    replace(RUN, why="its own step, by its own loss", kind=StepsByItsLoss),
    replace(RUN, why="by choice, not averaged", kind=Named, arguments=ALONE, ring=RingConfig(loss="gathered")),
    replace(RUN, why="an evaluation loop that gathers", kind=Gathers),
    replace(RUN, why="counts of tokens, for a log", kind=CountsRight, arguments={"eval_strategy": "no"}),
    replace(RUN, why="predictions of rows", kind=ReturnsAScore, metrics="logits"),
    replace(RUN, why="under FSDP2, weights by places", kind=jobs.Weighs, fsdp2=True),
    replace(
        RUN, why="under FSDP2, rows compared", kind=losses.ContrastsBeside, fsdp2=True, rows=Rows(),
        evaluated=Rows(count=6, seed=2),
    ),
    replace(RUN, why="under FSDP2, a small mean of tokens", kind=losses.Explores, fsdp2=True),
    replace(RUN, why="under FSDP2, padding trimmed", kind=own.TrimsALoss, fsdp2=True),
]  # fmt: skip


@pytest.mark.parametrize(("run", "mesh"), by_turns(RUNS))
@pytest.mark.turns
def test_it_trains_as_in_one_process(ranks: Ranks, run: Run, mesh: Mesh) -> None:
    assert_trains_as_without_ring(ranks, run, mesh, is_refused=None)


def refusal_of_a_loss_for_rings() -> tuple[str, int]:
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        return refusal_of(trainer_of(replace(RUN, rows=losses.Marked(), kind=losses.AfterMark), Mesh(cp=2), folder))


def test_a_loss_that_was_written_for_rings_is_refused_by_what_was_found(ranks: Ranks) -> None:
    """It reads shift_labels, which whole rows do not have."""
    for error, steps in ranks(2).run(refusal_of_a_loss_for_rings):
        assert error.startswith("LossNotSharded: the loss of AfterMark.compute_loss (the self-check found "), error
        assert steps == 0


def freed() -> tuple[int, bool]:
    """The steps of a trainer whose loss was found to need whole rows, and if it is freed afterwards."""
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        trainer = trainer_of(replace(RUN, kind=jobs.Weighs, steps=2), Mesh(cp=2), folder)
        trainer.train()
        steps, model = trainer.state.global_step, weakref.ref(trainer.model)
        del trainer
    gc.collect()
    return steps, model() is None


def test_what_was_found_does_not_keep_the_trainer(ranks: Ranks) -> None:
    """The error had a traceback, whose frames held the trainer and its model for ever."""
    assert ranks(2).run(freed) == [(2, True)] * 2


def gathered_by(kind: type[Trainer]) -> int:
    """How many outputs of a model a trainer's steps of whole rows gather."""
    run = replace(RUN, kind=kind, ring=RingConfig(loss="gathered"), steps=2, arguments={"eval_strategy": "no"})
    counting = mock.patch.object(whole_outputs, "gathered", wraps=whole_outputs.gathered)
    with launched(Mesh(cp=2)), a_folder(None) as folder, counting as gathered:
        trainer_of(run, Mesh(cp=2), folder).train()
    return gathered.call_count


def test_what_only_the_models_loss_is_read_of_gathers_no_logits(ranks: Ranks) -> None:
    """A gathered row of 32K tokens has 8 GiB of logits."""
    assert ranks(2).run(gathered_by, Named) == [0, 0]
    assert all(count > 0 for count in ranks(2).run(gathered_by, jobs.Weighs))
