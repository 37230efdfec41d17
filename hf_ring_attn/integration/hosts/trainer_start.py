"""The construction of a trainer: its Accelerator gets the ring, and TRL's trainer its patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import log
from ..gradients import fsdp
from ..patching.changes import Original, Patch, around, install, target_of
from . import (
    accelerate,
    distillation_trainer,
    grpo_trainer,
    online_dpo_trainer,
    prediction,
    preference_trainers,
    sft_trainer,
    shared_memory,
    trainer,
    trainer_facts,
    uneven_batches,
)
from .parallelism_config import deferring_cp_checks
from .trainer_overrides import OF_WHOLE_ROWS

TRL_PATCHES = {
    sft_trainer.SFT: sft_trainer.PATCHES, **preference_trainers.PATCHES, **grpo_trainer.PATCHES,
    distillation_trainer.DISTILLATION: distillation_trainer.PATCHES,
    online_dpo_trainer.ONLINE_DPO: online_dpo_trainer.PATCHES,
    # They override Trainer's prediction_step.
    **{
        host: [prediction.patch_prediction(host, prediction.predicting(prediction.predict_batch))]
        for host in OF_WHOLE_ROWS
    },
}  # fmt: skip
"""The patches of TRL's trainers, by class."""
STARTS = {
    **dict.fromkeys(grpo_trainer.PATCHES, grpo_trainer.start),
    distillation_trainer.DISTILLATION: distillation_trainer.start,
}
"""Functions that change a trainer's settings for a ring, or refuse it, by class."""


@around
def _create_accelerator(original: Original, self: Any) -> None:
    log.say_again()
    names = [*map(target_of, type(self).__mro__)]
    for name in names:  # trl may have been imported after this package
        install(TRL_PATCHES.get(name, ()))
    with deferring_cp_checks(self.model):
        original(self)
    uneven_batches.leave_to_trainer(self.accelerator)
    accelerate.ask_timeout(self.accelerator, self.args.ddp_timeout_delta)
    accelerate.decide_by_models(self.accelerator, self.model)  # an Accelerator may have existed before
    if trainer_facts.shards_batches(self):
        trainer_facts.refuse_trainer(self)
    if trainer_facts.has_ring(self):
        fsdp.keep_float32(self.accelerator)  # TRL shards a reference, with this policy, before the model
        for name in names:
            if name in STARTS:
                STARTS[name](self)


@trainer_facts.in_rings
def _move_model_to_device(original: Original, self: Any, model: nn.Module, device: torch.device) -> None:
    with shared_memory.keeping([model], device):
        original(self, model, device)


PATCHES = (
    Patch(f"{trainer.TRAINER}.create_accelerator_and_postprocess", "(self)", _create_accelerator),
    Patch(f"{trainer.TRAINER}._move_model_to_device", "(self, model, device)", _move_model_to_device),
)
