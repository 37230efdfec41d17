"""TRL's DPOTrainer and KTOTrainer in a ring: models get sharded rows, losses and metrics are those of whole rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ... import errors
from ..batch.shard import Sharded
from ..batch.whole_row_calls import Rows, whole_row_calls
from ..context import batch_context
from ..context.whole_batch import IGNORED
from ..log import warn
from ..model import admission
from ..patching.changes import Patch
from ..patching.modules import Replaced
from . import prediction, trainer, trainer_facts, trainer_overrides, whole_row_steps

BESIDE = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps", "label", "ref_logps", "ref_KL_logps")
"""Entries of a batch that no model gets."""
KL = "KL_"
"""Prefix of KTO's second rows: prompts with other rows' completions, which models see without gradients."""


def _prepare_inputs(host: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    whole = host._prepare_inputs(inputs)
    return functools.partial(_step, host, model, _rows(host, model, whole), whole), whole


def _rows(host: Any, model: nn.Module, whole: dict[str, Any]) -> Rows:
    """The policy's whole inputs with labels, and this rank's share of them."""
    trainer_facts.refuse_trainer(host)
    admission.refuse_always(host.model)
    if getattr(host, "padding_free", False):  # TRL 1.16 warns, and pads
        name = type(host).__name__
        raise errors.UnsupportedOption(f"{name} with padding_free=True", "TRL 1.16 had none to test; set it to False")
    beside = [host.ref_model] if host.ref_model is not None and model is not host.ref_model else []
    batch = {x: value for x, value in whole.items() if x not in BESIDE and not x.startswith(KL)}
    batch["labels"] = whole["input_ids"].masked_fill(whole["completion_mask"] == 0, IGNORED)
    return Rows(whole_row_steps.shard_rows(host, model, batch, beside), batch)


@contextmanager
def _step(host: Any, model: nn.Module, rows: Rows, whole: dict[str, Any]) -> Iterator[Sharded]:
    models, shard = (model, host.model, host.ref_model), functools.partial(whole_row_steps.shard_rows, host)
    calls = whole_row_calls(models, shard, rows)
    with rows.sharded, trainer_facts.prepared(host, whole), Replaced(host, trainer_overrides.BY_CALLS, False), calls:
        yield rows.sharded


def _compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def _compute_loss(self: Any, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if trainer_facts.group_of(self) is not None and batch_context.current() is None:
            warn(trainer.WHOLE_ROWS.format(type(self).__name__))
        return original(self, model, inputs, return_outputs)

    return _compute_loss


def _compute_ref_log_probs(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_ref_log_probs(self: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
        if not trainer_facts.shards_batches(self):
            return original(self, model, inputs)
        with _step(self, model, _rows(self, model, inputs), inputs):
            return original(self, model, inputs)

    return compute_ref_log_probs


def _predict(original: Callable[..., Any], host: Any, model: nn.Module, inputs: dict[str, Any], *given: Any) -> Any:
    whole = host._prepare_inputs(inputs)
    with _step(host, model, _rows(host, model, whole), whole):
        return original(host, model, whole, *given)


DPO = "trl.trainer.dpo_trainer:DPOTrainer"
KTO = "trl.trainer.kto_trainer:KTOTrainer"


def _patches(host: str) -> list[Patch]:
    return [
        trainer_overrides.patch_prepare(host, trainer_facts.shards_batches, _prepare_inputs),
        Patch(f"{host}._compute_loss", "(self, model, inputs, return_outputs)", _compute_loss),
        Patch(f"{host}.compute_ref_log_probs", "(self, model, inputs)", _compute_ref_log_probs),
        prediction.patch_prediction(host, _predict),
    ]


PATCHES = {host: _patches(host) for host in (DPO, KTO)}
