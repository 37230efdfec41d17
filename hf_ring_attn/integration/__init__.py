"""Integration with Hugging Face.

Imports go one way: hosts -> batch -> {selfcheck, attention} -> model -> {losses, memory} -> gradients -> context ->
{patching, log}.
"""

from __future__ import annotations

from typing import Any

from .attention import masks
from .attention.function import ring_attention_forward
from .attention.masks import ring_mask
from .context.introspect import NAME
from .hosts import (
    accelerate,
    best_model,
    between_batches,
    checkpoints,
    gathered_rows,
    generation_batch,
    prediction,
    random_states,
    sft_trainer,
    trainer,
    trainer_start,
)
from .model import neftune, structure
from .patching import changes, modules, optimizer_steps

_PATCHING: tuple[Any, ...] = (
    masks, structure, neftune, accelerate, generation_batch, trainer_start, trainer, prediction, between_batches,
    checkpoints, best_model, random_states, gathered_rows, sft_trainer,
)  # fmt: skip
CHANGES: list[changes.Change] = [
    changes.Registration("transformers.modeling_utils:AttentionInterface", NAME, ring_attention_forward),
    changes.Registration("transformers.masking_utils:AttentionMaskInterface", NAME, ring_mask),
    *(patch for module in _PATCHING for patch in module.PATCHES),
]


def install() -> None:
    """Registers "ring_fp32", and patches transformers, accelerate and trl. `import hf_ring_attn` calls it.

    A second call does nothing.

    Raises:
        ChangedHost: a function of these libraries has other parameters than its patch needs.
    """
    changes.install(CHANGES)
    optimizer_steps.watch()


def uninstall() -> None:
    """Undoes the registrations and every patch of transformers, accelerate and trl; takes what is ours off modules."""
    modules.remove_all()
    changes.uninstall()  # last: a filter may turn its warnings into errors
