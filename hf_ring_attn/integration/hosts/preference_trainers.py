"""TRL's DPOTrainer and KTOTrainer in a ring: calls of models are sharded, losses and metrics are of whole rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ... import errors
from ..patching.changes import Original, Patch, around
from . import prediction, trainer, trainer_facts, trainer_overrides, whole_row_steps


def _prepare_inputs(host: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    return functools.partial(_step, host, model), inputs


def _step(host: Any, model: nn.Module) -> AbstractContextManager[None]:
    trainer_facts.refuse_step(host)
    if getattr(host, "padding_free", False):  # TRL 1.16 warns, and pads
        name = type(host).__name__
        raise errors.UnsupportedOption(f"{name} with padding_free=True", "TRL 1.16 had none to test; set it to False")
    return whole_row_steps.sharded_calls(host, model, inside=False)


@trainer_facts.in_rings
def _compute_loss(original: Original, self: Any, *given: Any, **named: Any) -> Any:
    if trainer_overrides.SHARDS_CALLS not in vars(self):
        trainer.warn_of_whole_rows(self)
    return original(self, *given, **named)


@around
def _compute_ref_log_probs(original: Original, self: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    if not trainer_facts.shards_batches(self):
        return original(self, model, inputs)
    with _step(self, model):
        return original(self, model, inputs)


def _predict(original: Callable[..., Any], host: Any, model: nn.Module, *given: Any) -> Any:
    with _step(host, model):
        return original(host, model, *given)


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
