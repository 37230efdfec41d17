"""Which adapters of PEFT a ring trains exactly: those that treat every token by itself, each measured (test_peft)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..context import introspect
from ..context.batch_context import BatchContext

EXACT = frozenset({
    "ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA",
    "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "RANDLORA", "ROAD", "SHIRA",
    "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT",
})  # fmt: skip
"""The names of PEFT's types whose loss and gradients on a ring's ranks are those of one process."""

INEXACT = {
    "ADALORA": "adds a penalty on its weights to every rank's loss, where trainers would count it once a rank",
    "LILY": "mixes its experts by the mean over the tokens of each rank",
    "POLY": "chooses its skills by task ids that are not sharded with the tokens",
    "PVERA": "draws other noise for the tokens of each rank than one process would",
    "SHADOW": "runs a second model, and adds its loss to every rank's loss",
    "XLORA": "runs the model a second time to mix its experts",
}
"""Why others are refused; a type that is in neither table was never measured."""

INEXACT_LORA = {
    "alora_invocation_tokens": "(aLoRA) looks for its invocation tokens in each rank's tokens alone",
    "arrow_config": "(Arrow) was never tested in a ring",
    "monteclora_config": "(MonteCLoRA) draws noise of its own on each rank, and needs a loss of its own",
    "velora_config": "(VeLoRA) compresses activations by an average over the tokens of each rank",
}
"""Options of `LoraConfig` that make another method of it."""


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Why the adapters of ``model``, active or not, cannot be trained in a ring exactly; nothing if they can."""
    for module in model.modules() if context.ring.size > 1 else ():
        adapters: Any = getattr(module, "peft_config", None)
        if adapters:
            for name, adapter in adapters.items():
                yield from _adapter_reasons(f"the PEFT adapter {name!r}", adapter)
            return


def _adapter_reasons(which: str, adapter: object) -> Iterator[str]:
    peft_type = getattr(adapter, "peft_type", None)
    kind = str(getattr(peft_type, "value", peft_type))
    if getattr(adapter, "is_prompt_learning", False):
        yield f"{which} ({kind}) prepends its prompt to every rank's tokens"
    elif kind not in EXACT:
        yield f"{which} ({kind}) {INEXACT.get(kind, 'was never tested in a ring')}"
    elif kind == "LORA":
        yield from (f"{which} {why}" for option, why in INEXACT_LORA.items() if getattr(adapter, option, None))


def head_read_past_fsdp(model: nn.Module) -> bool:
    """Whether reading the weight of ``model``'s head without calling it, as TRL's fused head does, trains it wrong.

    accelerate's FSDP2 makes each trained module of a PEFT model a unit of its own. Such a weight, gathered by hand,
    leaves each rank the gradient of its own tokens. In other models the norm before the head gathers it with itself.
    Asked of the units, not of the weight: that may be gathered for now, as after the self-check's forward.
    """
    if not any(getattr(module, "peft_config", None) for module in model.modules()):
        return False
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not any(map(introspect.is_unit, head.modules())):
        return False
    weight = getattr(head, "weight", None)
    return weight is not None and bool(weight.requires_grad)


def prepare(_model: nn.Module, _context: BatchContext) -> None:
    """Adapters need nothing."""
