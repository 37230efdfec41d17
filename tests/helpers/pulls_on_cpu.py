"""Pulls on the CPU, without streams and signals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from hf_ring_attn.comm.ring import LOCAL, Ring
from hf_ring_attn.traffic import pulls
from hf_ring_attn.traffic.packing import Packing
from hf_ring_attn.traffic.pulls import LOST_AFTER_MS, Pulls

CPU = torch.device("cpu")


@contextmanager
def without_a_gpu(ranks: int = 1) -> Iterator[Pulls]:
    """Pulls of a ring of one, or of more that are all this one, without streams and signals, with memory on the CPU."""

    class Memory:
        made = 0

        def __init__(self, ring: Ring, size: int, device: torch.device) -> None:
            self.size, self.handle = size, mock.MagicMock()
            self.views: dict[Packing, object] = {}
            self.mine = torch.zeros(size, dtype=torch.uint8)
            self.of = [self.mine] * ranks

    cuda = {name: mock.MagicMock() for name in ("Stream", "stream", "current_stream", "Event", "synchronize")}
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.object(pulls, "Shared", Memory):
        with mock.patch.object(pulls, "_lost_after_ms", return_value=LOST_AFTER_MS):  # else it needs a group
            transport = Pulls(Ring(LOCAL), CPU)
        if ranks > 1:
            transport.ring = mock.MagicMock(rank=0, size=ranks)
            transport.ring.numbers.return_value = [0] * ranks
        transport.outboxes = Memory(Ring(LOCAL), 1, CPU)  # type: ignore[assignment]
        yield transport
