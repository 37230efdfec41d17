"""What ranks run for the tests of `verify`: tiny models, whole and with planted defects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_ring_attn.errors import Refused
from hf_ring_attn.verify.verdict import Finding, verdict
from tests.helpers.models.tiny_models import tiny

TOKENS = 60


def looks_around(module: nn.Module, _args: Any, output: Any) -> Any:
    """An attention that adds the mean of the tokens that its rank has: of other documents, and of later ones."""
    return (output[0] + 0.05 * output[0].mean(1, keepdim=True), *output[1:])


def counts_its_own_tokens(_module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """An MLP that knows each token's place, as a rank counts it."""
    return output * (1 + 0.01 * torch.arange(output.shape[1], device=output.device)[None, :, None])


DEFECTS = {"attention": ("self_attn", looks_around), "mlp": ("mlp", counts_its_own_tokens)}


def verified(name: str, defect: str = "") -> tuple[list[Finding], str]:
    """The verdict on a tiny model. ``defect``: of `DEFECTS`, planted in its second layer."""
    model: Any = tiny(name, "eager")
    model.eval()
    if defect:
        part, hook = DEFECTS[defect]
        getattr(model.model.layers[1], part).register_forward_hook(hook)
    try:
        return verdict(model, TOKENS, torch.device("cpu"))
    except Refused as error:
        return [], str(error)
