"""Compares the weights of a bare model's replicas before it trains. DDP and FSDP broadcast those that they wrap."""

from __future__ import annotations

import torch
from torch import nn

from ... import errors
from ..context.batch_context import BatchContext
from ..context.introspect import local_of, may_train, name_of
from ..context.model_record import latest_record
from .replicas import bare_of

SAME_WEIGHTS = (
    "Build or load the same model on every rank (seed before random initialisation, LoRA's too), or wrap it in DDP or "
    "FSDP."
)
_AWAY = (
    "its weight {} trains, but its device_map put it on disk or in host memory, where it has no gradient: load the "
    "model without device_map, and shard it by FSDP2"
)


class _Compared(set[tuple[str, bool]]):
    """The rings in which a model's weights were compared, and in training mode or not."""


def compare_weights(model: nn.Module, context: BatchContext) -> None:
    """Compares the trained weights of a bare model over the ring, once for each model, ring and mode.

    Raises:
        RanksDiffer: on every rank, with the name of the first weight that differs.
        UnsupportedModel: a weight waits on the host or on disk; RefusedElsewhere: on the other ranks.
    """
    ring = context.ring
    case = ring.name, model.training
    if ring.size == 1 or not may_train(model) or case in latest_record(model).state(_Compared):
        return
    every = {name: x for name, x in model.named_parameters() if x.requires_grad}
    bare = set(map(id, bare_of(list(every.values()), model, ring)))
    trained = {name: x for name, x in every.items() if id(x) in bare}
    if trained:
        away = next((name for name, x in trained.items() if x.is_meta), None)
        refusal = None if away is None else errors.UnsupportedModel(name_of(model), [_AWAY.format(away)])
        here = next((x.device for x in trained.values() if not x.is_meta), torch.device("cpu"))
        device, doing = ring.small_device(here), "compared the weights that train"
        ring.agree({"number of weights that train": len(trained)}, device, SAME_WEIGHTS, refusal, doing=doing)
        ring.agree(
            {f"weights of {name}": local_of(x) for name, x in trained.items()}, device, SAME_WEIGHTS, doing=doing
        )
    latest_record(model).state(_Compared).add(case)
