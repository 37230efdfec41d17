"""Attention that the ring does not know runs on whole documents: losses, logits and gradients of one process.

The sweep has every class of it, with rows of all kinds; here is what it does not see.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.integration.model.whole_attention import whole_attention_of
from tests.helpers.jobs import plain_jobs
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, on_two_or_four, without_ring
from tests.helpers.jobs.plain_jobs import Step, attempt, padded, tokens
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import train
from tests.helpers.models.tiny_models import tiny
from tests.integration.batch.test_plain_loop import LONGER, assert_equal_answers

EXACT = 1e-5
"""Norms, RoPE, or a softmax are computed in float32, whatever the model's dtype."""

STEPS = [
    Step(why="a bias of distances", model="inkling", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(
        why="a bias, tiny chunks, recomputed", model="inkling", batch=tokens(7), checkpointing="recomputed", exact=EXACT
    ),
    Step(why="blocks of keys", model="minimax m3", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(why="blocks of keys, reentrant", model="minimax m3", checkpointing="reentrant", exact=EXACT),
    Step(why="pooled keys", model="glm 5.3", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(why="pooled keys, recomputed", model="glm 5.3", checkpointing="recomputed", exact=EXACT),
    Step(why="compressed keys", model="deepseek v4", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(why="compressed keys, recomputed", model="deepseek v4", checkpointing="recomputed", exact=EXACT),
]
MODELS = ("inkling", "minimax m3", "deepseek v4", "glm 5.3")
alone = cache(plain_jobs.by_itself)


@pytest.mark.parametrize(("step", "world_size"), on_two_or_four(STEPS))
@pytest.mark.turns
def test_a_ring_gives_what_one_process_gives(ranks: Ranks, step: Step, world_size: int) -> None:
    for got in ranks(world_size).run(plain_jobs.in_a_ring, step):
        assert_equal_answers(got, alone(step), step)


RUNS = [
    Run(why="answers", rows=Rows(labelled="answers", length=23)),
    Run(why="LoRA, checkpoints", lora=True, arguments={"gradient_checkpointing": True}),
    Run(why="FSDP2", fsdp2=True),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.why)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.turns
def test_trainer_gives_what_it_gives_in_one_process(ranks: Ranks, model: str, run: Run) -> None:
    run = replace(run, model=model, steps=2, arguments={**run.arguments, "learning_rate": 0.002})
    mesh = Mesh(cp=2)
    want = without_ring(ranks, run, mesh)
    for got in ranks(2).run(train, run, mesh):
        assert_equal_runs(got, want)


def ours(name: str, attention: str | None = None) -> Any:
    return tiny(name, attention).eval()  # type: ignore[no-untyped-call]


def logits(name: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model = ours(name, "ring_fp32")
    with (sharded := hf_ring_attn.shard(batch, model=model)), torch.no_grad():
        found = model(**sharded.inputs).logits
    return sharded.gather(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns
def test_documents_of_a_packed_row_know_nothing_of_each_other(ranks: Ranks, name: str) -> None:
    """Windows and blocks of keys begin at each document's first token."""
    documents = [part["input_ids"] for part in documents_of(LONGER)]
    with torch.no_grad():
        want = torch.cat([ours(name)(input_ids=x, use_cache=False).logits for x in documents], 1)
    for got in ranks(2).run(logits, name, LONGER):
        torch.testing.assert_close(got[:1], want, rtol=1e-5, atol=1e-5)


def documents_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The documents of the first row."""
    starts = [*torch.nonzero(batch["position_ids"][0] == 0).flatten().tolist(), batch["input_ids"].shape[1]]
    return [{"input_ids": batch["input_ids"][:1, a:b]} for a, b in pairwise(starts)]


INDEXED = tiny("glm 5.3").config.text_config.layer_types[1]
"""It has another name in transformers 5.17."""


@pytest.mark.parametrize("name", MODELS)
def test_which_attention_it_is(name: str) -> None:
    found = {one.kind: one.implementation for one in whole_attention_of(tiny(name, "ring_fp32"))}
    assert (
        found
        == {
            "inkling": {"hybrid": "sdpa", "hybrid_sliding": "sdpa"},
            "minimax m3": {"minimax_m3_sparse": "sdpa"},
            "glm 5.3": {INDEXED: "sdpa"},
            "deepseek v4": {"compressed_sparse_attention": "eager", "heavily_compressed_attention": "eager"},
        }[name]
    )


HOLES = torch.ones(2, 24, dtype=torch.int64).index_fill(1, torch.arange(5, 8), 0)
"""Padding between tokens: it attends, and a block of keys holds it."""


def test_padding_inside_a_row_is_as_in_one_process(ranks: Ranks) -> None:
    batch = {**tokens(24), "attention_mask": HOLES}
    with torch.no_grad():
        want = ours("minimax m3")(**{**batch, "use_cache": False}).logits
    for got in ranks(2).run(logits, "minimax m3", batch):
        torch.testing.assert_close(got[HOLES.bool()], want[HOLES.bool()], rtol=1e-5, atol=1e-5)


def padded_on_the_left() -> tuple[str, str] | None:
    """Eager attention gives padding a mean, and the ring's layers give it zeros."""
    with mock.patch.object(transformers.MiniMaxM3VLPreTrainedModel, "_supports_sdpa", False):
        return attempt(lambda: logits("minimax m3", padded(24, left=4)))


def with_dropout() -> tuple[str, str] | None:
    def call() -> None:
        model: Any = tiny("inkling", "ring_fp32").train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with (sharded := hf_ring_attn.shard(tokens(24), model=model)):
            model(**sharded.inputs)

    return attempt(call)


REFUSED = [(padded_on_the_left, "UnsupportedModel", "padding"), (with_dropout, "UnsupportedArgument", "dropout=0.1")]


@pytest.mark.parametrize(("job", "kind", "words"), REFUSED)
def test_what_is_not_exact_is_refused(ranks: Ranks, job: Any, kind: str, words: str) -> None:
    for raised in ranks(2).run(job):
        assert raised is not None, "not refused"
        assert raised[0] == kind and words in raised[1]


def test_a_score_mod_is_refused() -> None:
    model: Any = tiny("minimax m3", "ring_fp32")
    sharded = hf_ring_attn.shard(tokens(24), model=model)
    with pytest.raises(errors.ScoreModDropped), sharded:
        model(**sharded.inputs, score_mod=lambda score, *_: score)


def test_without_a_ring_and_in_generation_it_is_transformers_own() -> None:
    """Once the model was in a batch."""
    model = ours("minimax m3", "ring_fp32")
    with (sharded := hf_ring_attn.shard(tokens(24), model=model)), torch.no_grad():
        model(**sharded.inputs)
    one = {"input_ids": tokens(9)["input_ids"][:1], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**one), ours("minimax m3").generate(**one))
