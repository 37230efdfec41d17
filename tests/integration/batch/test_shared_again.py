"""A rank's share of a batch that is given to `shard` again."""

from __future__ import annotations

import pytest
from torch import Tensor

import hf_ring_attn
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens


def shared_twice(detached: bool) -> tuple[str, str] | None:
    sharded = hf_ring_attn.shard(tokens(23))
    inputs = {name: x.detach() if isinstance(x, Tensor) and detached else x for name, x in sharded.inputs.items()}
    return attempt(hf_ring_attn.shard, inputs)


@pytest.mark.parametrize("detached", [False, True])
def test_a_share_is_not_sharded_again(ranks: Ranks, detached: bool) -> None:
    """Ranks differed, and the error blamed the loader of the data."""
    for said in ranks(2).run(shared_twice, detached):
        assert said is not None and said[0] == "BadBatch"
        assert "holds tokens that shard() returned: they are this rank's share, not whole rows" in said[1]
