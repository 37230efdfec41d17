"""The best model of a training, which each rank loads from a folder: ranks of other nodes may not have it.

The first rank alone writes checkpoints. Where nodes share no disk, Trainer tells the other ranks that it could not
locate the best model, and they keep the weights of the last step. They evaluate their tokens with these then.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from ...comm.groups import send_to_all
from ...comm.ring import Ring
from ..patching.changes import Original, Patch
from . import trainer, trainer_facts

NAMES = ("pytorch_model.bin", "model.safetensors", "adapter_model.bin", "adapter_model.safetensors")
"""The files of which Trainer wants one."""


@trainer_facts.in_rings
def _load_best_model(original: Original, self: Any) -> None:
    original(self)
    if self.is_fsdp_enabled:  # all ranks of FSDP read one checkpoint together
        return
    world, folder = Ring.of(None), Path(self.state.best_model_checkpoint)
    found = any((folder / name).exists() for name in NAMES)
    have = world.numbers(int(found), world.small_device(), "loaded the best model")
    if any(have) and not all(have):
        _send(self.model, have.index(1))


def _send(model: Any, rank: int) -> None:
    """Gives all ranks of the job the weights of one. Those of a base below an adapter are frozen, and not sent."""
    has_base = hasattr(model, "peft_config")
    for x in chain(model.parameters(), model.buffers()):
        if x.requires_grad or not has_base:
            send_to_all(x, rank)


PATCHES = (Patch(f"{trainer.TRAINER}._load_best_model", "(self)", _load_best_model),)
