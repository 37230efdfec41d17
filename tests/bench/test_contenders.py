"""What takes part in a measurement does the work of what it stands for."""

from __future__ import annotations

import torch

from hf_ring_attn.bench.contenders import Alone
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.traffic import Sums, head_halves


def test_one_rank_alone_begins_the_sums_of_a_lane_once() -> None:
    """It cleared new ones at every hop, which no rank of a ring does."""
    layout = Layout(64, 4, 1)
    k = torch.randn(1, layout.padded, 3, 2)
    lanes, begun = head_halves(3, 4), []

    def new(source: int, lane: slice) -> Sums:
        begun.append(lane)
        return torch.zeros(1), torch.zeros(1)

    ring_pass = list(Alone(layout, (k, k)).ring_pass(layout.shard(k, 1), layout.shard(k, 1), lanes, new))
    assert begun == lanes
    assert len(ring_pass) == 8 and {id(hop.sums) for hop in ring_pass[::2]} == {id(ring_pass[0].sums)} != {
        id(ring_pass[1].sums)
    }
