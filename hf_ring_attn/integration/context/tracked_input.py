"""Inputs of a sharded batch, recognized when a model is called with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TrackedInput:
    """An input of a sharded batch, and its version counter when the batch was made."""

    value: Any
    version: int

    def is_(self, other: Any) -> bool | None:
        """Compares identity, without reading values; None: only values can decide, as for a copy."""
        mine = self.value
        if isinstance(mine, Tensor) or isinstance(other, Tensor):
            return self.version == _version(mine) if self.same_memory(other) else None
        return bool(mine == other)

    def same_memory(self, other: Any) -> bool:
        """Returns True if ``other`` is this tensor or a view of all of it, such as detach() returns."""
        mine = self.value
        if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
            return False
        return mine is other or _facts(mine) == _facts(other)

    def equals(self, other: Any) -> bool:
        """Compares values. Synchronizes if they are on a GPU."""
        mine, other = torch.as_tensor(self.value), torch.as_tensor(other)
        unwritten = self.version == _version(self.value)
        return unwritten and mine.shape == other.shape and torch.equal(mine, other.to(mine.device, mine.dtype))


def _version(x: Any) -> int:
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def _facts(x: Tensor) -> tuple[Any, ...]:
    return x.device, x.dtype, x.shape, x.stride(), x.data_ptr()


def track(inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, TrackedInput]:
    """Tracks the inputs that a model must get unchanged."""
    return {name: TrackedInput(inputs[name], _version(inputs[name])) for name in names if name in inputs}


class TrackedInputs(dict[str, TrackedInput]):
    """The inputs of one batch that a model must get unchanged, by name."""
