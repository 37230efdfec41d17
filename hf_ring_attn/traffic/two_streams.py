"""Two streams by turns, so that launches overlap where one ends and the next begins.

The blocks of a launch are seldom a multiple of a GPU's multiprocessors, and those of a causal chunk are of unequal
length: the last ones leave places idle, which the first ones of a launch on another stream fill. It also goes on while
one lane of a ring waits for its sums.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

StreamContext = AbstractContextManager[Any]
"""Entered while something is queued: sets the stream on which that is."""

CURRENT_STREAM: StreamContext = nullcontext()
"""The stream that is the current one anyway."""


class Abreast:
    """The current stream and another one by turns; as a context, the other one begins after what was queued before it,
    and what follows it begins after both.

    What is queued for a turn must need nothing of the other turns but what was queued before the context. Memory that
    is allocated in a turn may be the other stream's: nobody else may use it, even after the context, since the
    allocator hands it out again without waiting for him.

    Args:
        other: None: all turns are the current stream's.
    """

    def __init__(self, other: Any, device: torch.device) -> None:
        self._other = other
        self._device = device
        self._current: Any = None

    def __enter__(self) -> Abreast:
        if self._other is not None:
            self._current = torch.cuda.current_stream(self._device)
            self._other.wait_stream(self._current)
        return self

    def __exit__(self, *_: object) -> None:
        if self._other is not None:
            self._current.wait_stream(self._other)

    def turn(self, number: int) -> StreamContext:
        return torch.cuda.stream(self._other) if self._other is not None and number % 2 else CURRENT_STREAM
