"""Layers that look along the sequence in a way that is not known: each rank computes them on whole documents.

They are exact by construction. The masks of a batch carry its rows (`recurrent_rows`): a layer gets one, or the layer
around it does. Attention and MLPs beside them stay shared.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ... import errors
from ...layers.halo import RowShare
from ...layers.whole_documents import compute_on_whole_documents
from ...traffic.gathered_kv import is_recomputing
from ..context.batch_context import BatchContext
from ..context.introspect import class_of, inner_text_model, text_modules
from ..context.tensor_tree import tensors_of
from ..log import warn
from ..patching.compiler import uncompiled
from ..patching.modules import OwnForward, attach, replace
from .recurrent_ops import BY_HOST
from .recurrent_rows import MASK, refuse_cache, rows_in, rows_of_batch

TOKENWISE = re.compile(r"(Norm(Gated)?|M[Ll][Pp]|Embedding)$")
STATEFUL = re.compile(r"Mamba|Rwkv|Recurrent|GatedDelta|ShortConv|LinearAttention|LightningAttention|xLSTM")
HOLDERS = (PreTrainedModel, GradientCheckpointingLayer, nn.ModuleList, nn.ModuleDict)
"""Models and layers, whose MLPs stay shared, and containers, which compute nothing."""
SHARED = "{}: ranks do not share the work of these layers. Each rank computes them on whole rows."
_RAN = "_hf_ring_attn_whole"
_AROUND: list[tuple[nn.Module, RowShare | None]] = []
"""The layers that run now and take a mask, the innermost last, with their rows; None outside a sharded batch."""


# ---- which layers ----------------------------------------------------------------------------------------------------


def forward_of(module: nn.Module) -> Any:
    """The forward of a module's class, inside its wrappers."""
    return inspect.unwrap(type(module).forward)


@functools.cache
def _names(code: Any) -> frozenset[str]:
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")


def names_of(module: nn.Module) -> frozenset[str]:
    """The names that a module's forward looks up in its file."""
    code = getattr(forward_of(module), "__code__", None)
    return frozenset() if code is None else _names(code)


def carries_state(module: nn.Module) -> bool:
    """Returns True for a class that carries state along the sequence, by its name."""
    kind = type(module).__name__
    return bool(STATEFUL.search(kind)) and not TOKENWISE.search(kind)


def found(model: nn.Module, known: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The outermost modules that look along the sequence beside attention, without the ``known`` layers, by name."""
    text, layers = inner_text_model(model), {id(layer) for layer in known.values()}
    of_text = None if text is None else {id(module) for module in text.modules()}  # beside it are projectors of images
    whole: dict[str, nn.Module] = {}
    for name, module in text_modules(model):
        if any(f"{name}.".startswith(f"{outer}.") for outer in (*known, *whole)) or not _looks_along(module):
            continue
        inner = list(module.modules())
        attends = any("ALL_ATTENTION_FUNCTIONS" in names_of(x) for x in inner)
        holds = any(id(x) in layers or isinstance(x, HOLDERS) for x in inner)
        if not attends and not holds and (of_text is None or id(module) in of_text):
            whole[name] = module
    return whole


def _looks_along(module: nn.Module) -> bool:
    """Returns True for a recurrence, and for a module that has a convolution."""
    if isinstance(module, nn.RNNBase):
        return module.batch_first
    convolves = any(isinstance(x, nn.Conv1d) and x.kernel_size != (1,) for x in module.modules() if x is not module)
    return convolves or carries_state(module)


def gets_rows(module: nn.Module) -> bool:
    """Returns True for a layer that is sure to get rows: by the mask that transformers makes for recurrent layers."""
    return MASK in getattr(forward_of(module), "__globals__", {}) and _takes_mask(module)


def _takes_mask(module: nn.Module) -> bool:
    if isinstance(module, PreTrainedModel):  # it makes the mask
        return False
    return any(name.endswith("_mask") for name in inspect.signature(forward_of(module)).parameters)


# ---- what they compute -----------------------------------------------------------------------------------------------


def prepare(model: nn.Module, whole: Mapping[str, weakref.ref[nn.Module]], context: BatchContext) -> None:
    """Replaces the forwards of ``whole`` layers of ``model``; without effect outside of sharded batches."""
    kinds = set()
    for name, reference in whole.items():
        if (module := reference()) is None:
            continue
        kinds.add(class_of(module))
        if not isinstance(module.__dict__.get("forward"), _OnWholeDocuments):  # a program may have set its own since
            replace(module, "forward", _OnWholeDocuments(module))
        for layer in _around(model, name):
            attach(layer, "layer around whole layers", _enter, _leave)
    if kinds and context.ring.size > 1:
        warn(SHARED.format(", ".join(sorted(kinds))), everywhere=False)


def _around(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The innermost module around a layer that takes a mask."""
    while name:
        name = name.rpartition(".")[0]
        if _takes_mask(outer := model.get_submodule(name)):
            yield outer
            return


@uncompiled(BY_HOST)
def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _AROUND.append((module, rows_in([*args, *kwargs.values()])))


@uncompiled(BY_HOST)
def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    if _AROUND and _AROUND[-1][0] is module:
        _AROUND.pop()


class _OnWholeDocuments(OwnForward):
    """A layer's forward in a sharded batch."""

    @uncompiled(BY_HOST)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, own, recomputed = [*args, *kwargs.values()], self.module.__dict__, is_recomputing()
        rows = rows_in(given) or (_AROUND[-1][1] if _AROUND else None) or (None if recomputed else rows_of_batch())
        if rows is None:
            if _RAN in own and recomputed:
                raise errors.RecurrentLayerWithoutMask(type(self.module).__name__)
            return self.forward(*args, **kwargs)
        own[_RAN] = True
        refuse_cache(type(self.module).__name__, given)
        tokens = {id(x): x for _, x in tensors_of((args, kwargs)) if _is_of_tokens(x, rows)}

        def compute(whole: list[Tensor]) -> Any:
            with_args, with_kwargs = _replaced((args, kwargs), dict(zip(tokens, whole, strict=True)))
            return self.forward(*with_args, **with_kwargs)

        return compute_on_whole_documents(rows, [*tokens.values()], compute) if tokens else compute([])


def _is_of_tokens(x: Tensor, rows: RowShare) -> bool:
    return x.dim() > 1 and x.shape[0] in (1, rows.count) and x.shape[1] == rows.layout.local_length


def _replaced(value: Any, by: dict[int, Tensor]) -> Any:
    """The same arguments with other tensors."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if isinstance(value, dict):
        return {name: _replaced(part, by) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replaced(part, by) for part in value)
    return value
