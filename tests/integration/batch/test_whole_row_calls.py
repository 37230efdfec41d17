"""Models that a host calls with whole rows, and a call that is cut short."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_ring_attn
from hf_ring_attn.integration.batch.whole_row_calls import whole_row_calls
from hf_ring_attn.integration.context import batch_context
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny


def rows(length: int) -> dict[str, Tensor]:
    batch = tokens(length)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def test_a_call_that_is_interrupted_leaves_its_ring() -> None:
    """Torch calls no hook after Ctrl-C, so later calls ran in the ring of KTO's second rows."""
    model: Any = tiny("llama", "ring_fp32")
    first, second = rows(24), rows(20)

    def shard(_: Any, given: dict[str, Any], _fused: bool) -> hf_ring_attn.Sharded:
        return hf_ring_attn.shard(given)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with whole_row_calls([model], shard, inside=False), torch.no_grad():
        model(**first)
        model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**second)
    assert batch_context.current() is None
