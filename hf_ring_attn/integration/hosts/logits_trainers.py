"""TRL's trainers whose loss needs logits of whole rows: ORPO, CPO (SimPO, AlphaPO), TPO and GKD.

They call their models with rows that they make of a batch, which are sharded in that call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from . import prediction, trainer, trainer_overrides


def _prepare_inputs(host: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    whole = host._prepare_inputs(inputs)
    return functools.partial(trainer.whole_row_step, host, model, whole), whole


def _predict(original: Callable[..., Any], host: Any, model: nn.Module, inputs: dict[str, Any], *given: Any) -> Any:
    whole = host._prepare_inputs(inputs)
    with trainer.whole_row_step(host, model, whole):
        return original(host, model, whole, *given)


HOSTS = (
    "trl.experimental.orpo.orpo_trainer:ORPOTrainer",
    "trl.experimental.cpo.cpo_trainer:CPOTrainer",
    "trl.experimental.tpo.tpo_trainer:TPOTrainer",
    "trl.experimental.gkd.gkd_trainer:GKDTrainer",
)
PATCHES = {
    host: [
        trainer_overrides.patch_prepare(host, trainer.shards_batches, _prepare_inputs),
        prediction.patch_prediction(host, _predict),
    ]
    for host in HOSTS
}
