"""Hybrid models: layers that carry state along the sequence, or mix neighbouring tokens, exact in a ring.

transformers computes them by a few functions of each model's file, those of `operations`; all else in such a layer is
of one token. So a layer is known by what its forward calls. What it needs to know in a ring hangs on its padding mask,
which reaches it in a checkpoint's recompute too.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ...layers.halo import RowShare
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import configs_of, uses_interface
from ..context.model_record import latest_record
from ..patching.changes import Patch, install, render
from ..patching.hooks import attach
from .recurrent_ops import BY_HOST, CONVOLUTION, DECODING, FUSED, MAKERS, OPERATIONS, RUNNING, known, replaceable

LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mlp", "moe"}
"""Types of layers that hybrids have beside attention."""
NORM = re.compile(r"Norm(Gated)?$")
STATEFUL = re.compile(r"Mamba|Rwkv|Recurrent|GatedDelta|ShortConv|LinearAttention|LightningAttention|xLSTM")
MASK = "create_recurrent_attention_mask"
_MARK = "_hf_ring_attn_hybrid"
_RAN = "_hf_ring_attn_hybrid_ran"


# ---- which layers ----------------------------------------------------------------------------------------------------


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


@functools.cache
def _names(code: Any) -> frozenset[str]:
    """The names that a function looks up in its file."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")


def names_of(module: nn.Module) -> frozenset[str]:
    """The names that a module's forward looks up in its file."""
    code = getattr(_forward(module), "__code__", None)
    return frozenset() if code is None else _names(code)


def _takes_mask(module: nn.Module) -> bool:
    return "attention_mask" in inspect.signature(_forward(module)).parameters


def recurrent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of ``model`` that look along the sequence by functions known here alone, by name."""
    found = {}
    for name, module in model.named_modules():
        names = names_of(module)
        if not (used := names & {CONVOLUTION, *OPERATIONS}):
            continue
        file = _forward(module).__globals__
        others = names - used - {*FUSED, *DECODING}
        told = MASK in file or ("ALL_ATTENTION_FUNCTIONS" not in file and _takes_mask(module))
        if told and all(known(file, x) for x in used) and not any(replaceable(file.get(x)) for x in others):
            found[name] = module
    return found


@dataclass
class Recurrent:
    """The recurrent layers of one model.

    Args:
        layers: those that are known here, by name.
        unknown: the path of the first module that carries state in another way; None if there is none.
        attends: False where all layers of the model are recurrences that are known here.
    """

    layers: dict[str, weakref.ref[nn.Module]] = field(default_factory=dict)
    unknown: str | None = None
    attends: bool = True
    found: bool = False


def recurrent_of(model: nn.Module) -> Recurrent:
    """The recurrent layers of ``model``, looked for once for each of its structures."""
    known = latest_record(model).state(Recurrent)
    if not known.found:
        layers = recurrent_layers(model)
        known.layers = {name: weakref.ref(module) for name, module in layers.items()}
        known.unknown = _unknown(model, layers)
        alone = len(layers) > 0 and known.unknown is None and not uses_interface(model)
        known.attends = not (alone and _without_attention(list(configs_of(model))))
        known.found = True
    return known


def _unknown(model: nn.Module, layers: Mapping[str, nn.Module]) -> str | None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if not STATEFUL.search(kind) or NORM.search(kind) or any(name.startswith(f"{layer}.") for layer in layers):
            continue
        holds = any(inner is layer for layer in layers.values() for inner in module.modules())
        if not holds and not (layers and "ALL_ATTENTION_FUNCTIONS" in names_of(module)):
            return str(name)
    return None


def _without_attention(configs: Collection[Any]) -> bool:
    """Returns True if models with these configs say of all their layers that none attends, as Mamba does."""
    types = [set(getattr(config, "layer_types", None) or ()) for config in configs]
    return any(types) and all(kinds <= {"linear_attention", "mamba"} for kinds in types)


# ---- the changes to a model and its file -----------------------------------------------------------------------------


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    name = recurrent_of(model).unknown
    if name is None:
        return
    where = f"{name or 'it'} ({type(model.get_submodule(name)).__name__})"
    if context.ring.size > 1:
        yield f"{where} carries state along the sequence"
    elif context.facts.documents is not None:
        yield f"{where} carries state from one document of a packed row to the next"


def prepare(model: nn.Module, _context: BatchContext) -> None:
    """Hooks the layers of ``model`` that are known here, and changes the functions that they use."""
    layers = [layer for reference in recurrent_of(model).layers.values() if (layer := reference()) is not None]
    files = {file["__name__"]: file for file in (_forward(module).__globals__ for module in layers)}
    install([patch for name, file in files.items() for patch in _patches(name, file)])
    for module in layers:
        attach(module, "recurrent layer", _enter, _leave)


def _patches(name: str, file: dict[str, Any]) -> Iterator[Patch]:
    for function, make in {MASK: _mask, **MAKERS}.items():
        if function in file:
            yield Patch(f"{name}:{function}", render(file[function]), functools.partial(_marked, make))


def _marked(make: Callable[[Any], Any], original: Any) -> Any:
    made = make(original)
    setattr(made, _MARK, True)
    return made


def _replaced(module: nn.Module) -> str | None:
    """The first function of the layer's file that somebody has replaced since it was changed here; None if none."""
    file = _forward(module).__globals__
    used = sorted(names_of(module) & {CONVOLUTION, *FUSED, *OPERATIONS})
    return next((name for name in used if not hasattr(file.get(name), _MARK)), None)


@torch.compiler.disable(reason=BY_HOST)  # type: ignore[untyped-decorator]
def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given, recomputed = [*args, *kwargs.values()], torch._C._current_graph_task_id() != -1
    if (context := _shared_scope()) is not None and MASK not in _forward(module).__globals__ and not recomputed:
        _tell(given, context)
    rows: RowShare | None = next(
        (getattr(x, _MARK) for x in given if isinstance(x, Tensor) and hasattr(x, _MARK)), None
    )
    if rows is not None:
        module.__dict__[_RAN] = True
        if any(hasattr(x, "get_seq_length") for x in given):
            why = "its state would be one rank's; leave use_cache=False, as sharded.inputs has it"
            raise errors.UnsupportedArgument(type(module).__name__, "a cache", why, "was called with")
        if (name := _replaced(module)) is not None:
            why = f"{name} of its file was replaced after hf_ring_attn had changed it: replace it before"
            raise errors.UnsupportedModel(type(module).__name__, [why])
    # A recompute whose checkpoint copied the mask has lost what hung on it.
    elif context is not None or (_RAN in module.__dict__ and recomputed):
        raise errors.RecurrentLayerWithoutMask(type(module).__name__)
    RUNNING.append((module, rows))


def _tell(given: list[Any], context: batch_context.BatchContext) -> None:
    """Of a model without attention, whose layers are given this rank's share of the padding mask as it came."""
    share = (context.facts.rows, context.layout.local_length)
    mask = next((x for x in given if isinstance(x, Tensor) and tuple(x.shape) == share), None)
    if mask is not None:
        setattr(mask, _MARK, RowShare(context.ring, context.layout, context.facts.documents))


@torch.compiler.disable(reason=BY_HOST)  # type: ignore[untyped-decorator]
def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    if RUNNING and RUNNING[-1][0] is module:  # not after a refusal in _enter
        RUNNING.pop()


def _shared_scope() -> batch_context.BatchContext | None:
    """The sharded batch in which such layers need help: in a ring, or where a row holds several documents."""
    context = batch_context.current()
    if context is None or context.before_text or (context.ring.size == 1 and context.facts.documents is None):
        return None
    return context


def _mask(original: Callable[..., Any]) -> Any:
    @torch.compiler.disable(reason=BY_HOST)  # type: ignore[untyped-decorator]
    def create_recurrent_attention_mask(
        config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """This rank's share of the padding mask, with what the layers that get it need to know hung on it."""
        context = _shared_scope()
        if context is None:
            mask: Tensor | None = original(config, inputs_embeds, attention_mask, *args, **kwargs)
            return mask
        rows, length = inputs_embeds.shape[:2]
        if length != context.layout.local_length:
            raise errors.UnshardedInput(length, length, context.layout.local_length, context.layout.length)
        real = (
            torch.ones(rows, context.layout.padded)
            if context.facts.hidden is None
            else context.facts.hidden.logical_not()
        )
        share = context.layout.shard(real, 1).to(inputs_embeds.device, torch.int64)
        setattr(share, _MARK, RowShare(context.ring, context.layout, context.facts.documents))
        return share

    return create_recurrent_attention_mask
