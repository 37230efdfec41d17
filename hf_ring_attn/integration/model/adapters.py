"""PEFT's adapters that a ring trains exactly. They treat every token by itself, and each was measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ..context import introspect
from ..context.batch_context import BatchContext
from ..context.model_record import latest_record
from ..patching.changes import warn_if_untested
from ..patching.modules import Replaced

EXACT = frozenset({
    "ADALORA", "ADAMSS", "ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA",
    "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT",
    "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT",
})  # fmt: skip
"""PEFT's types whose loss and gradients in a ring are those of one process."""

INEXACT = {
    "LILY": "mixes its experts by the mean over the tokens of each rank",
    "POLY": "chooses its skills by task ids that are not sharded with the tokens",
    "PVERA": "draws other noise for the tokens of each rank than one process would",
    "SHADOW": "runs a second model, and adds its loss to every rank's loss",
    "XLORA": "runs the model a second time to mix its experts",
}
"""The reasons against other types. A type in neither table was never measured."""

INEXACT_LORA = {
    "alora_invocation_tokens": "(aLoRA) looks for its invocation tokens in each rank's tokens alone",
    "arrow_config": "(Arrow) was never tested in a ring",
    "monteclora_config": "(MonteCLoRA) draws other noise on each rank, and needs another loss",
    "velora_config": "(VeLoRA) compresses activations by an average over the tokens of each rank",
}
"""Options of `LoraConfig` that turn it into another method."""

DROPS_WEIGHTS = {
    "LOHA": ("rank_dropout", "module_dropout"), "LOKR": ("rank_dropout", "module_dropout"),
    "OFT": ("module_dropout",), "BOFT": ("boft_dropout",),
}  # fmt: skip
"""Rates at which a type drops its weights for all tokens of a call alike."""

DRAWN = "random numbers by which a PEFT adapter drops weights"
TODO = (
    "Each rank would drop others, and the ring would mix models: seed all ranks alike, or set the adapter's "
    f"{', '.join(sorted({rate for rates in DROPS_WEIGHTS.values() for rate in rates}))} to 0. GRPO and RLOO give each "
    "rank a seed of its own."
)


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the reasons why the adapters of ``model``, active or not, are not exact in a ring."""
    found = _adapters(model) if context.ring.size > 1 else []
    if found:
        warn_if_untested("peft")  # it may have been imported after this package
    for which, adapter in found:
        yield from _adapter_reasons(which, adapter)
        if context.text is not None and model.training:
            yield from _dropped_weights(which, adapter)


def drop_weights(model: nn.Module) -> bool:
    """Returns True if an adapter of ``model`` drops weights in training, by numbers that all ranks must draw alike."""
    return any(True for which, adapter in _adapters(model) for _ in _dropped_weights(which, adapter))


def _adapters(model: nn.Module) -> list[tuple[str, Any]]:
    """The config of each adapter, with its name in words. Parts of a model may have adapters of their own."""
    found: dict[int, tuple[str, Any]] = {}
    for module in model.modules():
        adapters: Any = getattr(module, "peft_config", None) or {}
        found.update({id(adapter): (f"the PEFT adapter {name!r}", adapter) for name, adapter in adapters.items()})
    return [*found.values()]


def _dropped_weights(which: str, adapter: Any) -> Iterator[str]:
    """Yields a reason for each rate, where ranks draw their own numbers (`RingRandomness`): they would mix models."""
    for name in DROPS_WEIGHTS.get(_kind(adapter), ()):
        if getattr(adapter, name, 0):
            yield f"{which} drops weights at random, and each rank would drop others: set its {name} to 0"


def _adapter_reasons(which: str, adapter: object) -> Iterator[str]:
    kind = _kind(adapter)
    if getattr(adapter, "is_prompt_learning", False):
        yield f"{which} ({kind}) prepends its prompt to every rank's tokens"
    elif kind not in EXACT:
        yield f"{which} ({kind}) {INEXACT.get(kind, 'was never tested in a ring')}"
    elif kind == "LORA":
        yield from (f"{which} {why}" for option, why in INEXACT_LORA.items() if getattr(adapter, option, None))


def _kind(adapter: object) -> str:
    peft_type = getattr(adapter, "peft_type", None)
    return str(getattr(peft_type, "value", peft_type))


@contextmanager
def without_penalty(model: nn.Module) -> Iterator[None]:
    """Inside, AdaLoRA adds no orthogonal regularization, as in a forward without labels."""
    with ExitStack() as stack:
        for _, adapter in latest_record(model).once(_adapters, model):
            if hasattr(adapter, "orth_reg_weight"):
                stack.enter_context(Replaced(adapter, "orth_reg_weight", 0.0))
        yield


def head_read_past_fsdp(model: nn.Module) -> bool:
    """Returns True if TRL's fused head, which reads the head's weight without calling it, would train it wrong.

    accelerate's FSDP2 makes each trained module of a PEFT model a separate unit. If its weight is gathered by hand,
    each rank has the gradient of its own tokens. In other models the norm before the head gathers both. This looks at
    units, not at the weight, which the self-check's forward may have gathered.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not any(map(introspect.is_unit, head.modules())):
        return False
    weight = getattr(head, "weight", None)
    trains = weight is not None and weight.requires_grad
    return trains and any(getattr(module, "peft_config", None) for module in model.modules())  # last: each step asks
