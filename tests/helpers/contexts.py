"""Batch contexts for tests that need one without a batch."""

from __future__ import annotations

from hf_ring_attn import RingConfig
from hf_ring_attn.comm.ring import LOCAL, Ring
from hf_ring_attn.integration.context.batch_context import BatchContext
from hf_ring_attn.sharding.layout import Layout


def alone(config: RingConfig | None = None) -> BatchContext:
    """The context of a batch in a ring of one."""
    return BatchContext(Ring(LOCAL), Layout(8, 1, 0), config or RingConfig())


def ring_of_two(config: RingConfig | None = None) -> BatchContext:
    """The context of the first rank of a simulated ring of two."""
    return BatchContext(Ring.simulated(2, 0), Layout(8, 2, 0), config or RingConfig())
