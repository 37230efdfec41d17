"""The functions by which transformers' layers look along the sequence, and their replacements in a ring.

They have the same names and parameters in the file of every model. An unknown function leaves its model refused; a new
recurrence is a row of `OPERATIONS`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ... import errors
from ...layers.halo import RowShare, compute_with_halo
from ...layers.head_parallel import compute_by_heads
from ...traffic.gathered_kv import number_of_backward
from ..context.introspect import by_name
from ..patching.compiler import uncompiled

CONVOLUTION = "causal_conv1d_fn"
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""A whole layer in one call of an installed package; a result of None makes the layer use the other functions."""
DECODING = (
    "causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update", "mamba_selective_state_update",
)  # fmt: skip
"""Functions that compute one more token, with a cache."""
BY_HOST = "hf_ring_attn exchanges tokens and heads here, which is not compiled"


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
}


def known(file: dict[str, Any], name: str) -> bool:
    """Returns True if a file has this function, with the needed parameters."""
    function = file.get(name)
    if not callable(function):
        return False
    given = set(_parameters(function))
    scan = OPERATIONS.get(name)
    if scan is None:
        return {"weight", "bias", "activation"} <= given
    return {*scan.heads, *scan.shared, *scan.weights, *scan.states} - {"z"} <= given


def _parameters(function: Any) -> list[str]:
    """The names of a function's parameters; with the package kernels it is a module."""
    function = inspect.unwrap(function)
    return list(inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters)


def replaceable(function: Any) -> bool:
    """Returns True if transformers lets packages replace a function, as all that look along the sequence."""
    return isinstance(function, nn.Module) or hasattr(function, "__wrapped__")


class RunningLayers(list[tuple[nn.Module, RowShare | None, int]]):
    """The layers that run now, the innermost last: each with its rows (None outside a sharded batch) and its backward.

    After Ctrl-C torch calls no hook at a layer's end. Of a forward the batch's context clears what is left, and what is
    left of a backward does not count after it.
    """

    def enter(self, module: nn.Module, rows: RowShare | None) -> None:
        """Adds a layer that begins."""
        self.append((module, rows, number_of_backward()))

    def leave(self, module: nn.Module) -> None:
        """Removes a layer that ends, if it was added: it may have been refused before."""
        if self and self[-1][0] is module:
            self.pop()

    @property
    def rows(self) -> RowShare | None:
        """The rows of the innermost layer; None if no layer runs."""
        return self[-1][1] if self and self[-1][2] == number_of_backward() else None


RUNNING = RunningLayers()
"""Those whose functions are replaced."""


def _fused(original: Callable[..., Any]) -> Any:
    @uncompiled(BY_HOST)
    def no_shortcut(*args: Any, **kwargs: Any) -> Any:
        return None if RUNNING.rows is not None else original(*args, **kwargs)

    return no_shortcut


def _convolution(original: Callable[..., Any]) -> Any:
    @uncompiled(BY_HOST)
    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **kwargs: Any
    ) -> Tensor:
        if (rows := RUNNING.rows) is None:
            out: Tensor = original(hidden_states, weight, bias, activation=activation, **kwargs)
            return out

        def compute(x: Tensor) -> Tensor:
            found: Tensor = original(x.transpose(1, 2), weight, bias, activation=activation)
            return found.transpose(1, 2)

        return compute_with_halo(hidden_states.transpose(1, 2), rows, weight.shape[-1] - 1, compute).transpose(1, 2)

    return causal_conv1d_fn


def _scan(name: str, original: Callable[..., Any]) -> Any:
    scan, parameters = OPERATIONS[name], _parameters(original)

    @uncompiled(BY_HOST)
    def scanned(*args: Any, **kwargs: Any) -> Any:
        if (rows := RUNNING.rows) is None:
            return original(*args, **kwargs)
        given = by_name(parameters, args, kwargs)
        for state in scan.states:
            if given.get(state) is not None and given[state] is not False:
                raise errors.UnsupportedArgument(name, state, "a state would be one rank's", "was called with")
        heads, shared, weights = (
            {at: given[at] for at in names if given.get(at) is not None}
            for names in (scan.heads, scan.shared, scan.weights)
        )
        # No other tensors: packages read documents from the model's inputs, and here each document is computed alone.
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

        out = compute_by_heads(
            rows,
            [x.transpose(1, 2) if scan.by_channels else x for x in heads.values()],
            [x.transpose(1, 2).unsqueeze(2) if scan.by_channels else x for x in shared.values()],
            list(weights.values()),
            compute,
        )
        out = out.transpose(1, 2) if scan.by_channels else out
        return (out, None) if scan.pair else out

    return scanned


MAKERS: dict[str, Callable[[Any], Any]] = {
    CONVOLUTION: _convolution,
    **dict.fromkeys(FUSED, _fused),
    **{name: functools.partial(_scan, name) for name in OPERATIONS},
}
"""Makers of replacements, by the name of the function in a model's file."""
