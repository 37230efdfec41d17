"""Hybrid models: layers that carry state along the sequence, or mix neighbouring tokens, exact in a ring.

transformers computes most of them by a few functions of each model's file (`recurrent_ops`); the rest of such a layer
treats each token by itself. So the functions that its forward calls identify a layer. Others that get the padding mask
of recurrent layers run on whole documents (`whole_layers`). That mask carries the rows (`recurrent_rows`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ... import errors
from ...layers.halo import RowShare
from ...traffic.gathered_kv import is_recomputing
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import (
    configs_of,
    forward_of,
    globals_used,
    holds_attention,
    place_of,
    text_modules,
    uses_interface,
)
from ..context.model_record import latest_record
from ..context.references import alive
from ..patching.changes import Patch, install, is_patch, render
from ..patching.compiler import uncompiled
from ..patching.modules import attach
from . import whole_layers
from .recurrent_ops import BY_HOST, CONVOLUTION, DECODING, FUSED, MAKERS, OPERATIONS, RUNNING, known, replaceable
from .recurrent_rows import MASK, make_mask_function, note_given, refuse_cache, rows_given, rows_in, rows_of_batch
from .whole_layers import carries_state

_RAN = "_hf_ring_attn_hybrid_ran"


# ---- which layers ----------------------------------------------------------------------------------------------------


def recurrent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of ``model`` that look along the sequence by known functions only, by name; those of towers do not."""
    found = {}
    for name, module in text_modules(model):
        names = globals_used(module)
        if not (used := names & {CONVOLUTION, *OPERATIONS}):
            continue
        forward = forward_of(module)
        file, others = forward.__globals__, names - used - {*FUSED, *DECODING}
        takes_mask = "attention_mask" in inspect.signature(forward).parameters
        gets_mask = MASK in file or ("ALL_ATTENTION_FUNCTIONS" not in file and takes_mask)
        if gets_mask and all(known(file, x) for x in used) and not any(replaceable(file.get(x)) for x in others):
            found[name] = module
    return found


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers of one model.

    Args:
        layers: the known ones, by name.
        whole: others, by name, that run on whole documents.
        unsure: those of them that may get no rows. The self-check decides (`structure`).
        unknown: the paths of modules that carry state in another way, by the names of their classes.
        attends: False if all layers of the model are known recurrences.
    """

    layers: dict[str, weakref.ref[nn.Module]]
    whole: dict[str, weakref.ref[nn.Module]]
    unsure: list[str]
    unknown: list[str]
    attends: bool


def recurrent_of(model: nn.Module) -> Recurrent:
    """The recurrent layers of ``model``, found once for each structure."""
    return latest_record(model).once(_find, model)


def _find(model: nn.Module) -> Recurrent:
    layers = recurrent_layers(model)
    whole = whole_layers.find_whole_layers(model, layers)
    unknown = list(_unknown(model, {**layers, **whole}))
    types = [set(getattr(config, "layer_types", None) or ()) for config in configs_of(model)]
    no_attention = any(types) and all(kinds <= {"linear_attention", "mamba"} for kinds in types)  # as in Mamba
    attends = not (layers and not unknown and not uses_interface(model) and no_attention)
    unsure = [name for name, module in whole.items() if not whole_layers.gets_rows(module)]
    return Recurrent(_references(layers), _references(whole), unsure, unknown, attends)


def _references(layers: Mapping[str, nn.Module]) -> dict[str, weakref.ref[nn.Module]]:
    return {name: weakref.ref(layer) for name, layer in layers.items()}


def _unknown(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[str]:
    for name, module in text_modules(model):
        if not carries_state(module) or name in layers or any(name.startswith(f"{layer}.") for layer in layers):
            continue
        holds_known = any(part is layer for layer in layers.values() for part in module.modules())
        if not holds_known and not (layers and holds_attention(module)):
            yield str(name)


# ---- the changes to a model and its file -----------------------------------------------------------------------------


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the first layer that carries state in an unknown way, where no self-check decides on it (`structure`)."""
    name = next(iter(recurrent_of(model).unknown), None)
    if name is not None and context.ring.size == 1 and context.facts.documents is not None:
        yield f"{place_of(name, model.get_submodule(name))} carries state from one document of a packed row to the next"


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Hooks the known layers of ``model``, and patches the functions that they use."""
    found = recurrent_of(model)
    layers = alive(found.layers.values())
    sure = [module for module in alive(found.whole.values()) if whole_layers.gets_rows(module)]
    files = {file["__name__"]: file for file in (forward_of(module).__globals__ for module in (*layers, *sure))}
    install([patch for name, file in files.items() for patch in _patches(name, file)])
    for module in layers:
        attach(module, "recurrent layer", _enter, _leave)
    whole_layers.prepare(model, found.whole, context)


def _patches(name: str, file: dict[str, Any]) -> Iterator[Patch]:
    for function, make in {MASK: make_mask_function, **MAKERS}.items():
        if function in file:
            yield Patch(f"{name}:{function}", render(file[function]), make)


def _replaced(module: nn.Module) -> str | None:
    """The first function of the layer's file that was replaced after our patch; None if none was."""
    file = forward_of(module).__globals__
    used = sorted(globals_used(module) & {CONVOLUTION, *FUSED, *OPERATIONS})
    return next((name for name in used if not is_patch(file.get(name))), None)


@uncompiled(BY_HOST)
def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if whole_layers.WITHIN.depth:  # it is a part of a layer that gets whole documents
        RUNNING.enter(module, None)
        return
    given, recomputed, share = [*args, *kwargs.values()], is_recomputing(), rows_of_batch()
    rows = rows_in(given)
    if rows is None and recomputed:
        rows = rows_given(type(module).__name__, given)
    elif rows is None and share is not None:
        rows = _with_own_mask(given, share)
    if rows is not None:
        module.__dict__[_RAN] = True
        refuse_cache(type(module).__name__, given)
        if (name := _replaced(module)) is not None:
            why = f"{name} of its file was replaced after hf_ring_attn patched it: replace it before"
            raise errors.UnsupportedModel(type(module).__name__, [why])
    # A checkpoint that copied the mask lost its attribute.
    elif share is not None or (_RAN in module.__dict__ and recomputed):
        raise errors.RecurrentLayerWithoutMask(type(module).__name__)
    RUNNING.enter(module, rows)


def _with_own_mask(given: list[Any], share: RowShare) -> RowShare | None:
    """The rows of this batch, if a layer got this rank's share of the padding mask, but not by transformers' function:
    a model may have another tensor of it, or no such function, as those without attention."""
    context = batch_context.current()
    assert context is not None, "it has rows"
    mask = next((x for x in given if isinstance(x, Tensor) and x.shape == context.local_shape), None)
    if mask is None:
        return None
    note_given(mask, share)
    return share


@uncompiled(BY_HOST)
def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    RUNNING.leave(module)
