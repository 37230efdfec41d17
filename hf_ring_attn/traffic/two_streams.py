"""Alternates between two CUDA streams, so that the end of one launch overlaps with the start of the next.

The number of blocks of a launch is seldom a multiple of a GPU's multiprocessors, and causal blocks have unequal work:
the last wave leaves multiprocessors idle. Blocks of a launch on another stream fill them, also while one head half
waits for its accumulators.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

StreamContext = AbstractContextManager[Any]
"""A context that sets the stream on which work is queued."""

CURRENT_STREAM: StreamContext = nullcontext()
"""Leaves the current stream as it is."""


class TwoStreams:
    """Alternates between the current stream and a side stream: forks on entering the context, joins on leaving it.

    Work queued in a turn must not depend on another turn, only on work queued before the context. Tensors allocated in
    a turn may belong to the side stream. Do not use them on another stream: the allocator does not wait for it.

    Args:
        other: the side stream; None: all turns use the current stream.
    """

    def __init__(self, other: Any, device: torch.device) -> None:
        self._other = other
        self._device = device
        self._current: Any = None

    def __enter__(self) -> TwoStreams:
        if self._other is not None:
            self._current = torch.cuda.current_stream(self._device)
            self._other.wait_stream(self._current)
        return self

    def __exit__(self, *_: object) -> None:
        if self._other is not None:
            self._current.wait_stream(self._other)

    def turn(self, number: int) -> StreamContext:
        return torch.cuda.stream(self._other) if self._other is not None and number % 2 else CURRENT_STREAM
