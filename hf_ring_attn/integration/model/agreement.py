"""The ranks' agreement on the model that is about to run: one small message for each model and batch.

Structure, dtypes, mode and options decide which messages are sent, so they must be the same on all ranks. Replicas may
drift apart, so each batch compares a sample of one weight, and of what else the program writes (`saved_buffers`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ...comm.fingerprint import number_of
from ..context.batch_context import BatchContext
from ..context.introspect import inside, may_train
from ..context.mesh import mixed_precision
from ..context.model_record import ModelRecord, Visits, configured, forget_model, latest_record
from ..memory import auto_saving
from . import adapters, admission, saved_buffers
from .saved_buffers import written_buffers

SAMPLE = 2**14
"""The most values of a weight that a batch compares."""

ALIKE = "Load the same model on every rank, and set its mode, dtype and options there alike."
_DRIFT = (
    "They were the same before: on some rank its optimizer took another step (skipped one, or has another learning "
    "rate), or gradients were not averaged before it. Average them on all ranks, then step on all ranks alike."
)
_DTYPE: Callable[[Any], torch.dtype] = attrgetter("dtype")
_DOING = "compared its model with the other ranks"


class _Agreement:
    """The part of the agreement that lasts as long as a model's structure.

    Attributes:
        details: facts that decide which messages are sent, by name. structure: their fingerprint.
        trained: the index of each weight that trains, and its name. rings: the names of the rings that agreed on it.
        checkpoints: the modules that can checkpoint. drops: an adapter drops weights at random.
    """

    def __init__(self) -> None:
        self.details: dict[str, object] = {}
        self.structure: int | Tensor = 0
        self.trained: list[tuple[int, str]] = []
        self.checkpoints: list[weakref.ref[nn.Module]] = []
        self.drops = False
        self.rings: set[str] = set()


class _Turns(weakref.WeakKeyDictionary[nn.Module, int]):
    """The number of batches that each model trained on in one ring: it selects the weight to compare."""


def admit(model: nn.Module, context: BatchContext, meanwhile: Callable[[], None] = lambda: None) -> ModelRecord:
    """Binds an outermost model to a batch (`admission.bind`), and compares it with the other ranks' model.

    Args:
        meanwhile: called while the message travels; it sends none.

    Raises:
        UnsupportedModel, LossNotSharded: see `admission.bind`. RefusedElsewhere: another rank raised one of them.
        RanksDiffer: on every rank, with the name of what differs.
    """
    refusal: errors.Refused | None = None
    try:
        admission.bind(model, context)
    except errors.Refused as error:
        refusal = error
    record = latest_record(model)
    # A module beside the model (a loss, a head) may be called on some ranks only.
    if context.ring.size > 1 and record.uses_ring():
        changed_elsewhere = _agree(model, record, context, refusal, meanwhile)
        if changed_elsewhere:  # that rank examines the model anew, with messages, so all must
            forget_model(model)
            record = admission.bind(model, context)
        record.state(_Agreement).rings.add(context.ring.name)
    elif refusal is not None:
        raise refusal
    else:
        meanwhile()
        if context.ring.size == 1 and record.uses_ring():  # in a ring all ranks decide, in `_agree`
            offers = auto_saving.offers(record, context, context.state(Visits)[record].weights[0].device)
            auto_saving.decide_saving(context, *([offer] for offer in offers))
    return record


def _agree(
    model: nn.Module, record: ModelRecord, context: BatchContext, refusal: errors.Refused | None,
    meanwhile: Callable[[], None],
) -> bool:  # fmt: skip
    """Compares this rank's model with the others'. Returns True if it changed on another rank, not on this one."""
    ring, agreed = context.ring, record.state(_Agreement)
    weights: list[Any] = context.state(Visits)[record].weights
    if not agreed.details:
        _examine(inside(model), record, agreed)
    facts = _facts(model, weights, record, context)
    compared = may_train(model) and context.config.self_check
    buffers = written_buffers(inside(model), record) if compared else {"no buffer": None}
    drawn = {adapters.DRAWN: torch.get_rng_state() if agreed.drops and model.training else None}
    device = ring.small_device(weights[0].device)
    computes = weights[0].device if weights[0].is_cuda else device  # FSDP2's weights may wait on the host
    agree = ring.start_agreement(
        {**facts, "structure": agreed.structure, **buffers, **drawn, **_sample(model, weights, agreed, context)},
        device, _DRIFT, refusal,
        [ring.name not in agreed.rings, *auto_saving.offers(record, context, computes)], doing=_DOING,
    )  # fmt: skip
    if refusal is None:
        meanwhile()
    try:
        renewed, *offers = agree()
    except errors.RanksDiffer:  # on all ranks: find a better name than the fingerprint's
        ring.agree({**facts, **agreed.details}, device, ALIKE, doing=_DOING)
        ring.agree(buffers, device, saved_buffers.TODO, doing=_DOING)
        ring.agree(drawn, device, adapters.TODO, doing=_DOING)
        raise
    auto_saving.decide_saving(context, *offers)
    return any(renewed) and ring.name in agreed.rings


def _examine(model: nn.Module, record: ModelRecord, agreed: _Agreement) -> None:
    weights = {
        f"{path}.{name}".lstrip("."): x
        for path, module in model.named_modules()
        for name, x in module._parameters.items()
        if x is not None
    }
    agreed.trained = [(index, name) for index, (name, x) in enumerate(weights.items()) if x.requires_grad]
    agreed.drops = adapters.drop_weights(model)
    modules = [module for module in record.modules() if hasattr(module, "gradient_checkpointing")]
    agreed.checkpoints = list(map(weakref.ref, modules))
    agreed.details = {
        "class": type(model).__name__,
        # Names that begin with _ are the host's, for example of a path.
        "config": [{name: x for name, x in values if name[0] != "_"} for _, values in record.values],
        "modules": {name: type(module).__name__ for name, module in model.named_modules()},
        "weights": {name: f"{list(x.shape)}{', trained' * x.requires_grad}" for name, x in weights.items()},
    }
    agreed.structure = number_of(repr(agreed.details))


def _facts(model: nn.Module, weights: list[Any], record: ModelRecord, context: BatchContext) -> dict[str, object]:
    """Facts about the computation that may change from batch to batch."""
    kind = next((x.device.type for x in weights if not x.is_meta), "cpu")  # accelerate offloads weights to "meta"
    checkpoints = any(getattr(x(), "gradient_checkpointing", False) for x in record.state(_Agreement).checkpoints)
    return {
        "mode": "training" if model.training else "evaluation",
        "grad mode": "enabled" if torch.is_grad_enabled() else "disabled",
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off",
        "mixed precision of accelerate": mixed_precision(),
        "dtypes of weights": ", ".join(sorted(map(str, set(map(_DTYPE, weights))))),
        "gradient checkpointing": "on" if checkpoints else "off",
        "RingConfig": configured(record.configs) or context.config,
    }


def _sample(model: nn.Module, weights: list[Any], agreed: _Agreement, context: BatchContext) -> dict[str, object]:
    """Samples one trained weight, each batch another; none if ranks hold shards of weights."""
    trained, sharded = agreed.trained, "DTensor" in latest_record(model).classes
    if not trained or sharded or not may_train(model) or not context.config.self_check:
        return {"no weight": None}
    turns = context.ring.state(_Turns)
    turn = turns[inside(model)] = turns.get(inside(model), -1) + 1
    if turn == 0:  # `compare_weights` or DDP made them the same
        return {"no weight": None}
    index, name = trained[turn % len(trained)]
    weight = weights[index]
    stride = max(1, -(-weight.numel() // SAMPLE))  # a weight may be empty
    places = torch.arange(turn // len(trained) % stride, weight.numel(), stride, device=weight.device)
    return {f"weight {name} (a sample)": torch.take(weight.detach(), places)}
