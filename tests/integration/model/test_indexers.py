"""Indexers in a ring: whatever is computed at once, the keys are those of whole rows; unknown ones are refused."""

from __future__ import annotations

import importlib
import inspect
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.biases import Alibi
from hf_ring_attn.integration.context.introspect import CACHES
from hf_ring_attn.integration.model import indexers
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import Batch, attempt, padded
from tests.helpers.models.tiny_models import tiny

BATCH = padded(41, left=3, right=5)
REAL = BATCH["attention_mask"].bool()


def model_of(attention: str | None, name: str = "deepseek_v32") -> Any:
    return tiny(name, attention).double()


def logits(batch: Batch, at_once: int, use_cache: bool = False, changed: Any = None) -> Tensor:
    model = model_of("ring_fp32")
    if changed is not None:
        changed(model)
    sharded = hf_ring_attn.shard({name: x for name, x in batch.items() if name != "labels"})
    given = {**sharded.inputs, "use_cache": None} if use_cache else sharded.inputs
    with mock.patch.object(indexers, "MOST_SCORES", at_once), sharded, torch.no_grad():
        return sharded.gather(model(**given).logits)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("at_once", [1, 2 * 32 * 41 * 5, 2**26])
def test_queries_may_be_scored_a_few_at_a_time(ranks: Ranks, world: int, at_once: int) -> None:
    with torch.no_grad():
        want = model_of(None)(**{name: x for name, x in BATCH.items() if name != "labels"}).logits
    for got in ranks(world).run(logits, BATCH, at_once):
        assert relative_error(got[REAL], want[REAL]) < 1e-12


def test_the_models_own_cache_changes_nothing(ranks: Ranks) -> None:
    want = logits(BATCH, 2**26)
    for got in ranks(2).run(logits, BATCH, 2**26, use_cache=True):
        assert relative_error(got[REAL], want[REAL]) < 1e-12


def test_fewer_keys_are_attended_to_than_seen() -> None:
    """Else no test here would see a choice."""
    dense = model_of("ring_fp32")
    for layer in dense.model.layers:
        layer.self_attn.indexer.index_topk = 1000
    sharded = hf_ring_attn.shard({name: x for name, x in BATCH.items() if name != "labels"})
    with sharded, torch.no_grad():
        every = sharded.gather(dense(**sharded.inputs).logits)
    assert relative_error(every[REAL], logits(BATCH, 2**26)[REAL]) > 0.01


def changed_between_batches(attention: str | None) -> list[Tensor]:
    """Logits of three batches: before the second an indexer chooses fewer keys, before the third by a forward of the
    program's own."""
    model = model_of(attention)
    batch = {name: x for name, x in BATCH.items() if name != "labels"}
    module = model.model.layers[1].self_attn.indexer
    own = type(module).forward

    def answer() -> Tensor:
        with torch.no_grad():
            if attention is None:
                whole: Tensor = model(**batch).logits
                return whole
            sharded = hf_ring_attn.shard(batch)
            with sharded:
                return sharded.gather(model(**sharded.inputs).logits)

    found = [answer()]
    module.index_topk = 2
    found.append(answer())
    module.forward = lambda *args, **kwargs: own(module, *args, **kwargs)[..., :1]
    return [*found, answer()]


def test_an_indexer_may_change_between_batches(ranks: Ranks) -> None:
    want = changed_between_batches(None)
    assert all(relative_error(one[REAL], other[REAL]) > 1e-3 for one, other in pairwise(want)), "nothing changed"
    for answers in ranks(2).run(changed_between_batches, "ring_fp32"):
        for got, one in zip(answers, want, strict=True):
            assert relative_error(got[REAL], one[REAL]) < 1e-12


def keeps_its_keys(model: Any) -> None:
    """An indexer that does not hand its keys to a cache."""
    module = model.model.layers[0].self_attn.indexer
    own = type(module).forward
    cache = next(name for name in CACHES if name in inspect.signature(own).parameters)
    module.forward = lambda *args, **kwargs: own(module, *args, **{**kwargs, cache: None})


def refused() -> tuple[str, str] | None:
    return attempt(lambda: logits(BATCH, 2**26, changed=keeps_its_keys))


def test_an_indexer_that_does_otherwise_is_refused(ranks: Ranks) -> None:
    for raised in ranks(2).run(refused):
        assert raised is not None, "not refused"
        assert raised[0] == "UnsupportedModel" and "it handed no keys to its cache" in raised[1]


def test_a_score_mod_beside_it_is_refused() -> None:
    sharded = hf_ring_attn.shard(BATCH)
    with pytest.raises(errors.UnsupportedArgument, match="its indexer chooses keys"), sharded:
        model_of("ring_fp32")(**sharded.inputs, score_mod=Alibi(4))


OTHERS = [
    ("qwen4_exp", "Qwen4ExpTextQSAIndexer"), ("glm5_next", "Glm5NextTextIndexer"), ("deepseek_v4", "DeepseekV4Indexer"),
    ("minimax_m3_vl", "MiniMaxM3VLIndexer"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name"), OTHERS)
def test_indexers_of_blocks_of_keys_are_not_known(model: str, name: str) -> None:
    try:
        found = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {name}")
    module = found.__new__(found)
    torch.nn.Module.__init__(module)
    if model == "glm5_next":
        module.index_topk = 6
    assert not indexers._is_known(module)
