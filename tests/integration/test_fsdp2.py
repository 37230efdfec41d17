"""FSDP2 by torch's `fully_shard` on accelerate's mesh: parameters over dp_shard x cp, sequences over cp."""

from __future__ import annotations

import pytest

import plain_jobs
from comparison import Ranks
from hf_ring_attn.testing import relative_error
from plain_jobs import Shards, tokens

SHARDS = [
    Shards({"cp_size": 2}, ("dp_shard_cp",), world=2),
    Shards({"cp_size": 4}, ("dp_shard_cp",), world=4),
    Shards({"dp_shard_size": 2, "cp_size": 2}, ("dp_shard_cp",), world=4),
    Shards({"dp_replicate_size": 2, "cp_size": 2}, ("dp_replicate", "dp_shard_cp"), world=4),
]
BOUND = 1e-6
"""Relative, for the loss and the updated parameters: transformers computes the loss in float32."""


@pytest.mark.parametrize("checkpointing", ["", "recomputed", "reentrant"])
@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_sharded_parameters_train_as_in_one_process(ranks: Ranks, shards: Shards, checkpointing: str) -> None:
    batches = [tokens(23, seed=seed) for seed in range(shards.world // shards.sizes["cp_size"])]
    want_losses, want = plain_jobs.without_fsdp(batches)
    for rank, (losses, parameters) in enumerate(
        ranks(shards.world).run(plain_jobs.fsdp2, shards, batches, checkpointing)
    ):
        for got, loss in zip(losses, want_losses[rank // shards.sizes["cp_size"]], strict=True):
            assert relative_error(got, loss) < BOUND
        assert parameters.keys() == want.keys()
        for name, parameter in want.items():
            assert relative_error(parameters[name], parameter) < BOUND, name
