"""Hybrid models: layers that carry state along the sequence, or mix neighbouring tokens, exact in a ring.

transformers computes them by a few functions of each model's file, under the same names everywhere (and those take
flash-linear-attention, mamba-ssm or causal-conv1d where installed). `OPERATIONS` says of each which arguments have an
entry per token and which per head; what it is given then goes through
`sequence` or `by_heads`. All else in such a layer is of one
token. What a layer needs to know hangs on its padding mask, which reaches it in a checkpoint's recompute too.
"""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import errors
from ..by_heads import by_heads
from ..sequence import Rows, along
from . import active
from .patches import Patch, install, on_uninstall, render

LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mlp", "moe"}
"""Types of layers that hybrids have beside attention."""
CONVOLUTION = "causal_conv1d_fn"
MASK = "create_recurrent_attention_mask"
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""A whole layer at once, where a package is installed; None where it is not, and the layer goes the long way."""
_MARK = "_hf_ring_attn_hybrid"
_RAN = "_hf_ring_attn_hybrid_ran"
_BY_HOST = "hf_ring_attn exchanges tokens and heads here, which is not compiled"


@dataclass(frozen=True)
class Scan:
    """A recurrence along the sequence, each head for itself.

    Args:
        heads: arguments [B, T, H, ...]; the first is always given. shared: [B, T, G, ...], each for H / G heads.
        weights: [H, ...], without tokens.
        states: arguments that a cache would need.
        by_channels: each channel is a head: [B, C, T], and what is shared is [B, N, T], for all of them.
        pair: it returns its output and a state, not the output alone.
    """

    heads: tuple[str, ...]
    shared: tuple[str, ...]
    weights: tuple[str, ...]
    states: tuple[str, ...]
    by_channels: bool = False
    pair: bool = False


_DELTA = Scan(("value", "g", "beta"), ("query", "key"), (), ("initial_state", "output_final_state"), pair=True)
OPERATIONS = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Scan(
        ("hidden_states", "dt", "z"), ("B", "C"), ("A", "D", "dt_bias"), ("initial_states", "return_final_states")
    ),
    "mamba_selective_scan": Scan(
        ("hidden_states", "dt", "z"), ("B", "C"), ("A", "D", "delta_bias"), ("return_last_state",), by_channels=True
    ),
}  # fmt: skip

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


def _known(file: dict[str, Any], name: str) -> bool:
    """Whether a file has this function, with the parameters that are needed here."""
    function = file.get(name)
    if not callable(function):
        return False
    given = set(_parameters(function))
    scan = OPERATIONS.get(name)
    if scan is None:
        return {"weight", "bias", "activation"} <= given
    return {*scan.heads, *scan.shared, *scan.weights, *scan.states} - {"z"} <= given


def _parameters(function: Any) -> list[str]:
    """The names of a function's parameters; where the package kernels is installed, it is a module."""
    function = inspect.unwrap(function)
    return list(inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters)


def mixers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of ``model`` that look along the sequence by functions known here alone, by name."""
    found = {}
    for name, module in model.named_modules():
        used = names_of(module) & {CONVOLUTION, *OPERATIONS}
        if used and (file := _forward(module).__globals__) and MASK in file and all(_known(file, x) for x in used):
            found[name] = module
    return found


_EXACT: dict[int, weakref.ref[Any]] = {}
"""Configs of models whose layers beside attention are all known, by their identity, as in `models`."""


def admit(configs: Collection[Any]) -> None:
    """Notes that a model with these configs was looked at, and that its layers beside attention are known."""
    for config in configs:
        _EXACT[id(config)] = weakref.ref(config)


def admitted(config: Any) -> bool:
    reference = _EXACT.get(id(config))
    return reference is not None and reference() is config


# ---- the changes to a model and its file -----------------------------------------------------------------------------

_MIXERS: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
"""Of each model, the layers that are known here."""


def prepare(model: nn.Module) -> None:
    """Hooks the layers of ``model`` that are known here, and changes the functions that they use. Idempotent; both do
    nothing outside a sharded batch, and are undone by `patches.uninstall`."""
    if model not in _MIXERS:
        _MIXERS[model] = weakref.WeakSet(mixers(model).values())
    new = [module for module in _MIXERS[model] if _MARK not in module.__dict__]
    for module in new:
        before = module.register_forward_pre_hook(_enter, with_kwargs=True)
        module.__dict__[_MARK] = (before, module.register_forward_hook(_leave, always_call=True))
        on_uninstall(functools.partial(_unhook, weakref.ref(module)))
    if new:
        files = {file["__name__"]: file for file in (_forward(module).__globals__ for module in new)}
        install(patch for name, file in files.items() for patch in _patches(name, file))


def _unhook(reference: weakref.ref[nn.Module]) -> None:
    if (module := reference()) is not None:
        module.__dict__.pop(_RAN, None)
        for handle in module.__dict__.pop(_MARK, ()):
            handle.remove()


def _patches(name: str, file: dict[str, Any]) -> Iterator[Patch]:
    makers: dict[str, Callable[[Any], Any]] = {MASK: _mask, CONVOLUTION: _convolution}
    makers |= dict.fromkeys(FUSED, _fused)
    makers |= {operation: functools.partial(_scan, operation) for operation in OPERATIONS}
    for function, make in makers.items():
        if function in file:
            yield Patch(f"{name}:{function}", render(file[function]), make)


_RUNNING: list[tuple[nn.Module, Rows | None]] = []
"""The layers that run now, the innermost last, with their rows; None outside a sharded batch."""


def _rows() -> Rows | None:
    return _RUNNING[-1][1] if _RUNNING else None


@torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = [*args, *kwargs.values()]
    rows: Rows | None = next((getattr(x, _MARK) for x in given if isinstance(x, Tensor) and hasattr(x, _MARK)), None)
    if rows is not None:
        module.__dict__[_RAN] = True
        if any(hasattr(x, "get_seq_length") for x in given):
            why = "its state would be one rank's; leave use_cache=False, as sharded.inputs has it"
            raise errors.UnsupportedArgument(type(module).__name__, "a cache", why, "was called with")
    # A recompute whose checkpoint copied the mask has lost what hung on it.
    elif _shared_scope() is not None or (_RAN in module.__dict__ and torch._C._current_graph_task_id() != -1):
        raise errors.RecurrentLayerWithoutMask(type(module).__name__)
    _RUNNING.append((module, rows))


@torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    if _RUNNING and _RUNNING[-1][0] is module:  # not after a refusal in _enter
        _RUNNING.pop()


def _shared_scope() -> active.Scope | None:
    """The sharded batch in which such layers need help: in a ring, or where a row holds several documents."""
    scope = active.current()
    if scope is None or scope.before_text or (scope.ring.size == 1 and scope.documents is None):
        return None
    return scope


# ---- the functions ---------------------------------------------------------------------------------------------------


def _mask(original: Callable[..., Any]) -> Any:
    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
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
        setattr(share, _MARK, Rows(scope.ring, scope.layout, scope.documents))
        return share

    return create_recurrent_attention_mask


def _fused(original: Callable[..., Any]) -> Any:
    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def no_shortcut(*args: Any, **kwargs: Any) -> Any:
        return None if _rows() is not None else original(*args, **kwargs)

    return no_shortcut


def _convolution(original: Callable[..., Any]) -> Any:
    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **kwargs: Any
    ) -> Tensor:
        if (rows := _rows()) is None:
            out: Tensor = original(hidden_states, weight, bias, activation=activation, **kwargs)
            return out

        def compute(x: Tensor) -> Tensor:
            found: Tensor = original(x.transpose(1, 2), weight, bias, activation=activation)
            return found.transpose(1, 2)

        return along(hidden_states.transpose(1, 2), rows, weight.shape[-1] - 1, compute).transpose(1, 2)

    return causal_conv1d_fn


def _scan(name: str, original: Callable[..., Any]) -> Any:
    scan, parameters = OPERATIONS[name], _parameters(original)

    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def scanned(*args: Any, **kwargs: Any) -> Any:
        if (rows := _rows()) is None:
            return original(*args, **kwargs)
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        for state in scan.states:
            if given.get(state) is not None and given[state] is not False:
                raise errors.UnsupportedArgument(name, state, "a state would be one rank's", "was called with")
        heads, shared, weights = (
            {at: given[at] for at in names if given.get(at) is not None}
            for names in (scan.heads, scan.shared, scan.weights)
        )
        # Tensors of other names are inputs of the model that come this far. Packages take none of them but documents
        # (cu_seqlens, seq_idx), which are computed one by one here.
        others = {at: x for at, x in kwargs.items() if not isinstance(x, Tensor)}

        def compute(a: list[Tensor], b: list[Tensor], c: list[Tensor]) -> Tensor:
            if scan.by_channels:
                a, b = [x.transpose(1, 2) for x in a], [x.squeeze(2).transpose(1, 2) for x in b]
            mine = dict(zip([*heads, *shared, *weights], [*a, *b, *c], strict=True))
            out = original(
                *(mine.get(at, x) for at, x in zip(parameters, args, strict=False)),
                **{**others, **{at: x for at, x in mine.items() if at in kwargs}},
            )
            found: Tensor = out[0] if scan.pair else out
            return found.transpose(1, 2) if scan.by_channels else found

        out = by_heads(
            rows,
            [x.transpose(1, 2) if scan.by_channels else x for x in heads.values()],
            [x.transpose(1, 2).unsqueeze(2) if scan.by_channels else x for x in shared.values()],
            list(weights.values()),
            compute,
        )
        out = out.transpose(1, 2) if scan.by_channels else out
        return (out, None) if scan.pair else out

    return scanned
