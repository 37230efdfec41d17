"""Layers beside attention that look along the row, of a program's own: each rank computes them on whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_ring_attn
import tests.helpers.jobs.whole_layer_jobs as jobs
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import Batch, tokens
from tests.helpers.models.tiny_models import tiny

EXACT = 1e-6
"""transformers' loss is float32."""
IN_PACKED_ROWS = {"a loss beside tokens", "a mean in an attribute"}
"""Of what these use, each document has its own: they are refused there."""
MEMORY = "a memory"
EQUAL = jobs.documents(12, 12)
"""Each document has as many tokens as a rank of two."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("change", [change for change in jobs.CHANGES if change != MEMORY])
def test_whole_rows(ranks: Ranks, change: str) -> None:
    assert max(ranks(2).run(jobs.away, change, [tokens(23)])) < EXACT


@pytest.mark.turns(4)
@pytest.mark.parametrize("batch", [jobs.documents(9, 14), EQUAL], ids=["documents", "equal documents"])
@pytest.mark.parametrize("change", [change for change in jobs.CHANGES if change not in {*IN_PACKED_ROWS, MEMORY}])
def test_documents(ranks: Ranks, change: str, batch: Batch) -> None:
    assert max(ranks(2).run(jobs.away, change, [batch])) < EXACT


@pytest.mark.parametrize("change", sorted(IN_PACKED_ROWS))
def test_what_each_document_has_for_itself_is_refused(ranks: Ranks, change: str) -> None:
    """A loss was left out without a word, and an attribute had the last document's mean."""
    for size in (1, 2):
        for raised in ranks(size).run(jobs.refused, change, [jobs.documents(9, 14)]):
            assert raised is not None, "not refused"
            assert raised[0] == "UnsupportedModel"
            assert "in packed rows it is called for each document" in raised[1]


def test_a_state_with_as_many_rows_as_a_rank_has_tokens(ranks: Ranks) -> None:
    """It was gathered: "Expected hidden size (1, 12, 32), got [1, 23, 32]"."""
    assert max(ranks(2).run(jobs.away, "a first state", [tokens(23, rows=12)])) < EXACT


@pytest.mark.parametrize("batch", [tokens(23), jobs.documents(9, 14)], ids=["rows", "documents"])
@pytest.mark.parametrize("checkpointing", ["recomputed", "reentrant"])
@pytest.mark.parametrize("change", ["a short convolution in MLPs", "a convolution that takes tokens"])
def test_recomputed(ranks: Ranks, change: str, checkpointing: str, batch: Batch) -> None:
    """A layer that gets no mask was refused in the backward."""
    assert max(ranks(2).run(jobs.away, change, [batch], checkpointing)) < EXACT


def test_recomputed_with_two_batches_alive(ranks: Ranks) -> None:
    change, one, other = "a short convolution in MLPs", jobs.documents(9, 14), jobs.documents(5, 18)
    assert max(ranks(2).run(jobs.away, change, [one, one], "recomputed")) < EXACT
    assert max(ranks(2).run(jobs.away, change, [one, jobs.documents(9, 18)], "recomputed")) < EXACT
    for raised in ranks(2).run(jobs.refused, change, [one, other], "recomputed"):
        assert raised is not None, "not refused"
        assert "packed batches of other documents are in use" in raised[1]


def test_whole_rows_are_recomputed_after_a_ring(ranks: Ranks) -> None:
    """They were refused: the layer had run in a ring."""
    assert max(ranks(2).run(jobs.plain_between)) < EXACT


def test_an_input_with_as_many_entries_as_a_rank_has_tokens(ranks: Ranks) -> None:
    """It was gathered as tokens, so the layer had it twice."""
    assert max(ranks(2).run(jobs.away, MEMORY, [tokens(19)])) < EXACT
    for raised in ranks(2).run(jobs.refused, MEMORY, [tokens(23)]):
        assert raised is not None, "not refused"
        assert "has as many entries as a rank has tokens" in raised[1]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@torch.no_grad()
def test_a_layer_that_ctrl_c_interrupts_leaves_its_rows_to_no_other_model() -> None:
    """A layer of another model that gets no mask took the documents of those rows: logits were 2.0 off."""
    packed, whole = jobs.documents(9, 14), {"input_ids": tokens(23)["input_ids"], "use_cache": False}
    other: Any = tiny("llama", "ring_fp32")
    other.model.norm = jobs.Within(other.model.norm, jobs.Short())
    with hf_ring_attn.shard(packed) as sharded:
        other(**sharded.inputs)
    want = other(**whole).logits
    model = jobs.made("a short convolution in MLPs", "ring_fp32")
    model.model.layers[1].input_layernorm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), (sharded := hf_ring_attn.shard(packed)):
        model(**sharded.inputs)
    assert torch.equal(other(**whole).logits, want)


@pytest.mark.turns(4)
@pytest.mark.parametrize("keeps_old", [False, True], ids=["alone", "beside the old one"])
@pytest.mark.parametrize("kinds", jobs.EXCHANGES)
def test_a_convolution_that_comes_between_batches_and_another_in_its_place(
    ranks: Ranks, kinds: str, keeps_old: bool
) -> None:
    """What was found out about the model before does not hold for it, nor do the rows of the old layer's calls."""
    for far in ranks(2).run(jobs.exchanged, kinds, jobs.documents(9, 14), keeps_old):
        assert max(far) < EXACT, far
