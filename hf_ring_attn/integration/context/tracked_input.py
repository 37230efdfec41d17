"""An input of a sharded batch, to be recognized, unchanged, in a model's call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TrackedInput:
    """An input of a sharded batch, and its version counter when the batch was made."""

    value: Any
    version: int

    @classmethod
    def of(cls, value: Any) -> TrackedInput:
        return cls(value, version_of(value))

    def is_(self, other: Any) -> bool | None:
        """Compares identity, without reading values; None: a copy, perhaps."""
        mine = self.value
        if isinstance(mine, Tensor) or isinstance(other, Tensor):
            return self.version == version_of(mine) if self.same_memory(other) else None
        return bool(mine == other)

    def same_memory(self, other: Any) -> bool:
        """Returns True if ``other`` is this tensor or a view of all of it, such as detach() returns."""
        mine = self.value
        if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
            return False
        return mine is other or memory_of(mine) == memory_of(other)

    def equals(self, other: Any) -> bool:
        """Compares values. Synchronizes if they are on a GPU."""
        mine, other = torch.as_tensor(self.value), torch.as_tensor(other)
        unwritten = self.version == version_of(self.value)
        return unwritten and mine.shape == other.shape and torch.equal(mine, other.to(mine.device, mine.dtype))


def memory_of(x: Tensor) -> tuple[Any, ...]:
    """The memory of a tensor and how it is read, which are equal for a view of all of it."""
    return x.device, x.dtype, x.shape, x.stride(), x.data_ptr()


def version_of(x: Any) -> int:
    """A tensor's version counter; 0 for anything else, and for tensors of inference mode, which have none."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0
