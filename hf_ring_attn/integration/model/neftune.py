"""NEFTune in a ring: noise as large as in the whole row, which each rank draws for its own tokens.

transformers' hook on the embeddings scales the noise by the length of its output, which in a ring is a rank's share.
Source: https://huggingface.co/papers/2310.05914.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..context import batch_context, ring_random
from ..log import say
from ..patching.changes import Patch, is_patch
from ..patching.compiler import uncompiled

ALPHA = "neftune_noise_alpha"
"""The attribute of embeddings that have the hook."""


def _hook(original: Callable[..., Any]) -> Callable[..., Any]:
    @uncompiled("NEFTune's noise is drawn between graphs")
    def add_noise(module: Any, inputs: Any, output: Tensor) -> Any:
        context = batch_context.current()
        if context is None or context.ring.size == 1 or context.before_text or not module.training:
            return original(module, inputs, output)
        alpha, tokens = module.__dict__[ALPHA], context.layout.length
        say(
            f"NEFTune ({alpha}): each rank draws noise for its own tokens, so losses differ from those of one process "
            "as with another seed"
        )
        return output + draw_noise(output, alpha / math.sqrt(tokens * output.shape[-1]), context.ring.rank)

    return add_noise


def draw_noise(x: Tensor, bound: float, rank: int) -> Tensor:
    """Uniform numbers within ``bound`` in the shape of ``x``, others on each rank, by the process's generator."""
    generator = torch.Generator(x.device).manual_seed(ring_random.seed_of_rank(ring_random.draw_seed(), rank))
    return torch.zeros_like(x).uniform_(-bound, bound, generator=generator)


def adds_local_noise(module: nn.Module) -> bool | None:
    """True if ``module`` adds noise by a hook that does not know the whole row; None: it adds none."""
    if not module.__dict__.get(ALPHA):
        return None
    return not any(map(is_patch, module._forward_hooks.values()))


PATCHES = [Patch("transformers.integrations.neftune:neftune_post_forward_hook", "(module, input, output)", _hook)]
