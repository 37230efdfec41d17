"""The body of a head of whole rows, called twice in one batch: each call has its own documents and its own padding.

The masks of the first call were the masks of both: a loss was 0.57 off 2.59, without an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import gradients_of
from tests.helpers.models.tiny_models import MODELS, SIZES, VOCABULARY, build

ROWS, LENGTH = 2, 26
Call = dict[str, Tensor]


def packed(*documents: int) -> Call:
    return {"position_ids": torch.cat([torch.arange(n) for n in documents])[None].expand(ROWS, -1)}


def padded(left: int) -> Call:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[0, :left] = 0
    return {"attention_mask": mask}


CALLS = {
    "one document, then two": [packed(26), packed(9, 17)],
    "two documents, then one": [packed(9, 17), packed(26)],
    "other documents": [packed(9, 17), packed(12, 14)],
    "no padding, then some": [padded(0), padded(7)],
    "less padding": [padded(7), padded(3)],
}
KINDS = {
    "llama": ("LlamaForSequenceClassification", "llama"),
    "hybrid": ("Qwen3_5TextForSequenceClassification", "qwen3_5"),
}


def twice(kind: str, attention: str, calls: list[Call], checkpointed: bool) -> Any:
    """A classifier that adds the losses of several calls of its body."""
    name, sizes = KINDS[kind]
    made: Any = build(name, attention, **{**SIZES, **MODELS[sizes][1], "num_labels": 3}).double().train()
    if checkpointed:
        made.gradient_checkpointing_enable()

    class Twice(type(made)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SequenceClassifierOutput:
            loss = input_ids.new_zeros((), dtype=torch.float64)
            for call in calls:
                states = self.model(input_ids=input_ids, use_cache=False, **call).last_hidden_state
                logits = self.score(states[:, -1])
                loss = loss + nn.functional.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)

    Twice.__name__ = type(made).__name__
    made.__class__ = Twice
    return made


def batch() -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": torch.tensor([0, 2])}


def in_a_ring(kind: str, calls: list[Call], checkpointed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = twice(kind, "ring_fp32", calls, checkpointed)
    with hf_ring_attn.shard(batch(), model=model) as sharded:
        loss = model(**sharded.inputs).loss
    loss.backward()
    sharded.reduce_gradients(model)
    return sharded.reduce(loss), gradients_of(model)


def alone(calls: list[Call]) -> tuple[Tensor, dict[str, Tensor]]:
    model = twice("llama", "sdpa", calls, False)
    loss = model(**batch()).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


@pytest.mark.turns(4)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_each_call_has_its_own_mask(ranks: Ranks, calls: list[Call], checkpointed: bool) -> None:
    loss, gradients = alone(calls)
    for got, found in ranks(2).run(in_a_ring, "llama", calls, checkpointed):
        assert relative_error(got, loss) < 1e-11
        for name, gradient in gradients.items():
            assert relative_error(found[name], gradient) < 1e-10, name


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_each_call_of_a_hybrid_has_its_own_documents(ranks: Ranks, checkpointed: bool) -> None:
    """As in a batch of its own: in one process transformers' recurrent layers do not see these documents."""
    calls = CALLS["other documents"]
    (one, _), (other, _) = (ranks(2).run(in_a_ring, "hybrid", [call], checkpointed) for call in calls)
    assert relative_error(one[0], other[0]) > 1e-3, "documents change nothing, so this shows nothing"
    for got, found in ranks(2).run(in_a_ring, "hybrid", calls, checkpointed):
        assert relative_error(got, one[0] + other[0]) < 1e-6
        for name, gradient in one[1].items():
            assert relative_error(found[name], gradient + other[1][name]) < 1e-5, name
