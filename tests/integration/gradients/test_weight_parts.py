"""Ranks that hold parts of weights: exact if their gradients reach the ring, or refused before the first step."""

from __future__ import annotations

from dataclasses import fields

import pytest

from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import parts_jobs as jobs
from tests.helpers.jobs.comparison import LOSS, PARAMETER, Ranks
from tests.helpers.jobs.parts_jobs import Parts
from tests.helpers.jobs.plain_jobs import attempt
from tests.helpers.jobs.runs import Run

BOUND = 1e-5
"""Relative, in float32."""
HAS_EXPERTS_ON_RANKS = "ep_size" in {field.name for field in fields(type(jobs.distributed()))}
needs_ep = pytest.mark.skipif(not HAS_EXPERTS_ON_RANKS, reason="transformers has no ep_size")

PARTS = [
    pytest.param(Parts(why="experts", model="mixtral", loaded={"fsdp_size": 2, "ep_size": 2}, world=2), marks=needs_ep),
    pytest.param(
        Parts(why="experts of two rings", model="gpt_oss", loaded={"fsdp_size": 4, "ep_size": 4}), marks=needs_ep
    ),
    pytest.param(
        Parts(why="each expert twice", model="mixtral", loaded={"fsdp_size": 4, "ep_size": 2}, ring=4),
        marks=(needs_ep, pytest.mark.full),
    ),
    pytest.param(
        Parts(why="heads and experts across rings", model="gpt_oss", same_rows=True,
              loaded={"fsdp_size": 2, "tp_size": 2, "ep_size": 4}),
        marks=needs_ep,
    ),
    Parts(why="heads across rings", loaded={"fsdp_size": 2, "tp_size": 2}, same_rows=True),
    Parts(why="heads across rings, by torch", make=jobs.by_heads_and_fsdp2, same_rows=True),
    Parts(why="heads across rings, nothing sharded", make=jobs.by_heads, same_rows=True),
    Parts(why="heads and words across rings, nothing sharded", make=jobs.by_heads_and_words, same_rows=True),
    Parts(why="heads and replicas, nothing sharded", loaded={"dp_replicate_size": 2, "tp_size": 2}, same_rows=True),
    Parts(why="heads across rings, averaged again by hand", make=jobs.by_heads, same_rows=True, by_hand=True),
    Parts(why="FSDP2 that is told the ring's size", make=jobs.divided_by_ranks, world=2),
    Parts(why="DDP over replicas alone", make=jobs.over_replicas_by_ddp),
]  # fmt: skip


@pytest.mark.turns(4)
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: parts.why)
def test_parts_train_as_one_process(ranks: Ranks, parts: Parts) -> None:
    losses, want = jobs.alone(parts)
    for rank, (loss, gradients) in enumerate(ranks(parts.world).run(jobs.in_rings, parts)):
        assert relative_error(loss, losses[0 if parts.same_rows else rank // parts.ring]) < BOUND
        assert gradients.keys() == want.keys()
        for name, gradient in want.items():
            assert relative_error(gradients[name], gradient) < BOUND, name


PREPARED = [
    Parts(why="shards that transformers loaded", loaded={"fsdp_size": 2}, world=2),
    Parts(why="shards over two rings", make=jobs.by_fsdp2),
    Parts(why="some layers", make=jobs.layers_by_fsdp2, world=2),
]


@pytest.mark.parametrize("interface", ["shard", "maybe_context_parallel"])
@pytest.mark.parametrize("parts", PREPARED, ids=lambda parts: parts.why)
def test_accelerate_prepares_a_model_that_fsdp2_shards(ranks: Ranks, parts: Parts, interface: str) -> None:
    """It wrapped the model in DDP, and torch ended with words about DTensors, as it does without a ring."""
    losses, want = jobs.alone(parts)
    for rank, (loss, gradients) in enumerate(ranks(parts.world).run(jobs.in_accelerate_s_loop, parts, interface)):
        assert relative_error(loss, losses[rank // parts.ring]) < BOUND
        for name, gradient in want.items():
            assert relative_error(gradients[name], gradient) < BOUND, name


NOT_BY_ALL = "nothing averages the gradient of {} over all processes: call fully_shard on the whole model"
LEFT_OUT = [
    (Parts(why="some layers of two rings", make=jobs.layers_by_fsdp2), NOT_BY_ALL.format("model.embed_tokens.weight")),
    (Parts(why="over each ring", make=jobs.over_rings_by_fsdp2), NOT_BY_ALL.format("model.embed_tokens.weight")),
    (Parts(why="a weight by hand", make=jobs.by_hand, world=2),
     NOT_BY_ALL.format("model.layers.0.mlp.down_proj.weight")),
    (Parts(why="heads", make=jobs.by_heads_and_fsdp2), "accelerate gives each ring other rows, and ranks of tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "text"), LEFT_OUT, ids=lambda x: x.why if isinstance(x, Parts) else "")
def test_accelerate_prepares_no_model_that_it_would_not_average(ranks: Ranks, parts: Parts, text: str) -> None:
    for raised in ranks(parts.world).run(attempt, jobs.in_accelerate_s_loop, parts, "shard"):
        assert raised is not None and raised[0] == "UnsupportedModel" and text in raised[1], raised
        assert len(raised[1].split()) <= 60


NOT_AVERAGED = "is a DTensor of which nothing averages the gradient over the ring: call fully_shard on the model"
SAME_TOKENS = "tensor parallelism needs the same tokens on its ranks, and these are ranks of one ring"
REFUSED = [
    (Parts(why="FSDP2 over replicas alone", make=jobs.over_replicas_by_fsdp2), f"embed_tokens.weight {NOT_AVERAGED}"),
    (Parts(why="a weight by hand", make=jobs.by_hand, world=2), f"down_proj.weight {NOT_AVERAGED}"),
    (Parts(why="FSDP2 that sums", make=jobs.summed_by_fsdp2, world=2), "its gradients are divided by 1 (set_gradient_"),
    (Parts(why="heads in a ring", loaded={"tp_size": 2}, world=2), SAME_TOKENS),
    (Parts(why="heads in a ring beside FSDP2", loaded={"fsdp_size": 2, "tp_size": 2}), SAME_TOKENS),
    (Parts(why="experts in a ring, by torch", model="mixtral", make=jobs.experts_by_torch, world=2),
     "torch's distribute_module, or parallelize_module, split its MixtralExperts over ranks of one ring"),
    (Parts(why="layers", loaded={"pp_size": 2}, world=2), "pipeline parallelism gives each rank other layers"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "text"), REFUSED, ids=lambda x: x.why if isinstance(x, Parts) else "")
def test_parts_that_would_differ_are_refused(ranks: Ranks, parts: Parts, text: str) -> None:
    for raised in ranks(parts.world).run(attempt, jobs.in_rings, parts):
        assert raised is not None, "not refused"
        assert raised[0] == "UnsupportedModel" and text in raised[1], raised
        assert raised[1].count(";") == 0, "one reason is enough"
        assert len(raised[1].split()) <= 60


RUN = Run(why="", steps=3)


@needs_ep
def test_a_trainer_with_an_expert_on_each_rank_trains_as_one_process(ranks: Ranks) -> None:
    log, weights = ranks(1).run(jobs.trained, RUN, "mixtral", None)[0]
    for got, after in ranks(2).run(jobs.trained, RUN, "mixtral", {"fsdp_size": 2, "ep_size": 2}):
        for mine, want in zip(got, log, strict=True):
            assert mine == pytest.approx(want, rel=LOSS)
        assert float((after - weights).abs().max()) < PARAMETER


def test_a_trainer_of_a_part_of_the_layers_is_refused(ranks: Ranks) -> None:
    """DDP compared the weights of other layers, and gloo ended the processes."""
    for raised in ranks(2).run(attempt, jobs.trained, RUN, "llama", {"pp_size": 2}):
        assert raised is not None and raised[0] == "UnsupportedModel", raised
        assert "pipeline parallelism gives each rank other layers" in raised[1]
