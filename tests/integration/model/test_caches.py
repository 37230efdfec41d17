"""Caches of keys and values in a ring, which would hold one rank's tokens: refused by name, there and outside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_ring_attn
from hf_ring_attn.integration.context.introspect import CACHES, parameters_of
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, padded
from tests.helpers.models.tiny_models import tiny

BATCH = padded(23, right=9)


def with_a_cache() -> tuple[str, str] | None:
    model = tiny("llama", "ring_fp32")
    with hf_ring_attn.shard(BATCH) as sharded:
        return attempt(lambda: model(**{**sharded.inputs, "use_cache": True}))


def test_a_cache_of_one_ranks_tokens_is_refused(ranks: Ranks) -> None:
    """It came back without a word."""
    for raised in ranks(2).run(with_a_cache):
        assert raised is not None, "not refused"
        assert raised[0] == "UnsupportedArgument"
        assert "LlamaForCausalLM was called in a ring with use_cache=True: a cache would hold this rank's" in raised[1]


def cache_used_outside(copied: bool) -> tuple[Tensor, tuple[str, str] | None, tuple[str, str] | None, bool]:
    """The loss of a call without use_cache, which makes a cache by the model's config; and that cache's use outside."""
    model: Any = tiny("llama", "ring_fp32").double()
    with torch.set_grad_enabled(not copied), hf_ring_attn.shard(BATCH) as sharded:
        given = {name: x for name, x in sharded.inputs.items() if name != "use_cache"}
        out = model(**given, return_dict=not copied)
    loss, cache = (out[0], copy.deepcopy(out[2])) if copied else (out.loss, out[-1])
    token = torch.ones(2, 1, dtype=torch.int64)
    name = next(name for name in CACHES if name in parameters_of(model))
    used = attempt(lambda: model(token, **{name: cache}))
    continued = attempt(lambda: model.generate(BATCH["input_ids"], max_new_tokens=1, **{name: cache}))
    fresh = model(BATCH["input_ids"], use_cache=True)[-1]
    return sharded.reduce(loss), used, continued, attempt(lambda: model(token, **{name: fresh})) is None


@pytest.mark.parametrize("copied", [False, True])
def test_a_cache_that_a_ring_left_behind_is_refused_outside(ranks: Ranks, copied: bool) -> None:
    want = tiny("llama", None).double()(**BATCH).loss
    for loss, used, continued, others_work in ranks(2).run(cache_used_outside, copied):
        assert relative_error(loss, want) < 1e-6  # transformers computes it in float32
        for raised in (used, continued):
            assert raised is not None, "not refused"
            assert raised[0] == "UnsupportedArgument"
            assert raised[1].startswith("a model was called with a cache: it was made in a ring, so it holds one rank")
        assert others_work
