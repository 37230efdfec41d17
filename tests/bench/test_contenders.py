"""What takes part in a measurement does the work of what it stands for."""

from __future__ import annotations

import torch

from hf_ring_attn.bench.contenders import Alone
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.traffic import Sums, lanes_of


def test_one_rank_alone_begins_the_sums_of_a_lane_once() -> None:
    """It cleared new ones at every hop, which no rank of a ring does."""
    layout = Layout(64, 4, 1)
    k = torch.randn(1, layout.padded, 3, 2)
    lanes, begun = lanes_of(3, 4), []

    def new(source: int, lane: slice) -> Sums:
        begun.append(lane)
        return torch.zeros(1), torch.zeros(1)

    hops = list(Alone(layout, (k, k)).hops(layout.shard(k, 1), layout.shard(k, 1), lanes, new))
    assert begun == lanes
    assert len(hops) == 8 and {id(hop.sums) for hop in hops[::2]} == {id(hops[0].sums)} != {id(hops[1].sums)}
