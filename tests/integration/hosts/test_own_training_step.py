"""training_step and callbacks as people write them for one process, which see gradients between a step's batches."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

import hf_ring_attn
from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, loaded_by_ranks, numbers, trainer_of
from tests.helpers.models.tiny_models import tiny

RUN = Run(why="", rows=Rows(shortest=9, pad_to="right", labelled="answers"))
OPTIONS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "eval_strategy": "no"}


class Clipping(Trainer):
    """Clips after each batch."""

    def training_step(self, model: Any, *given: Any, **named: Any) -> Tensor:
        loss = super().training_step(model, *given, **named)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss


class Adversarial(Trainer):
    """Trains each batch once more, with embeddings moved along their gradient (FGM)."""

    def training_step(self, model: Any, *given: Any, **named: Any) -> Tensor:
        loss = super().training_step(model, *given, **named)
        weight = self.accelerator.unwrap_model(model).get_input_embeddings().weight
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.5 * weight.grad / weight.grad.norm())
        super().training_step(model, *given, **named)
        with torch.no_grad():
            weight.copy_(before)
        return loss


class Pairs(Trainer):
    """Prefers a row to its reverse, and shards both: Trainer shards one kind of rows, under the usual names."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        ids = self._prepare_inputs(inputs)["input_ids"]
        better, worse = (self.log_probs(model, rows) for rows in (ids, ids.flip(1)))
        loss = -torch.nn.functional.logsigmoid(0.01 * (better - worse)).mean()
        self.accelerator.backward(loss)
        return loss.detach()

    def log_probs(self, model: Any, ids: Tensor) -> Any:
        if distributed.get_world_size() == 1:
            of_tokens = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
            return of_tokens[..., 0].sum(-1)
        targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        sharded = hf_ring_attn.shard({"input_ids": ids, "targets": targets})
        mine = {**sharded.inputs}
        targets = mine.pop("targets")
        with sharded:
            logits = model(**mine).logits
        of_tokens = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])
        return sharded.row_sum(of_tokens[..., 0], mask=targets != -100)


class Whole(Trainer):
    """transformers' own step, copied, with a loss of the form that a ring's guide gives; it sees whole rows."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logits, labels = model(inputs["input_ids"], inputs["attention_mask"]).logits, inputs["labels"]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="sum")
        total: Tensor = loss / num_items_in_batch * self.accelerator.num_processes
        return total

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class AndTerm(Whole):
    """Adds a term to transformers' loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        loss: Any = Trainer.compute_loss(self, model, inputs, num_items_in_batch=num_items_in_batch)
        squares = torch.stack([x.square().sum() for x in model.parameters()])
        total: Tensor = loss + 1e-2 * self.accelerator.num_processes * squares.sum()
        return total


class ClipsBetween(TrainerCallback):
    def on_substep_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def trained(kind: type[Trainer], callbacks: list[TrainerCallback], mesh: Mesh, fsdp: bool, loads: bool = False) -> Any:
    """What Trainer logged, and the weights afterwards. ``loads``: each rank loads a shard of the model."""
    with launched(mesh), a_folder(None) as folder:
        run, model = replace(RUN, arguments=OPTIONS, fsdp2=fsdp), None
        if loads:
            shards = import_module("transformers.distributed").DistributedConfig(fsdp_size=mesh.size)
            model = loaded_by_ranks(tiny("llama", "ring_fp32"), distributed_config=shards)
        trainer: Any = trainer_of(run, mesh, folder, model, kind=kind, callbacks=callbacks)
        trainer.train()
        weights = [x.detach() for x in trainer.model.parameters()]
        whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in weights]
        return numbers(trainer.state.log_history), torch.cat([x.flatten() for x in whole])


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("kind", "callbacks", "fsdp"),
    [
        (Clipping, [], False),
        (Clipping, [], True),
        (Adversarial, [], False),
        (Pairs, [], False),
        (Pairs, [], True),
        (Whole, [], False),
        (AndTerm, [], False),
        (Trainer, [ClipsBetween()], False),
    ],
    ids=[
        "clips",
        "clips, FSDP2",
        "an adversary",
        "pairs",
        "pairs, FSDP2",
        "whole rows",
        "whole rows and a term",
        "a callback",
    ],
)
def test_gradients_between_batches_are_those_of_one_process(
    ranks: Ranks, kind: type[Trainer], callbacks: list[TrainerCallback], fsdp: bool
) -> None:
    """DDP averaged those of a step's last batch alone, so each rank clipped its own tokens' gradients, silently."""
    log, weights = ranks(1).run(trained, kind, callbacks, Mesh(), False)[0]
    for got in ranks(2).run(trained, kind, callbacks, Mesh(cp=2), fsdp):
        assert [pytest.approx(entry, rel=LOSS) for entry in log] == got[0]
        torch.testing.assert_close(got[1], weights, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(Trainer, "_defer_fsdp_gradient_reduction"), reason="since transformers 5.24")
def test_gradients_between_batches_of_a_model_that_was_loaded_in_shards(ranks: Ranks) -> None:
    """There were none, so nothing was clipped: Trainer's way to reduce them late passes the accelerator by."""
    log, weights = ranks(1).run(trained, Trainer, [ClipsBetween()], Mesh(), False)[0]
    for got in ranks(2).run(trained, Trainer, [ClipsBetween()], Mesh(cp=2), False, True):
        assert [pytest.approx(entry, rel=LOSS) for entry in log] == got[0]
        torch.testing.assert_close(got[1], weights, rtol=1e-5, atol=1e-6)
