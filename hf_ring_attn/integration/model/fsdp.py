"""FSDP2 in a ring: it must neither sum gradients nor return the loss in 16 bits, nor round the count of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..context.batch_context import BatchContext
from ..context.introspect import is_unit
from ..log import say

UNTESTED = {
    "FullyShardedDataParallel": "FSDP1 is not tested: use FSDP2 (fsdp_version: 2) or DDP",
    "DeepSpeedEngine": "DeepSpeed is not tested: use FSDP2 or DDP",
}
HALVES = (torch.bfloat16, torch.float16)


def keep_float32(accelerator: Any) -> None:
    """Call it before the model is sharded, where there is a ring; it changes nothing but accelerate's own default.

    For mixed_precision "bf16" accelerate makes FSDP2's policy of one dtype: parameters are computed with in it, each
    rank's gradients are rounded to it and summed in it, and what the model returns is rounded to it, the loss too
    (5.5476 becomes 5.5469). Every rank of a ring has a share of the same row's gradient, so rounded sums would differ
    by ring size. Here gradients are reduced in float32, and outputs keep their dtype, as under DDP. A policy of several
    dtypes is a choice that somebody made, and stays.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if policy is None or not accelerator.is_fsdp2 or policy.param_dtype not in HALVES:
        return
    if policy.param_dtype == policy.reduce_dtype == policy.output_dtype:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)
        half = str(policy.param_dtype).removeprefix("torch.")
        say(f"FSDP2 sums gradients in float32, not {half}, and returns the loss unrounded (mixed_precision_policy)")


def uncast(count: Any, model: nn.Module | None) -> Any:
    """The number by which ``model`` divides its loss, as what FSDP2 hands on as it is; None: a model not known yet.

    In 16 bits FSDP2 casts every floating tensor that a model is called with (``cast_forward_inputs``, which
    inputs_embeds and pixels need): of 1250 tokens it makes 1248 in bfloat16, of 131071 infinity in float16. A Python
    number passes. Other models keep the tensor: a number costs one more graph where a whole model is compiled.
    """
    if not isinstance(count, Tensor):
        return count
    return count.item() if model is None or is_sharded(model) else count


def is_sharded(model: nn.Module) -> bool:
    """Returns True if `fully_shard` was called on ``model`` or on a part of it."""
    return any(map(is_unit, model.modules()))


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    kinds = {type(module).__name__ for module in model.modules()} if context.ring.size > 1 else set()
    yield from (UNTESTED[kind] for kind in sorted(kinds & UNTESTED.keys()))


def prepare(_model: nn.Module, _context: BatchContext) -> None:
    """Wrappers need nothing here: accelerate's policy is set before it shards a model (`keep_float32`)."""
