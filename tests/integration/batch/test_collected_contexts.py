"""A batch's context that a garbage collection ends while torch calls a model's hooks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import hf_ring_attn
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny


def loss_after_a_collection() -> tuple[float, float]:
    """The losses of whole rows, without and with a garbage collection that ends a batch's context among hooks."""
    model: Any = tiny("llama", "ring_fp32")
    expected = model(**tokens(23)).loss.item()

    def suspended() -> Iterator[None]:
        with hf_ring_attn.shard(tokens(40)) as sharded:
            model(**sharded.inputs)
            yield

    cycle: list[Any] = [suspended()]
    cycle.append(cycle)
    gc.collect()
    gc.disable()

    def collected(*_: Any) -> None:
        gc.collect()

    collect = model.register_forward_pre_hook(collected)
    model._forward_pre_hooks.move_to_end(collect.id, last=False)
    next(cycle[0])
    del cycle
    try:
        return expected, model(**tokens(23)).loss.item()
    finally:
        gc.enable()
        collect.remove()


def test_a_context_that_a_garbage_collection_ends_among_hooks(ranks: Ranks) -> None:
    """torch called the removed hooks without keywords: TypeError."""
    for expected, got in ranks(2).run(loss_after_a_collection):
        assert got == expected
