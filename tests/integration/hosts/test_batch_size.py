"""accelerate's search for a batch size (Trainer's auto_find_batch_size) after a rank ran out of memory."""

from __future__ import annotations

import torch
from accelerate.utils import find_executable_batch_size

import hf_ring_attn
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.models.tiny_models import tiny


def out_of_memory(tried: list[int]) -> int:
    """Searches with a function that has room for six rows."""

    def step(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.50 GiB.")
        return batch_size

    search = find_executable_batch_size(step, starting_batch_size=8)
    return int(search())


def searched_in_a_ring() -> tuple[list[int], tuple[str, str] | None]:
    """The sizes that were tried, and the error, of a rank whose peers wait in the middle of a step."""
    with hf_ring_attn.shard(tokens(23)) as sharded:
        tiny("llama", "ring_fp32")(**sharded.inputs)
    tried: list[int] = []
    raised = attempt(out_of_memory, tried)
    return tried, raised and (raised[0], raised[1])


def test_a_rank_of_a_ring_does_not_try_again_alone(ranks: Ranks) -> None:
    for tried, raised in ranks(2).run(searched_in_a_ring):
        assert tried == [8] and raised is not None and raised[0] == "NoSmallerBatch"
        assert "this rank failed (CUDA out of memory. Tried to allocate 8.50 GiB.)" in raised[1]


def test_without_a_ring_it_tries_smaller_ones() -> None:
    tried: list[int] = []
    assert out_of_memory(tried) == 6 and tried == [8, 7, 6]
