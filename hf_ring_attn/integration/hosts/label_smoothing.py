"""Trainer's label smoothing: on logits of whole rows, or in the model's own loss, which makes no logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..context import introspect
from ..context.batch_context import BatchContext
from ..losses.head import ChunkedLoss
from ..model import adapters
from ..model.experts import AuxiliaryLoss
from ..patching.modules import Replaced


@contextmanager
def smoothed_in_model(trainer: Any, context: BatchContext) -> Iterator[None]:
    """Inside, the model's own loss smooths labels, in chunks.

    It leaves out the auxiliary loss of experts and AdaLoRA's penalty, as the trainer's smoothed loss does. With
    loss="sharded", which the self-check's whole row has, the trainer smooths.
    """
    smoother = trainer.label_smoother
    if smoother is None or context.config.loss == "sharded":
        with smoothed(trainer, trainer.model):
            yield
        return
    with (
        Replaced(trainer, "label_smoother", None),
        Replaced(context.state(ChunkedLoss), "smoothing", smoother.epsilon),
        Replaced(context.state(AuxiliaryLoss), "factor", 0.0),
        adapters.without_penalty(trainer.model),
    ):
        yield


def smoothed(trainer: Any, model: nn.Module) -> AbstractContextManager[object]:
    """Lets the trainer smooth shifted labels of a wrapped causal language model, too.

    It recognizes such models by the name of their class, which `fully_shard` and torch.compile change.
    """
    smoother, head = trainer.label_smoother, introspect.loss_model_of(model)
    shifted = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if smoother is None or head is None or introspect.class_of(head) not in shifted:
        return nullcontext()
    return Replaced(trainer, "label_smoother", functools.partial(smoother, shift_labels=True))
