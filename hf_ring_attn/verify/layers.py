"""Each decoder layer by itself: in the ring it gets the very input that it had alone, so its error is its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..integration.model.decoder import decoder_layers, layer_kinds
from ..testing import relative_error
from .runs import Batch, sharded_unchecked


class Layer(NamedTuple):
    """A decoder layer. ``kind``: as transformers' configs name it."""

    name: str
    kind: str
    module: nn.Module


class Passed(NamedTuple):
    """Hidden states [B, S, D] that went into a layer, and came out of it."""

    entered: Tensor
    left: Tensor


def layers_of(model: nn.Module) -> list[Layer]:
    """The decoder layers, or [] for a model whose layers are not in one list."""
    outer: Any = model
    found = decoder_layers(model)
    if found is None:
        return []
    kinds = layer_kinds(outer.config)
    return [Layer(f"{found[0]}.{at}", kinds[at], layer) for at, layer in enumerate(found[1])]


@torch.no_grad()
def record_alone(model: nn.Module, layers: list[Layer], batch: Batch) -> dict[str, Passed]:
    """Inputs and outputs of each layer without a ring; layers with other inputs than [B, S, D] are left out."""
    shape, found = batch["input_ids"].shape, {}
    entered: dict[str, Tensor] = {}

    def before(layer: Layer, args: Any, kwargs: Any) -> None:
        hidden = _hidden(args, kwargs)
        if hidden is not None and hidden.shape[:2] == shape:
            entered[layer.name] = hidden.clone()

    def after(layer: Layer, output: Any) -> None:
        left = output[0] if isinstance(output, tuple) else output
        if layer.name in entered and isinstance(left, Tensor) and left.shape == entered[layer.name].shape:
            found[layer.name] = Passed(entered[layer.name], left.clone())

    with _hooks(layers, before, after):
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    return found


@torch.no_grad()
def errors_in_ring(model: nn.Module, layers: list[Layer], batch: Batch, alone: dict[str, Passed]) -> dict[str, float]:
    """The relative error of each layer's output in a ring, given its input alone; the same on every rank."""
    sharded = sharded_unchecked(batch)
    length, found = batch["input_ids"].shape[1], {}
    here = sharded.positions.to(batch["input_ids"].device)
    here = here.where(here < length, 0)  # padding: any token will do

    def before(layer: Layer, args: Any, kwargs: Any) -> Any:
        if layer.name not in alone:
            return None
        share = alone[layer.name].entered.index_select(1, here)
        return (args, {**kwargs, "hidden_states": share}) if "hidden_states" in kwargs else ((share, *args[1:]), kwargs)

    def after(layer: Layer, output: Any) -> None:
        if layer.name in alone:
            left = output[0] if isinstance(output, tuple) else output
            found[layer.name] = relative_error(sharded.gather(left), alone[layer.name].left)

    with _hooks(layers, before, after), sharded:
        model(**sharded.inputs)
    return found


def _hidden(args: Any, kwargs: Any) -> Tensor | None:
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    return hidden if isinstance(hidden, Tensor) and hidden.dim() == 3 else None


@contextmanager
def _hooks(layers: list[Layer], before: Any, after: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in layers:
            first = layer.module.register_forward_pre_hook(
                lambda _module, args, kwargs, layer=layer: before(layer, args, kwargs), with_kwargs=True
            )
            last = layer.module.register_forward_hook(lambda _module, _args, output, layer=layer: after(layer, output))
            stack.enter_context(first)
            stack.enter_context(last)
        yield
