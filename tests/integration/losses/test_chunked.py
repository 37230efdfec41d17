"""The loss in chunks is that of all logits, with its gradients, in float64; logits that are read are right."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_ring_attn.integration.losses import head
from hf_ring_attn.layers import chunked_loss
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import chunked_jobs as jobs
from tests.helpers.jobs import logits_jobs
from tests.helpers.jobs.chunked_jobs import Answer, Step
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import packed, padded, tokens
from tests.helpers.models.tiny_models import VOCABULARY

EXACT = 1e-12
ON_HEAD = {"target_modules": ["q_proj", "lm_head"]}
SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
BY_NAME = {"target_modules": [], "target_parameters": ["lm_head.weight"]}


def with_labels(begin: int, end: int) -> Any:
    batch = tokens(23)
    hidden = torch.ones_like(batch["labels"], dtype=torch.bool)
    hidden[:, begin:end] = False
    return {**batch, "labels": batch["labels"].masked_fill(hidden, -100)}


STEPS = [
    Step(why="full"),
    Step(why="tied weights", config={"tie_word_embeddings": True}),
    Step(why="softcap", model="gemma2"),
    Step(why="a scale", model="cohere"),
    Step(why="a division", model="granite"),
    Step(why="a bias", model="phi"),
    Step(why="LoRA", lora={"target_modules": ["q_proj", "v_proj"]}),
    Step(why="LoRA of the head", lora=ON_HEAD),
    Step(why="a trained copy of the head", lora=SAVED),
    Step(why="packed, odd length", batch=packed(9, 3, 11)),
    Step(why="padded", batch=padded(23, left=4, right=6)),
    Step(why="labels on one rank alone", batch=with_labels(2, 4)),
    Step(why="no labels at all but a count", batch={**with_labels(0, 0), "num_items_in_batch": torch.tensor(7)}),
    Step(why="a count of several batches", batch={**tokens(23), "num_items_in_batch": torch.tensor(97)}),
    Step(why="evaluation", trains=False),
    Step(why="DDP", wrap="DDP"),
    Step(why="DDP, LoRA of the head", wrap="DDP", lora=ON_HEAD),
]
SHARDED = [
    Step(why="FSDP2, the head with the rest", wrap="with the rest"),
    Step(why="FSDP2, tied weights", wrap="with the rest", config={"tie_word_embeddings": True}),
    Step(why="FSDP2, the head by itself", wrap="by itself"),
    Step(why="FSDP2, as accelerate wraps", wrap="tail"),
    Step(why="FSDP2, as accelerate wraps, two forwards a step", wrap="tail", forwards=2),
    Step(why="FSDP2, the head by itself, two forwards a step", wrap="by itself", forwards=2),
    Step(why="FSDP2, evaluation", wrap="by itself", trains=False),
    Step(why="FSDP2, a trained copy of the head", wrap="in parts", lora=SAVED),
]


def assert_equal(got: Answer, want: Answer) -> None:
    assert relative_error(got.loss, want.loss) < EXACT if want.loss else not got.loss
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        found = got.gradients[name]
        assert relative_error(found, gradient) < EXACT if gradient.any() else not found.any(), name


@pytest.mark.parametrize("step", [step for step in STEPS if not step.wrap], ids=lambda step: step.why)
def test_chunks_give_the_loss_of_all_logits(step: Step) -> None:
    got, want = jobs.both(step)
    assert (got.losses, got.made, want.losses) == (1, 5, 0), got.why
    assert_equal(got, want)


@pytest.mark.parametrize("step", [*STEPS, *SHARDED], ids=lambda step: step.why)
@pytest.mark.turns
def test_chunks_give_the_loss_of_all_logits_in_a_ring(ranks: Ranks, step: Step) -> None:
    for got, want in ranks(2).run(jobs.both, step):
        assert (got.losses, got.made, want.losses) == (1, 5, 0), got.why
        assert_equal(got, want)


def test_a_head_that_fsdp2_shards_in_parts_makes_logits(ranks: Ranks) -> None:
    for got, want in ranks(2).run(jobs.both, Step(why="", wrap="in parts", lora=ON_HEAD)):
        assert (got.losses, got.why) == (0, "its head has parts that FSDP2 shards each by itself")
        assert_equal(got, want)


OTHER_WEIGHTS = "its head reads trained weights of other modules"
WEIGHTS = "its head changes its weights in each call"
BUFFERS = "its head changes its buffers in each call"
FLOAT16 = "its logits are float16, whose gradients may overflow before the loss is scaled"


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (Step(why="another weight", change=jobs.reading_the_embedding), OTHER_WEIGHTS),
        (Step(why="a hook's weight", change=jobs.normalized), OTHER_WEIGHTS),
        (Step(why="a buffer of each call", change=jobs.normalized_in_each_call), BUFFERS),
        (Step(why="LoRA of the head's weight by its name", lora=BY_NAME), WEIGHTS),
        (Step(why="float16", change=jobs.in_float32, autocast=True), FLOAT16),
    ],
    ids=lambda value: getattr(value, "why", ""),
)
def test_a_head_whose_gradients_would_be_lost_makes_logits(step: Step, why: str) -> None:
    got, want = jobs.both(step)
    assert (got.losses, got.why) == (0, why)
    assert_equal(got, want)


DEFECTS: dict[str, tuple[object, str, Any]] = {
    "the softcap left out": (head, "through", lambda chain, x: x),
    "gradients of the weights lost": (chunked_loss, "add_wide", lambda total, gradient: torch.zeros_like(gradient)),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_seen(defect: str) -> None:
    where, name, wrong = DEFECTS[defect]
    step = Step(why="", model="gemma2")
    with mock.patch.object(where, name, wrong), pytest.raises(AssertionError):
        assert_equal(*jobs.both(step))


def test_no_tensor_of_tokens_times_vocabulary_is_made() -> None:
    logits = 2 * 57 * VOCABULARY
    assert jobs.most_values("sharded") == logits
    assert jobs.most_values("auto") < logits


def test_the_trial_step_sees_a_loss_in_chunks_that_is_wrong(ranks: Ranks) -> None:
    for error in ranks(2).run(jobs.with_a_defect):
        assert error.startswith("GradientDiffers: the self-check tried a step of LlamaForCausalLM"), error


# ---- logits that are read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gemma2", "llama"])  # with a softcap, and as the head made them
def test_logits_that_are_read_are_those_of_the_model(model: str) -> None:
    for name, ((got, gradients), (want, expected)) in logits_jobs.uses(model).items():
        if isinstance(want, Tensor):
            assert got.requires_grad == want.requires_grad, name
            torch.testing.assert_close(got * 1.0, want * 1.0, rtol=1e-6, atol=1e-6, msg=name)
        else:
            assert got == want, name
        assert gradients.keys() == expected.keys(), name
        for weight, gradient in expected.items():
            assert relative_error(gradients[weight], gradient) < 1e-5, (name, weight)


@pytest.mark.parametrize(
    ("wrap", "why"),
    [("", "its head, or the head's inputs, have changed"), ("by itself", "FSDP2 has freed the weights")],
)
def test_logits_that_can_no_longer_be_made_are_refused(ranks: Ranks, wrap: str, why: str) -> None:
    for error in ranks(2).run(logits_jobs.read_late, wrap):
        assert error.startswith("LogitsNotMade: ") and why in error and "RingConfig(loss='sharded')" in error


def test_a_head_whose_loss_is_refused_is_sharded_again(ranks: Ranks) -> None:
    """All of its weight stayed in memory."""
    assert ranks(2).run(logits_jobs.left_by_a_late_loss, "by itself") == [("LogitsNotMade", "DTensor")] * 2


@pytest.mark.parametrize("change", logits_jobs.CHANGES)
def test_logits_of_a_head_that_has_changed_are_refused(change: str) -> None:
    error = logits_jobs.read_after(change)
    assert error.startswith("LogitsNotMade: ") and "its head, or the head's inputs, have changed" in error


def test_logits_that_are_nan_may_be_read() -> None:
    found = logits_jobs.nans()
    assert found[3] == 46 and found.sum() == 46


def test_a_hook_on_the_gradient_of_logits_is_called_or_refused() -> None:
    halved, whole = logits_jobs.gradients_of_heads()
    assert relative_error(2 * halved, whole) < 1e-6
    late = "register_hook() needs their gradient, which a loss in chunks does not compute"
    assert late in logits_jobs.hooked_late()


def test_a_rank_alone_may_compute_a_loss_of_whole_logits(ranks: Ranks) -> None:
    first, other = ranks(2).run(logits_jobs.losses_of_one_rank)
    assert abs(first - other) < 1e-6


@pytest.mark.turns
@pytest.mark.parametrize("wrap", ["with the rest", "by itself", "tail"])
def test_an_evaluation_that_wants_logits_has_them_under_fsdp2(ranks: Ranks, wrap: str) -> None:
    for got, want in ranks(2).run(logits_jobs.read_after_eval, wrap):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrap", ["", "with the rest", "by itself"])
def test_a_call_without_labels_makes_logits(ranks: Ranks, wrap: str) -> None:
    for got, want in ranks(2).run(logits_jobs.without_labels, wrap):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_head_that_is_not_known_makes_logits_or_is_refused(ranks: Ranks) -> None:
    assert ranks(2).run(jobs.odd_head, "auto") == ["sharded (its head is OddHead, no linear layer)"] * 2
    for error in ranks(2).run(jobs.odd_head, "chunked"):
        assert error.startswith("LossNotChunked: loss='chunked' makes no logits, but LlamaForCausalLM made them all: ")
        assert "its head is OddHead, no linear layer" in error
