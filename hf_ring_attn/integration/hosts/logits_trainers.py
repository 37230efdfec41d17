"""TRL's trainers whose loss needs logits of whole rows: ORPO, CPO (SimPO, AlphaPO) and TPO.

They call the model once a batch, with rows that they make of it, which are sharded in that call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..model import admission
from . import prediction, trainer, trainer_overrides
from .whole_row_calls import shard_rows, whole_row_calls


def _prepare_inputs(host: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    whole = host._prepare_inputs(inputs)
    return functools.partial(_step, host, model, whole), whole


@contextmanager
def _step(host: Any, model: nn.Module, whole: dict[str, Any]) -> Iterator[None]:
    trainer.refuse_trainer(host)
    admission.refuse_always(host.model)
    shard = functools.partial(shard_rows, host, fused=False)
    with trainer.prepared(host, whole), whole_row_calls((model, host.model), shard):
        yield


def _predict(original: Callable[..., Any], host: Any, model: nn.Module, inputs: dict[str, Any], *given: Any) -> Any:
    whole = host._prepare_inputs(inputs)
    with _step(host, model, whole):
        return original(host, model, whole, *given)


HOSTS = (
    "trl.experimental.orpo.orpo_trainer:ORPOTrainer",
    "trl.experimental.cpo.cpo_trainer:CPOTrainer",
    "trl.experimental.tpo.tpo_trainer:TPOTrainer",
)
PATCHES = {
    host: [
        trainer_overrides.patch_prepare(host, trainer.shards_batches, _prepare_inputs),
        prediction.patch_prediction(host, _predict),
    ]
    for host in HOSTS
}
