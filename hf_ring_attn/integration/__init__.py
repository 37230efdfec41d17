"""Everything that knows Hugging Face, one host a file."""

from __future__ import annotations

from . import accelerate, exactness, masks, patches, trainer, trl
from .attention import NAME, ring_attention_forward
from .masks import ring_mask

CHANGES = [
    patches.Registration("transformers.modeling_utils:AttentionInterface", NAME, ring_attention_forward),
    patches.Registration("transformers.masking_utils:AttentionMaskInterface", NAME, ring_mask),
    *masks.PATCHES,
    *exactness.PATCHES,
    *accelerate.PATCHES,
    *trainer.PATCHES,
    *trl.PATCHES,
]


def install() -> None:
    """Registers "ring_fp32" and patches the hosts. Idempotent; `import hf_ring_attn` has called it already.

    Raises:
        ChangedHost: a host is of a version whose functions are not those that were patched, by name.
    """
    patches.install(CHANGES)


def uninstall() -> None:
    """Undoes the registrations and every patch of transformers, accelerate and trl."""
    patches.uninstall()
