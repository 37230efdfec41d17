"""Attention of a program's own, of an unknown layer type: exact on whole documents, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hf_ring_attn
import tests.helpers.jobs.own_attention_jobs as jobs
from hf_ring_attn.integration.model.document_attributes import give_back_all
from hf_ring_attn.integration.model.written_arguments import call_with
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import Batch, tokens
from tests.helpers.jobs.whole_layer_jobs import documents
from tests.helpers.models.tiny_models import tiny

EXACT = 1e-6
"""transformers' loss is float32."""
EQUAL = documents(12, 12)
"""Each document has as many tokens as a rank of two."""
AS_MANY_ROWS = tokens(23, rows=12)
"""As many rows as a rank has tokens."""


@pytest.mark.turns(4)
@pytest.mark.parametrize("kind", [*jobs.EXACT, *jobs.SHARING])
def test_rows(ranks: Ranks, kind: str) -> None:
    """Keys in a dict were lost: silently, also in the self-check. What stood in place of weights was dropped."""
    assert max(ranks(2).run(jobs.away, kind, [tokens(23), AS_MANY_ROWS])) < EXACT


@pytest.mark.turns(4)
@pytest.mark.parametrize("batch", [documents(9, 14), EQUAL], ids=["documents", "equal documents"])
@pytest.mark.parametrize("kind", jobs.EXACT)
def test_documents(ranks: Ranks, kind: str, batch: Batch) -> None:
    assert max(ranks(2).run(jobs.away, kind, [batch])) < EXACT


@pytest.mark.parametrize("self_check", [True, False], ids=["checked", "unchecked"])
def test_tokens_without_an_axis_of_rows(ranks: Ranks, self_check: bool) -> None:
    """They were refused as a bug of this package. A rank has as many tokens as there are heads, and as RoPE's width."""
    lengths = (7, 23, 15)
    assert max(ranks(2).run(jobs.away, "no batch axis", [tokens(length) for length in lengths], self_check)) < EXACT
    assert max(ranks(4).run(jobs.away, "no batch axis", [tokens(23)], False)) < EXACT


@pytest.mark.parametrize("kind", jobs.SHARING)
def test_what_each_document_writes_for_itself_is_refused(ranks: Ranks, kind: str) -> None:
    """Documents of equal length took the last one's choice, silently."""
    words = "in its attribute chosen" if kind == jobs.CHOICE else "keeps a tensor in a dict"
    for batch in (documents(9, 14), EQUAL):
        for raised in ranks(2).run(jobs.refused, kind, [batch]):
            assert raised is not None, "not refused"
            assert raised[0] == "UnsupportedModel" and words in raised[1]


def after_packed_rows() -> bool:
    """Whether a copy, a call outside of the ring, and a model without the package have what the layer kept."""
    model = jobs.made("its own attribute", "ring_fp32")
    with (sharded := hf_ring_attn.shard(documents(9, 14), model=model)):
        model(**sharded.inputs)
    copied: Any = copy.deepcopy(model.model.layers[0].self_attn.attention)
    ids = tokens(14)["input_ids"]
    own = jobs.made("its own attribute", None)
    alike = torch.allclose(model(input_ids=ids).logits, own(input_ids=ids).logits, atol=1e-6)
    with (sharded := hf_ring_attn.shard(documents(9, 14), model=model)):
        model(**sharded.inputs)
    give_back_all()
    kept = model.model.layers[0].self_attn.attention.count
    return alike and torch.equal(copied.count, torch.arange(14)) and torch.equal(kept, torch.arange(14))


def test_a_layer_has_what_it_kept(ranks: Ranks) -> None:
    assert all(ranks(2).run(after_packed_rows))


@pytest.mark.parametrize("self_check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [("both ways", "is_causal=False"), ("a bias of pairs", "each two tokens"), ("pairs that see", "each two tokens")],
)
def test_what_is_not_exact_is_refused(ranks: Ranks, kind: str, words: str, self_check: bool) -> None:
    """The self-check did not see that sdpa attends both ways without a mask: its whole row has one."""
    for batch in (tokens(23), EQUAL):
        for raised in ranks(2).run(jobs.refused, kind, [batch], self_check):
            assert raised is not None, "not refused"
            assert words in raised[1], raised


def short_rows() -> list[float]:
    far = []
    for name in ("minimax m3", "glm 5.3"):
        own, model = (tiny(name, attention).eval() for attention in (None, "ring_fp32"))  # type: ignore[no-untyped-call]
        for length in (1, 2, 3):
            batch = {"input_ids": tokens(length)["input_ids"]}
            with (sharded := hf_ring_attn.shard(batch, model=model)), torch.no_grad():
                logits: Any = sharded.gather(model(**sharded.inputs).logits)
            far.append(float((logits - own(**batch, use_cache=False).logits).detach().abs().max()))
    return far


def test_rows_of_as_many_tokens_as_a_rank(ranks: Ranks) -> None:
    """Two rows of two tokens, as many as a rank has with its padding, were refused as a table of pairs."""
    assert max(max(far) for far in ranks(2).run(short_rows)) < 1e-4


def test_a_layer_writes_into_the_programs_own_containers() -> None:
    x, y = torch.zeros(1), torch.ones(1)

    def layer(given: dict[str, Any], beside: list[Any]) -> str:
        assert given["x"] is y and beside == [y, 3]
        given["new"] = given.pop("x")
        beside[1:] = [given["new"], y + 1]
        return "found"

    own: dict[str, Any] = {"x": x, "kept": 1}
    beside: list[Any] = [x, 3]
    assert call_with(layer, [own], {"beside": beside}, lambda one: y if one is x else one) == ("found", True)
    assert own.keys() == {"kept", "new"} and own["new"] is x
    assert beside[0] is x and beside[1] is x and float(beside[2]) == 2
    assert call_with(lambda one: one.setdefault("n", 1), [own], {}, lambda one: one) == (1, False)


def test_a_container_that_a_layer_gets_twice_is_one() -> None:
    """It read nothing of what it had written by another name."""
    own = {"x": torch.zeros(1)}

    def layer(given: dict[str, Any], state: dict[str, Any]) -> Any:
        given["new"] = 3
        return state["cache"]["new"]

    assert call_with(layer, [own], {"state": {"cache": own}}, lambda one: 1) == (3, False)
    assert own["new"] == 3
