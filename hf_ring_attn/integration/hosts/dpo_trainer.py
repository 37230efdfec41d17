"""TRL's DPOTrainer in a ring: its models compute sharded rows, its losses and metrics are those of whole rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ... import errors
from ..batch.shard import Sharded, shard_for
from ..context import batch_context, model_record
from ..context.whole_batch import IGNORED
from ..log import warn
from ..model import admission
from ..patching.changes import Patch
from . import trainer
from .whole_row_calls import log_probs_of_rows, whole_row_calls

BESIDE = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps")
"""Entries of a batch that no model gets, as DPOTrainer has them."""


def _prepare_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_context_parallel_inputs(self: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
        if trainer.group_of(self) is None:
            return original(self, model, inputs)
        whole = self._prepare_inputs(inputs)
        batch, sharded = _shard(self, model, whole)
        return functools.partial(_step, self, model, batch, sharded, whole), whole

    return _prepare_context_parallel_inputs


def _shard(dpo: Any, model: nn.Module, whole: dict[str, Any]) -> tuple[dict[str, Any], Sharded]:
    """The model's whole inputs with labels, and this rank's share of them."""
    trainer.refuse_trainer(dpo)
    admission.refuse_always(dpo.model)
    if dpo._is_vision_dataset:
        raise errors.UnsupportedOption("DPOTrainer with images", "its rows were never tested in a ring; train on text")
    options = model_record.options_of(model)
    trainer.refuse_past_fused_head(dpo, options.loss)
    batch = {name: x for name, x in whole.items() if name not in BESIDE}
    batch["labels"] = whole["input_ids"].masked_fill(whole["completion_mask"] == 0, IGNORED)
    if options.layout == "auto":
        options = replace(options, layout="balanced")
    beside = [dpo.ref_model] if dpo.ref_model is not None and model is not dpo.ref_model else []
    step = log_probs_of_rows(type(dpo).__name__)
    return batch, shard_for(batch, trainer.group_of(dpo), options, model, step=step, beside=beside)


@contextmanager
def _step(
    dpo: Any, model: nn.Module, batch: dict[str, Any], sharded: Sharded, whole: dict[str, Any]
) -> Iterator[Sharded]:
    models = [x for x in (model, dpo.model, dpo.ref_model) if x is not None]
    with sharded, trainer.prepared(dpo, whole), whole_row_calls(models, sharded, batch):
        yield sharded


def _compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def _compute_loss(self: Any, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if trainer.group_of(self) is not None and batch_context.current() is None:
            warn(trainer.WHOLE_ROWS.format(type(self).__name__))
        return original(self, model, inputs, return_outputs)

    return _compute_loss


def _compute_ref_log_probs(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_ref_log_probs(self: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
        if trainer.group_of(self) is None:
            return original(self, model, inputs)
        with _step(self, model, *_shard(self, model, inputs), inputs):
            return original(self, model, inputs)

    return compute_ref_log_probs


def _prediction_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def prediction_step(
        self: Any,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        if trainer.group_of(self) is None:
            return original(self, model, inputs, prediction_loss_only, ignore_keys)
        whole = self._prepare_inputs(inputs)
        with _step(self, model, *_shard(self, model, whole), whole):
            return original(self, model, whole, prediction_loss_only, ignore_keys)

    return prediction_step


DPO = "trl.trainer.dpo_trainer:DPOTrainer"
PATCHES = [
    Patch(f"{DPO}._prepare_context_parallel_inputs", "(self, model, inputs)", _prepare_inputs),
    Patch(f"{DPO}._compute_loss", "(self, model, inputs, return_outputs)", _compute_loss),
    Patch(f"{DPO}.compute_ref_log_probs", "(self, model, inputs)", _compute_ref_log_probs),
    Patch(f"{DPO}.prediction_step", "(self, model, inputs, prediction_loss_only, ignore_keys=)", _prediction_step),
]
