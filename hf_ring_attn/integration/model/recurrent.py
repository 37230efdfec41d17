"""Hybrid models: layers that carry state along the sequence, or mix neighbouring tokens, exact in a ring.

transformers computes them by a few functions of each model's file, those of `operations`; all else in such a layer is
of one token. So a layer is known by what its forward calls. What it needs to know in a ring hangs on its padding mask,
which reaches it in a checkpoint's recompute too.
"""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import errors
from ...layers.halo import RowShare
from ..context import batch_context
from ..patching.changes import Patch, install, on_uninstall, render
from .recurrent_ops import BY_HOST, CONVOLUTION, DECODING, FUSED, MAKERS, OPERATIONS, RUNNING, known, replaceable

LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mlp", "moe"}
"""Types of layers that hybrids have beside attention."""
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


_EXACT = WeakIdKeyDictionary()
"""Configs of models whose layers beside attention are all known, by their identity, as in `models`."""


def admit(configs: Collection[Any]) -> None:
    """Notes that a model with these configs was looked at, and that its layers beside attention are known."""
    for config in configs:
        _EXACT[config] = True


def without_attention(configs: Collection[Any]) -> bool:
    """Whether models with these configs say of all their layers that none attends, as Mamba does."""
    types = [set(getattr(config, "layer_types", None) or ()) for config in configs]
    return any(types) and all(kinds <= {"linear_attention", "mamba"} for kinds in types)


def admitted(config: Any) -> bool:
    return config in _EXACT


# ---- the changes to a model and its file -----------------------------------------------------------------------------

_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.WeakSet[nn.Module], list[Patch]]] = (
    weakref.WeakKeyDictionary()
)
"""Of each model, the layers that are known here, and the changes to their files."""


def prepare(model: nn.Module) -> None:
    """Hooks the layers of ``model`` that are known here, and changes the functions that they use. Idempotent; both do
    nothing outside a sharded batch, and are undone by `patches.uninstall`."""
    if model not in _KNOWN:
        layers = weakref.WeakSet(recurrent_layers(model).values())
        files = {file["__name__"]: file for file in (_forward(module).__globals__ for module in layers)}
        _KNOWN[model] = layers, [patch for name, file in files.items() for patch in _patches(name, file)]
    layers, patches = _KNOWN[model]
    install(patches)
    for module in layers:
        if _MARK not in module.__dict__:
            before = module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.__dict__[_MARK] = (before, module.register_forward_hook(_leave, always_call=True))
        _HOOKED.add(module)  # also one that was copied together with its hooks
    if layers:
        on_uninstall(_unhook)


_HOOKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The layers of all models that have hooks."""


def _unhook() -> None:
    while _HOOKED:
        module = _HOOKED.pop()
        module.__dict__.pop(_RAN, None)
        for handle in module.__dict__.pop(_MARK, ()):
            handle.remove()


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
    if (scope := _shared_scope()) is not None and MASK not in _forward(module).__globals__ and not recomputed:
        _tell(given, scope)
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
    elif scope is not None or (_RAN in module.__dict__ and recomputed):
        raise errors.RecurrentLayerWithoutMask(type(module).__name__)
    RUNNING.append((module, rows))


def _tell(given: list[Any], scope: batch_context.Scope) -> None:
    """Of a model without attention, whose layers are given this rank's share of the padding mask as it came."""
    share = (scope.rows, scope.layout.local_length)
    mask = next((x for x in given if isinstance(x, Tensor) and tuple(x.shape) == share), None)
    if mask is not None:
        setattr(mask, _MARK, RowShare(scope.ring, scope.layout, scope.documents))


@torch.compiler.disable(reason=BY_HOST)  # type: ignore[untyped-decorator]
def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    if RUNNING and RUNNING[-1][0] is module:  # not after a refusal in _enter
        RUNNING.pop()


def _shared_scope() -> batch_context.Scope | None:
    """The sharded batch in which such layers need help: in a ring, or where a row holds several documents."""
    scope = batch_context.current()
    if scope is None or scope.before_text or (scope.ring.size == 1 and scope.documents is None):
        return None
    return scope


def _mask(original: Callable[..., Any]) -> Any:
    @torch.compiler.disable(reason=BY_HOST)  # type: ignore[untyped-decorator]
    def create_recurrent_attention_mask(
        config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """This rank's share of the padding mask, with what the layers that get it need to know hung on it."""
        scope = _shared_scope()
        if scope is None:
            mask: Tensor | None = original(config, inputs_embeds, attention_mask, *args, **kwargs)
            return mask
        rows, length = inputs_embeds.shape[:2]
        if length != scope.layout.local_length:
            raise errors.UnshardedInput(length, length, scope.layout.local_length, scope.layout.length)
        real = torch.ones(rows, scope.layout.padded) if scope.hidden is None else scope.hidden.logical_not()
        share = scope.layout.shard(real, 1).to(inputs_embeds.device, torch.int64)
        setattr(share, _MARK, RowShare(scope.ring, scope.layout, scope.documents))
        return share

    return create_recurrent_attention_mask
