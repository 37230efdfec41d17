"""Decoders that attend both ways (embedding models), also by masks that they write themselves: as in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.models.gemma3.modeling_gemma3 import _bidirectional_window_overlay

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.integration.context.mask_functions import recognise
from hf_ring_attn.sharding.mask import BIDIRECTIONAL, Band
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import Batch, gradients_of, packed, padded, tokens
from tests.helpers.models.tiny_models import SIZES, build

EXACT = 3e-6
"""transformers keeps RMS norms and softmaxes in float32, whatever the model's dtype."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3": ("Gemma3ForCausalLM", {"use_bidirectional_attention": True, "query_pre_attn_scalar": 8}),
    "EmbeddingGemma, without a head": (
        "Gemma3TextModel", {"use_bidirectional_attention": True, "query_pre_attn_scalar": 8},
    ),
    "Gemma 4": (
        "Gemma4ForCausalLM",
        {"use_bidirectional_attention": "all", "hidden_size_per_layer_input": 0, "global_head_dim": 16},
    ),
}  # fmt: skip
SIDES = {"plain": tokens(23), "padded": padded(23, left=3, right=4)}
"""A token of padding sees a real one within the window of 5: where it sees none, eager attention makes nan of it."""


def model(kind: str, attention: str) -> nn.Module:
    name, own = KINDS[kind]
    types = ["sliding_attention", "full_attention"]
    return build(name, attention, **{**SIZES, "sliding_window": 8, "layer_types": types, **own}).double()


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """A loss of each row's mean, as of embeddings, which weighs every entry differently."""
    rows = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return (rows * torch.linspace(-1, 1, rows.numel(), dtype=rows.dtype).sin().view(rows.shape)).sum()


def answer(kind: str, batch: Batch, attention: str = "ring_fp32") -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states or logits [B, S, ...], and the gradients of `pooled`."""
    made = model(kind, attention)
    batch = {name: x for name, x in batch.items() if name != "labels"}
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    if attention != "ring_fp32":
        states = made(**batch, use_cache=False)[0]
        pooled(states, mask).backward()
        return states.detach(), gradients_of(made)
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        states = sharded.gather(made(**sharded.inputs)[0])
    pooled(states, mask).backward()
    sharded.reduce_gradients(made)
    return states.detach(), gradients_of(made)


alone = cache(lambda kind, side: answer(kind, SIDES[side], "eager"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.turns
def test_attention_both_ways_is_that_of_one_process(ranks: Ranks, kind: str, side: str, world_size: int) -> None:
    states, gradients = alone(kind, side)
    real = SIDES[side].get("attention_mask", torch.ones(2, 23)).bool()
    for got, found in ranks(world_size).run(answer, kind, SIDES[side]):
        assert relative_error(got[real], states[real]) < EXACT
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert relative_error(found[name], gradient) < 2 * EXACT, name


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_documents_alone(ranks: Ranks, kind: str) -> None:
    batch = packed(9, 3, 11)
    whole, _ = ranks(2).run(answer, kind, batch)[0]
    for part in torch.arange(23).split([9, 3, 11]):
        want, _ = answer(kind, {"input_ids": batch["input_ids"][:, part]}, "eager")
        assert relative_error(whole[:, part], want) < EXACT


def test_what_lies_ahead_matters() -> None:
    """Later tokens, within the window and beyond it, change what the tests above compare."""
    batch = {"input_ids": tokens(23)["input_ids"]}
    other = {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, -1] += 1
    for kind in KINDS:
        want, got = (answer(kind, given, "eager")[0][:, 0] for given in (batch, other))
        assert relative_error(got, want) > 1e-4, kind


# ---- the masks that models write themselves --------------------------------------------------------------------------


def window_both_ways(sliding_window: Any) -> Any:
    """In another file, with another docstring, the same code."""

    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> Any:
        """Twelve."""
        return abs(q_idx - kv_idx) < sliding_window

    return inner_mask


def wider(sliding_window: Any) -> Any:
    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> Any:
        return abs(q_idx - kv_idx) <= sliding_window

    return inner_mask


def test_functions_are_known_by_their_code() -> None:
    assert recognise(_bidirectional_window_overlay(5)) == Band(-4, 4)
    assert recognise(window_both_ways(5)) == Band(-4, 4)
    window = masking_utils.sliding_window_causal_mask_function(5)
    assert recognise(masking_utils.or_masks(window, _bidirectional_window_overlay(5))) == Band(-4, 4)
    everything = masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda *args: torch.tensor(True, dtype=torch.bool)
    )
    assert recognise(everything) == BIDIRECTIONAL


def with_names_in_another_order(sliding_window: int) -> Any:
    def inner_mask(q_idx: int, kv_idx: int, batch_idx: int, head_idx: int) -> bool:
        return abs(q_idx - kv_idx) < sliding_window

    return inner_mask


ALMOST: dict[str, Any] = {
    "other places of the same names": with_names_in_another_order(5),
    "no whole number": window_both_ways(4.5),
    "another comparison": wider(5),
    "another constant": lambda *args: torch.tensor(False, dtype=torch.bool),
    "another keyword": lambda *args: torch.tensor(True, device=torch.bool),  # type: ignore[arg-type]
    "other arguments": lambda args: torch.tensor(True, dtype=torch.bool),
}


@pytest.mark.parametrize("why", ALMOST)
def test_other_code_is_not_known(why: str) -> None:
    with pytest.raises(errors.UnknownMask):
        recognise(ALMOST[why])


def test_other_objects_under_the_same_names_are_not_known() -> None:
    names: dict[str, Any] = {"abs": lambda x: x}
    exec("def make(sliding_window):\n"
         " def inner_mask(batch_idx, head_idx, q_idx, kv_idx):\n"
         "  return abs(q_idx - kv_idx) < sliding_window\n"
         " return inner_mask", names)  # fmt: skip
    with pytest.raises(errors.UnknownMask):
        recognise(names["make"](5))
    del names["abs"]
    assert recognise(names["make"](5)) == Band(-4, 4)
