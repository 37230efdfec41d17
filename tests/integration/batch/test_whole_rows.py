"""Losses of a loop's own that need whole rows, with `whole_rows`: values and gradients are those of one process."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import one_call_jobs
from tests.helpers.jobs import whole_call_jobs as jobs
from tests.helpers.jobs.comparison import Ranks, on_two_or_four
from tests.helpers.jobs.plain_jobs import packed, padded, tokens
from tests.helpers.jobs.whole_call_jobs import Answer, Case
from tests.helpers.models.tiny_models import tiny

IN_FLOAT64 = 3e-6
"""transformers keeps RMS norms and rotary embeddings in float32, whatever the model's dtype."""
CASES = [
    Case("weights by tokens and places", jobs.weighed),
    Case("weights by tokens and places, padded", jobs.weighed, batch=padded(23, 4, 3)),
    Case("weights by tokens and places, documents", jobs.weighed, batch=packed(9, 14)),
    Case("under DDP", jobs.weighed, wrap="DDP"),
    Case("under FSDP2", jobs.weighed, wrap="FSDP2"),
    Case("LoRA", jobs.weighed, wrap="LoRA"),
    Case("reentrant checkpoints", jobs.weighed, wrap="checkpointed"),
    Case("compiled", jobs.weighed, wrap="compiled"),
    Case("compiled in place", jobs.weighed, wrap="compiled in place"),
    Case("a window", jobs.weighed, model="mistral"),
    Case("positions that are learnt", jobs.weighed, model="gpt2"),
    Case("capped logits", jobs.weighed, model="gemma2"),
    Case("the model's loss and more", jobs.of_the_model),
    Case("the model's loss and more, experts", jobs.of_the_model, model="mixtral", dtype=torch.float32),
    Case("the model's loss and more, DDP", jobs.of_the_model, wrap="DDP"),
    Case("the model's loss and more, FSDP2", jobs.of_the_model, wrap="FSDP2"),
    Case("the model's loss and more, compiled", jobs.of_the_model, wrap="compiled"),
    Case("the model's loss and a function with a backward of its own", jobs.of_a_function),
    Case("the model's loss and a function with a backward of its own, DDP", jobs.of_a_function, wrap="DDP"),
    Case("the model's loss alone", jobs.of_the_model_alone),
    Case("the model's loss alone, LoRA", jobs.of_the_model_alone, wrap="LoRA"),
    Case("outputs without names", jobs.of_a_tuple),
    Case("two lengths", jobs.of_two_calls),
    Case("two lengths, FSDP2", jobs.of_two_calls, wrap="FSDP2"),
    Case("some logits", jobs.of_kept_logits),
    Case("embeddings", jobs.of_embeddings, base=True, batch=padded(23, 4, 3)),
    Case("clipped as the backward left them", jobs.weighed, clips=True),
    Case("clipped as the backward left them, LoRA", jobs.of_the_model, wrap="LoRA", clips=True),
    Case("a chain, and a gradient of its input", jobs.of_a_chain),
    Case("by its forward", jobs.of_a_forward),
    Case("under DDP with a static graph", jobs.weighed, wrap="static DDP"),
    Case("gradients of weights", jobs.of_gradients),
    Case("gradients of weights, DDP", jobs.of_gradients, wrap="DDP"),
    Case("the last states twice", jobs.of_states, base=True),
    Case("a teacher and a generated text", jobs.distilled),
    Case("a teacher and a generated text, LoRA", jobs.distilled, wrap="LoRA"),
]  # fmt: skip


@cache
def alone(case: Case) -> Answer:
    return jobs.answer(case, in_ring=False)


def assert_same(got: Answer, want: Answer, exact: float = IN_FLOAT64) -> None:
    assert relative_error(got.loss, want.loss) < exact
    assert got.gradients.keys() >= want.gradients.keys()
    largest = max(float(x.abs().max()) for x in want.gradients.values())
    for name, x in got.gradients.items():
        wanted = want.gradients.get(name, torch.zeros_like(x))
        assert relative_error(x, wanted) < exact or float((x - wanted).abs().max()) < 1e-9 * largest, name


@pytest.mark.parametrize(("case", "size"), on_two_or_four(CASES))
@pytest.mark.turns
def test_a_loss_of_whole_rows_is_that_of_one_process(ranks: Ranks, case: Case, size: int) -> None:
    for got in ranks(size).run(jobs.answer, case):
        assert_same(got, alone(case), IN_FLOAT64 if case.dtype == torch.float64 else 3e-5)


@pytest.mark.parametrize("wrap", ["", "DDP", "compiled"])
def test_a_module_of_a_programs_own_calls_the_model_inside(ranks: Ranks, wrap: str) -> None:
    """Compiled, a second batch failed: "Attempt to trace forbidden callable"."""
    want = jobs.around(wrap, in_ring=False)
    for got in ranks(2).run(jobs.around, wrap):
        assert_same(got, want)


def test_a_model_of_a_programs_own_may_return_and_keep_anything(ranks: Ranks) -> None:
    want = jobs.parsed(in_ring=False)
    for got in ranks(2).run(jobs.parsed):
        assert_same(got, want)


@pytest.mark.parametrize("by_grad", [False, True], ids=["backward", "grad"])
@pytest.mark.parametrize("loss", [jobs.weighed, jobs.of_the_model_alone])
def test_a_weight_of_a_programs_own_inside_the_model(ranks: Ranks, loss: jobs.Loss, by_grad: bool) -> None:
    """Each rank kept the gradient of its tokens, silently: lengths of 0.348 and 0.395 after three steps for 0.303."""
    want = jobs.steered(loss, False, by_grad)
    for got in ranks(2).run(jobs.steered, loss, True, by_grad):
        assert_same(got, want)


def test_a_call_without_a_backward_leaves_other_steps_alone(ranks: Ranks) -> None:
    assert ranks(2).run(one_call_jobs.of_two_ways) == ["", ""]


@pytest.mark.parametrize("by_grad", [False, True], ids=["backward", "grad"])
def test_a_call_leaves_attention_without_a_model_alone(ranks: Ranks, by_grad: bool) -> None:
    assert ranks(2).run(one_call_jobs.beside_an_attention, by_grad) == [True, True]


def test_a_copy_of_a_model_is_its_own(ranks: Ranks) -> None:
    for first, second in ranks(2).run(one_call_jobs.of_a_copy):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


REFUSED = {
    "other rows": "RanksDiffer: .*input_ids",
    "another loss on each rank": "RanksDiffer: .*gradient of what a model returned for whole rows.*the same loss",
    "no call": "$",
    "a cache": "CacheNotKept: ",
    "other signs on each rank": "RanksDiffer: .*the same loss",
    "rows of all ranks": "SameRowsGathered: the same rows .* the 2 ranks of a ring have one batch",
    "rows of all ranks, in one tensor": "SameRowsGathered: ",
    "rows of all ranks, by a function with gradients": "SameRowsGathered: ",
    "rows of a queue": "SameRowsGathered: ",
    "states of a hook": "PastOutputs: ",
    "states of a hook, biased scores": "PastOutputs: ",
    "a penalty on a gradient": "SecondGradient: ",
    "a gradient for each row": "UnsupportedVmap: LlamaForCausalLM was called in a ring",
    "a gradient for each row, in one backward": "UnsupportedVmap: .*is_grads_batched",
    "a gradient by a state": "GradientOfState: .* its loss by hidden_states.1, but later layers",
    "a kept gradient of a state": "GradientOfState: ",
    "a number of each rank": "$",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_ranks_do_not_do_alike_is_refused(ranks: Ranks, how: str) -> None:
    for error in ranks(2).run(jobs.error_of, how):
        assert re.match(REFUSED[how], error), error


def test_options_for_the_loss_of_a_model_change_nothing(ranks: Ranks) -> None:
    found = [ranks(2).run(jobs.of_options, loss)[0] for loss in ("auto", "sharded", "chunked", "gathered")]
    assert all(words == "on gathered outputs" for words, _ in found), found
    assert len({loss for _, loss in found}) == 1


def test_one_process_needs_no_ring() -> None:
    model = tiny("llama", "ring_fp32")
    batch = tokens(23)
    with hf_ring_attn.whole_rows(model) as rows:
        loss = jobs.weighed(model, batch)
    loss.backward()
    rows.reduce_gradients(model)
    assert float(loss) == pytest.approx(float(jobs.weighed(tiny("llama"), batch)), rel=1e-6)


def test_a_loss_that_a_forward_computes_needs_a_call_without_labels() -> None:
    """The error told a loop to call the model in whole_rows, where it had raised it (ElectraForPreTraining)."""
    text = str(hf_ring_attn.errors.LossNotSharded("the loss of Model", again=True))
    assert text.endswith("call the model in hf_ring_attn.whole_rows(model), without labels.")


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(hf_ring_attn.RingAttentionError, match="models"), hf_ring_attn.whole_rows("llama"):  # type: ignore[arg-type]
        pass
