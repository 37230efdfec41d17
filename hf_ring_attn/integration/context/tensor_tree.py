"""Tensors in nested containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings, tuples and lists, by their path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_of(part, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from tensors_of(part, f"{name}.{index}")
