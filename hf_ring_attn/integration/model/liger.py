"""Liger's own forwards of models: in a ring they make logits, of which the model's loss is computed as ever.

In training such a forward computes its fused loss from the weight of the head, which it does not call: FSDP2 may have
sharded it, and its adapters would not count. With ``skip_logits=False`` it calls the head, whose logits are lazy.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ... import errors
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import loss_model_of, name_of, parameters_of
from ..patching.modules import Arguments, attach, attached

OPTION = "skip_logits"
"""The parameter that these forwards have, and transformers' do not."""
KEY = "logits of Liger's forward"


def prepare(model: nn.Module, _context: BatchContext | None = None) -> None:
    """Hooks the model whose forward is Liger's; `Trainer` may apply Liger after an evaluation, to a known model."""
    if (owner := _unhooked(model)) is not None:
        attach(owner, KEY, _ask_for_logits)


def refuse_running(model: nn.Module, context: BatchContext) -> None:
    """Refuses a model that runs already when it is first met: its hook would not be called.

    Raises:
        UnsupportedModel.
    """
    if model.training and context.facts.has_labels and _unhooked(model) is model:
        prepare(model)
        raise errors.UnsupportedModel(name_of(model), [_LATE])


_LATE = (
    "its forward, which is Liger's, reads the head's weight for a fused loss; a ring asks it for logits, which needs "
    "the model by name: hf_ring_attn.shard(batch, model=model)"
)


def _unhooked(model: nn.Module) -> nn.Module | None:
    owner: nn.Module | None = loss_model_of(model)
    found = owner is not None and not attached(owner, KEY) and OPTION in parameters_of(owner)
    return owner if found else None


def _ask_for_logits(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if batch_context.current() is None or kwargs.get("fused_lm_head"):  # TRL's, which calls no head
        return None
    return args, {**kwargs, OPTION: False}
