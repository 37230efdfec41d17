"""FSDP2 in a ring: wraps the layers that a model has; keeps sums of gradients, losses and counts out of 16 bits."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ... import errors
from ...dtypes import HALVES
from ..context import introspect
from ..context.batch_context import BatchContext
from ..context.model_record import latest_record
from ..context.references import alive
from ..log import say, warn
from ..patching import optimizer_steps
from ..patching.changes import at_uninstall
from ..patching.modules import Replaced
from .fsdp_units import groups_of


def keep_float32(accelerator: Any) -> None:
    """Changes accelerate's default policy so that gradients are reduced in float32, and outputs keep their dtype.

    Call it before the model is sharded. For mixed_precision "bf16" accelerate's policy has one dtype, in which each
    rank's gradients are summed and to which outputs are rounded, the loss too (5.5476 becomes 5.5469). Ranks of a ring
    have shares of one row's gradient, so rounded sums would depend on the ring. A policy of several dtypes stays.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if policy is None or not accelerator.is_fsdp2 or policy.param_dtype not in HALVES:
        return
    if policy.param_dtype == policy.reduce_dtype == policy.output_dtype:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)
        half = str(policy.param_dtype).removeprefix("torch.")
        say(f"FSDP2 sums gradients in float32, not {half}, and returns the loss unrounded (mixed_precision_policy)")


@contextmanager
def wrapping_layers_it_has(models: Iterable[nn.Module]) -> Iterator[None]:
    """Hides from accelerate the names of layers that ``models`` do not have, while inside.

    The text model of Qwen3.5 or of Gemma 4 names layers of its family's vision model, too (`_no_split_modules`), and
    accelerate's wrap policy of FSDP2 refuses a name that it does not find.
    """
    with ExitStack() as names:
        for model in models:
            named = getattr(model, "_no_split_modules", None) or ()
            classes = {type(module).__name__ for module in model.modules()}
            if 0 < len(found := [name for name in named if name in classes]) < len(named):
                names.enter_context(Replaced(model, "_no_split_modules", found))
        yield


def ties(model: nn.Module) -> set[frozenset[str]]:
    """The names of weights that are one parameter, without those of wrappers."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(_WRAPPERS.sub("", name))
    return {frozenset(each) for each in names.values() if len(each) > 1}


def refuse_new_ties(model: nn.Module, before: set[frozenset[str]]) -> None:
    """Refuses a model whose weights were tied while accelerate sharded it.

    Its FSDP2 calls `tie_weights`, which ties a head also to the copy of the embeddings that PEFT trains in their place.

    Raises:
        TiedByFsdp: weights are one parameter that were not in ``before`` (as of `ties`).
    """
    new = [tie for tie in ties(model) if not any(tie <= other for other in before)]
    if new:
        raise errors.TiedByFsdp(introspect.name_of(model), min(sorted(tie) for tie in new))


_WRAPPERS = re.compile(r"^module\.|_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")


def check_optimizer(accelerator: Any, prepared: object) -> None:
    """Checks what accelerate prepared if it is an optimizer of weights that FSDP2 shards.

    Warns of torchao's if its checkpoints would not load again.

    Raises:
        ShardedByFsdp: it is one of bitsandbytes.
    """
    optimizer = getattr(prepared, "optimizer", prepared)
    library = type(optimizer).__module__.partition(".")[0]
    if library not in ("bitsandbytes", "torchao") or not isinstance(optimizer, torch.optim.Optimizer):
        return
    if not any(map(introspect.is_dtensor, optimizer_steps.weights_of(optimizer))):
        return
    if library == "bitsandbytes":
        raise errors.ShardedByFsdp(type(optimizer).__name__)
    if "FULL_STATE_DICT" in str(accelerator.state.fsdp_plugin.state_dict_type):
        warn(NOT_LOADED, everywhere=False)


NOT_LOADED = (
    "torchao's optimizer under FSDP2: with fsdp_state_dict_type FULL_STATE_DICT its checkpoints are saved, but torch "
    "does not load their optimizer again. To resume, set SHARDED_STATE_DICT (Trainer then saves no whole model); to "
    "save the model alone, set save_only_model=True."
)


def uncast(count: Any, model: nn.Module) -> Any:
    """Returns a count of tokens in a form that FSDP2 does not round.

    In 16 bits FSDP2 casts every floating tensor among a model's inputs: 1250 tokens become 1248 in bfloat16, 131071
    infinity in float16. A Python number passes. Without FSDP2 a tensor saves a compiled model one graph.
    """
    return count.item() if isinstance(count, Tensor) and is_sharded(model) else count


def is_sharded(model: nn.Module) -> bool:
    """Returns True if `fully_shard` was called on ``model`` or on a part of it, as of its latest visit."""
    return "FSDPModule" in latest_record(model).classes


_TRAINED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that FSDP2 shards and that trained in a ring."""
at_uninstall(_TRAINED.clear)


def note_trained(model: nn.Module, context: BatchContext) -> None:
    """Notes a model that trains under FSDP2, whose steps are looked at."""
    if context.ring.size > 1 and torch.is_grad_enabled() and is_sharded(model):
        _TRAINED.add(model)
        optimizer_steps.call_before_each_step(_refuse_unreduced)


def _refuse_unreduced(optimizer: Optimizer) -> None:
    """Refuses a step that would leave out gradients which FSDP2 was told not to reduce yet.

    Raises:
        UnsupportedModel: on every rank.
    """
    theirs = {id(x) for x in optimizer_steps.weights_of(optimizer)}
    for model in list(_TRAINED):
        units = alive(latest_record(model).once(_units_of, model))
        for group in (group for unit in units for group in groups_of(unit)):
            mine = [weight for weight in group.fsdp_params if id(weight.sharded_param) in theirs]
            if mine and (getattr(group, "_partial_reduce_output", None) is not None or any(map(_is_unreduced, mine))):
                raise errors.UnsupportedModel(introspect.name_of(model), [_UNREDUCED])


def _units_of(model: nn.Module) -> list[weakref.ref[nn.Module]]:
    """The modules on which `fully_shard` was called."""
    return [weakref.ref(module) for module in model.modules() if introspect.is_unit(module)]


def _is_unreduced(weight: Any) -> bool:
    whole = getattr(weight, "_unsharded_param", None)
    return weight.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


_UNREDUCED = (
    "the last backward before its optimizer's step did not reduce gradients, which the step leaves out: call "
    "set_requires_gradient_sync(True), and set_requires_all_reduce(True), before that backward. In Trainer leave "
    "gradient_accumulation_steps as it is while it trains"
)
