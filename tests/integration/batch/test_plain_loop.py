"""Loops of one's own: `hf_ring_attn.shard` gives the loss, logits and gradients of one process, in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import plain_jobs
from tests.helpers.jobs.comparison import Ranks, on_two_or_four
from tests.helpers.jobs.plain_jobs import Answer, Step, attempt, packed, padded, tokens
from tests.helpers.models.tiny_models import tiny

SOFTMAX = 5e-6
"""Bound where transformers takes its softmax (or, in Llama 4, RoPE) in float32, whatever the model's dtype: what that
rounds depends on the processor (2.04e-6 on an AMD EPYC, in a ring of one too)."""
UNSCALED = 3e-5
"""The same in Gemma 4, which does not scale its scores."""
LOSS = 1e-6
"""Relative bound of transformers' loss and of its gradients: it is computed in float32 from logits of any dtype."""

LONGER = packed(61, 5, 5, 5, 5, 5, 9, 2)
"""97 tokens, a number that none of chunks divides; a zigzag leaves much of the work to one rank."""

MASKED = {**tokens(18), "attention_mask": torch.ones(2, 18, dtype=torch.int64)}
"""Moshi's layers get a mask then. Without one they get none before transformers 5.24, and are refused."""

STEPS = [
    Step(why="fewer tokens than chunks", batch=tokens(3)),
    Step(why="padded on either side", batch=padded(23, left=4, right=6)),
    Step(why="odd length"),
    Step(why="packed", batch=packed(9, 3, 11)),
    Step(why="packed, a window", model="mistral", batch=packed(9, 3, 11)),
    Step(why="packed, two other chunks", batch=LONGER, chunks=2),
    Step(why="packed, four chunks, a window", model="mistral", batch=LONGER, chunks=4),
    Step(
        why="packed, eight chunks, backward by gather",
        batch=LONGER,
        chunks=8,
        ring=RingConfig(backward="gather", heads_per_gather=1),
    ),
    Step(why="packed, sixteen chunks, recomputed", batch=LONGER, chunks=16, checkpointing="recomputed"),
    Step(why="packed, four chunks of another kind", model="llama4", batch=LONGER, chunks=4, exact=SOFTMAX),
    Step(
        why="packed, four chunks, experts",
        model="mixtral",
        batch=LONGER,
        chunks=4,
        dtype=torch.float32,
        exact=2e-5,
    ),
    Step(why="softcap", model="gemma2", batch=padded(23, right=6), exact=SOFTMAX),
    Step(why="two kinds of RoPE", model="gemma3", batch=packed(13, 10), exact=SOFTMAX),
    Step(why="sinks", model="gpt_oss", dtype=torch.float32, exact=2e-5),
    Step(why="experts with their auxiliary loss", model="mixtral", dtype=torch.float32, exact=2e-5),
    Step(
        why="experts with their auxiliary loss, padded, recomputed",
        model="mixtral",
        dtype=torch.float32,
        exact=2e-5,
        batch=padded(23, left=4, right=6),
        checkpointing="recomputed",
    ),
    Step(why="keys that layers share", model="gemma3n", batch=padded(23, right=6), exact=SOFTMAX),
    Step(
        why="padding of the ring, where a pad token's embedding is zero",
        model="gemma3n",
        config={"pad_token_id": 0},
        batch={name: x.clamp(min=1) for name, x in tokens(23).items()},
        exact=SOFTMAX,
    ),
    Step(why="keys that layers share, packed", model="gemma4", batch=packed(9, 3, 11), exact=UNSCALED),
    Step(
        why="keys that layers share, recomputed",
        model="gemma3n",
        batch=packed(9, 3, 11),
        checkpointing="recomputed",
        exact=SOFTMAX,
    ),
    Step(why="experts without such a loss", model="afmoe", dtype=torch.float32, exact=2e-5),
    Step(why="learned biases", model="learned biases", batch=padded(23, left=4, right=6)),
    Step(
        why="learned biases, packed, recomputed",
        model="learned biases",
        batch=packed(9, 3, 11),
        checkpointing="recomputed",
    ),
    Step(why="learned biases, four chunks", model="learned biases", batch=LONGER, chunks=4),
    Step(
        why="learned biases, reentrant, by gather",
        model="learned biases",
        checkpointing="reentrant",
        ring=RingConfig(backward="gather", heads_per_gather=1),
    ),
    Step(
        why="position ids that skip ahead beside a mask",
        batch={**padded(23, left=4, right=6), "position_ids": torch.tensor([*range(12), *range(40, 51)]).repeat(2, 1)},
    ),
    Step(why="learned positions", model="gpt2"),
    Step(why="values narrower than keys", model="deepseek_v3"),
    Step(why="chosen keys", model="deepseek_v32", batch=padded(23, left=4, right=6)),
    Step(why="chosen keys, packed, recomputed", model="deepseek_v32", batch=LONGER, checkpointing="recomputed"),
    Step(
        why="chosen keys, four chunks, reentrant",
        model="deepseek_v32",
        batch=LONGER,
        chunks=4,
        checkpointing="reentrant",
    ),
    Step(
        why="chosen keys, attention saved, MLPs in chunks",
        model="deepseek_v32",
        batch=LONGER,
        checkpointing="recomputed",
        ring=RingConfig(save_attention=True, mlp_tokens=8),
    ),
    Step(why="chosen keys of the layer before", model="glm_moe_dsa", batch=padded(41, right=6)),
    Step(
        why="chosen keys of the layer before, packed, recomputed",
        model="glm_moe_dsa",
        batch=LONGER,
        checkpointing="recomputed",
    ),
    Step(why="chunks and temperatures", model="llama4", exact=SOFTMAX),
    Step(why="chunks and temperatures, padded", model="llama4", batch=padded(23, left=4, right=6), exact=SOFTMAX),
    Step(why="chunks and temperatures, packed", model="llama4", batch=packed(9, 3, 11), exact=SOFTMAX),
    Step(why="chunks and temperatures, recomputed", model="llama4", checkpointing="recomputed", exact=SOFTMAX),
    Step(why="chunks and temperatures, reentrant", model="llama4", checkpointing="reentrant", exact=SOFTMAX),
    Step(why="RoPE by the longest position", model="dynamic rope", batch=tokens(41)),
    Step(why="short RoPE", model="longrope", batch=tokens(16)),
    Step(why="long RoPE, by one token", model="longrope", batch=tokens(17)),
    # Of the whole row alone a position is beyond 15: the gradients were silently wrong by up to 30 %.
    Step(
        why="long RoPE, recomputed",
        model="longrope in each layer",
        batch=MASKED,
        checkpointing="recomputed",
        exact=SOFTMAX,
    ),
    Step(
        why="long RoPE, reentrant",
        model="longrope in each layer",
        batch=MASKED,
        checkpointing="reentrant",
        exact=SOFTMAX,
    ),
    Step(why="checkpointing, reentrant", checkpointing="reentrant"),
    Step(why="checkpointing", checkpointing="recomputed", model="mistral"),
    Step(why="backward by gather", ring=RingConfig(backward="gather", heads_per_gather=1)),
]

alone = cache(plain_jobs.by_itself)


def assert_equal_answers(got: Answer, want: Answer, step: Step) -> None:
    real = step.batch.get("attention_mask", torch.ones_like(step.batch["input_ids"])).bool()
    assert relative_error(got.loss, want.loss) < LOSS
    assert relative_error(got.logits[real], want.logits[real]) < step.exact
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        assert relative_error(got.gradients[name], gradient) < max(LOSS, step.exact), name
    assert got.exact.keys() == want.exact.keys()
    for name, gradient in want.exact.items():
        assert relative_error(got.exact[name], gradient) < step.exact, name


@pytest.mark.parametrize(("step", "world_size"), on_two_or_four(STEPS, [1]))
@pytest.mark.turns
def test_a_shared_batch_is_the_whole_batch(ranks: Ranks, step: Step, world_size: int) -> None:
    for got in ranks(world_size).run(plain_jobs.in_a_ring, step):
        assert_equal_answers(got, alone(step), step)


@pytest.mark.turns
@pytest.mark.parametrize("chunks", [2, 8])
def test_eight_ranks_share_packed_rows(ranks: Ranks, chunks: int) -> None:
    step = Step(why="", batch=LONGER, chunks=chunks)
    for got in ranks(8).run(plain_jobs.in_a_ring, step):
        assert_equal_answers(got, alone(Step(why="", batch=LONGER)), step)


def test_two_batches_alive(ranks: Ranks) -> None:
    batches = tokens(23), packed(30, 7)
    for found in ranks(2).run(plain_jobs.two_batches_alive, *batches):
        for got, batch in zip(found, batches, strict=True):
            want = alone(Step(why="", batch=batch)).gradients
            assert all(relative_error(got[name], gradient) < LOSS for name, gradient in want.items())


def test_a_group_of_ones_own(ranks: Ranks) -> None:
    batches = [tokens(23), tokens(18, seed=2)]
    found = ranks(4).run(plain_jobs.rings_of_two, batches)
    for rank, loss in enumerate(found):
        assert relative_error(loss, alone(Step(why="", batch=batches[rank // 2])).loss) < LOSS


def test_ranks_without_a_gradient_take_part(ranks: Ranks) -> None:
    for found in ranks(2).run(plain_jobs.gradients_that_ranks_lack, tokens(8)):
        assert found["used"] is not None
        assert torch.equal(found["used"], torch.full((3,), 3.0, dtype=torch.float64))
        assert found["frozen"] is None
        assert found["unused"] is None, "an optimizer would decay it"


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_without_gradients(ranks: Ranks, guard: Any) -> None:
    batch = tokens(23)
    want = alone(Step(why="", batch=batch))
    for loss, logits in ranks(2).run(plain_jobs.evaluated, batch, guard):
        assert relative_error(loss, want.loss) < LOSS
        assert relative_error(logits, want.logits) < LOSS


def test_weights_of_a_functional_call(ranks: Ranks) -> None:
    """They are tensors that were computed, not the model's own."""
    want = alone(Step(why="", batch=tokens(23))).gradients
    for found in ranks(2).run(plain_jobs.functional, tokens(23)):
        assert found.keys() == want.keys()
        assert all(relative_error(found[name], gradient) < LOSS for name, gradient in want.items())


@pytest.mark.turns
def test_a_compiled_model_keeps_nothing_of_the_last_batch(ranks: Ranks) -> None:
    batches = [packed(10, 14), packed(3, 21)]
    for answers in ranks(2).run(plain_jobs.compiled, batches):
        for got, batch in zip(answers, batches, strict=True):
            step = Step(why="", batch=batch)
            want = alone(step)
            assert relative_error(got.logits, want.logits) < step.exact
            assert all(relative_error(got.gradients[n], gradient) < LOSS for n, gradient in want.gradients.items())


@pytest.mark.parametrize("reduce", ["each", "step", "never"])
def test_a_bare_model_is_told_nothing_however_often_its_loop_reduces(ranks: Ranks, reduce: str) -> None:
    """Its replicas are the same in each case: see tests/integration/gradients/test_bare_models.py."""
    assert ranks(2).run(plain_jobs.told, plain_jobs.bare_loop, reduce) == [[], []]


# ---- replicas that were never the same -------------------------------------------------------------------------------


def seeded(how: str, apart: bool) -> tuple[str, str] | None:
    """LoRA whose weights are drawn in each process, with seeds of its own or not. Its second factor is 0 at first."""
    model: Any = tiny("llama", "ring_fp32").train()
    torch.manual_seed(dist.get_rank() if apart else 0)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    called = DistributedDataParallel(model) if how == "in DDP" else model

    def run() -> None:
        sharded = hf_ring_attn.shard(tokens(23), model=model if how == "named" else None)
        with sharded:
            called(**sharded.inputs)

    return attempt(run)


@pytest.mark.parametrize("how", ["bare", "named", "in DDP"])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "alike"])
def test_a_bare_model_begins_with_the_same_weights(ranks: Ranks, how: str, apart: bool) -> None:
    for raised in ranks(2).run(seeded, how, apart):
        if how == "in DDP" or not apart:
            assert raised is None
            continue
        assert raised is not None, "not refused"
        assert raised[0] == "RanksDiffer"
        assert "the same weights of base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight" in raised[1]
        assert "Build or load the same model on every rank (seed before random initialisation" in raised[1]
