"""Weights that bitsandbytes has quantized: reasons against those whose arithmetic a ring or its self-check changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..context.batch_context import BatchContext
from ..context.introspect import modules_of


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the reasons why the quantized layers of ``model`` are not exact in a ring."""
    layer: Any
    for layer in modules_of(model) if context.ring.size > 1 else ():
        kinds = {kind.__name__ for kind in type(layer).__mro__}
        state = getattr(layer, "state", None)  # PEFT's layer of that name has none
        if "Linear8bitLt" in kinds and getattr(state, "threshold", 0.0) > 0:
            yield (
                "its 8-bit layers (LLM.int8) compute columns with outliers in 16 bits, chosen by the tokens of each "
                "rank: set llm_int8_threshold=0.0, or load_in_4bit=True"
            )
        if "Linear8bitLt" in kinds and type(layer._parameters.get("weight")).__name__ == "DTensor":
            yield "FSDP2 drops what bitsandbytes stores beside 8-bit weights: use DDP, or load_in_4bit=True"
        packs = "Linear4bit" in kinds and getattr(layer, "support_avx512bf16_for_cpu", False)
        if packs and layer.weight.device.type == "cpu":
            yield (
                "bitsandbytes packs its 4-bit weights at the first evaluation, here the self-check, for other "
                "arithmetic on this CPU: set support_avx512bf16_for_cpu=False on its Linear4bit layers"
            )
