"""Weights put in place of a module's own for a call: leaves of a gradient, or those of an earlier forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

Slot = tuple[nn.Module, str]
"""A module, and the name of a parameter in it."""


def slots_of(module: nn.Module) -> Iterator[tuple[Slot, Any]]:
    """The slots of a module and of its parts, each with its weight; a tied one occurs several times."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                yield (part, name), weight


@contextmanager
def with_weights(slots: Sequence[Slot], weights: Sequence[Any]) -> Iterator[None]:
    """Puts ``weights``, which need not be parameters, into ``slots``; on exit puts the old ones back."""
    before = [part._parameters[name] for part, name in slots]
    try:
        _put(slots, weights)
        yield
    finally:
        _put(slots, before)


def _put(slots: Sequence[Slot], weights: Sequence[Any]) -> None:
    for (part, name), weight in zip(slots, weights, strict=True):
        part._parameters[name] = weight
