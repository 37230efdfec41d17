"""What a model's structure says against a ring, and masks that a model takes for tensors: refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import hf_ring_attn
import tests.helpers.jobs.refusal_jobs as jobs
from hf_ring_attn import errors
from hf_ring_attn.integration.context.batch_context import Opaque
from hf_ring_attn.integration.model import structure
from tests.helpers.contexts import ring_of_two
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.jobs.refusal_jobs import Forward
from tests.helpers.models.tiny_models import SIZES, build, tiny

BART = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "dropout": 0.0}
DOGE = {"keep_window_size": 8}
MOBILE = {
    "embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def with_convolution(model: Any) -> Any:
    model.model.layers[0].mlp.mixer = nn.Conv1d(32, 32, 3, padding=1)
    return model


def that_renormalizes(model: Any) -> Any:
    model.model.embed_tokens.max_norm = 0.5
    return model


def that_counts_tokens(model: Any) -> Any:
    model.model.embed_tokens.scale_grad_by_freq = True
    return model


FORWARDS = [
    Forward(
        why="positions of a decoder that takes none", kind="BartForCausalLM", sizes=False,
        config={**BART, "vocab_size": 97, "pad_token_id": 0},
        text="no part of it takes position_ids, so each rank would number its own tokens from 0",
    ),
    Forward(
        why="embeddings joined with their neighbours'", kind="MobileBertForMaskedLM", config=MOBILE, labelled=False,
        text="(MobileBertEmbeddings) joins each token's embedding with its neighbours', which are on other ranks",
    ),
    Forward(
        why="a convolution along the sequence", change=with_convolution,
        text="model.layers.0.mlp.mixer (Conv1d) mixes neighbouring tokens, which are on other ranks",
    ),
    Forward(
        why="embeddings that change with the tokens of a batch", change=that_renormalizes,
        text="model.embed_tokens (Embedding) has max_norm=0.5, which looks at all tokens of a batch",
    ),
    Forward(
        why="embeddings whose gradient depends on the tokens of a batch", change=that_counts_tokens,
        text="model.embed_tokens (Embedding) has scale_grad_by_freq=True, which looks at all tokens of a batch",
    ),
    Forward(
        why="a mask taken for a tensor", kind="DogeForCausalLM", config=DOGE, error="MaskIsNoTensor",
        text="the model uses its attention mask as a tensor (.dtype), but a ring's mask is no tensor",
    ),
]  # fmt: skip


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.why)
def test_a_model_is_refused_on_every_rank(ranks: Ranks, forward: Forward) -> None:
    for raised in ranks(2).run(jobs.refused, forward):
        assert raised is not None, "not refused"
        assert raised[0] == forward.error, raised
        assert forward.text in raised[1]


def test_what_looks_at_single_tokens_is_exact() -> None:
    model = tiny("llama", "ring_fp32")
    model.model.layers[0].mlp.mixer = nn.Conv1d(32, 32, 1)
    assert list(structure.unsupported(model, ring_of_two())) == []


def test_a_model_with_a_table_of_its_own_is_refused_when_it_is_made() -> None:
    own = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 97}
    needed = r"FalconForCausalLM .* its code takes its attention from its own table \(FALCON_ATTENTION_CLASSES\)"
    with pytest.raises(errors.UnsupportedModel, match=needed):
        build("FalconForCausalLM", "ring_fp32", **own)
    assert build("FalconForCausalLM", "eager", **own) is not None
    hf_ring_attn.uninstall()
    try:
        with pytest.raises(ValueError, match="is not supported"):  # transformers' own words
            build("FalconForCausalLM", "ring_fp32", **own)
    finally:
        hf_ring_attn.install()


class Lazy(dict[str, Any]):
    """As transformers' auto mappings, which `from transformers import *` puts into a program's file."""

    def get(self, key: str, default: Any) -> Any:  # type: ignore[override]  # as theirs
        return super().get(key, default)


LAZY = Lazy()


class InThisFile(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' own
    """A program's own class."""


def test_the_file_of_a_model_may_hold_any_dict_and_may_be_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading failed with a TypeError from a mapping, and with a KeyError for code that was run from no module."""
    assert build(InThisFile, "ring_fp32", **SIZES) is not None
    monkeypatch.setattr(InThisFile, "__module__", "run_by_the_program")
    assert build(InThisFile, "ring_fp32", **SIZES) is not None


USES: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda mask: 1.0 - mask,
    "indexing": lambda mask: mask[:, :, :4],
    "torch's functions": lambda mask: torch.where(mask, 0.0, 1.0),
    "a tensor's own function": lambda mask: torch.ones(2) + mask,
    "an attribute": lambda mask: mask.shape,
    "iteration": list,
}


@pytest.mark.parametrize("use", USES)
def test_a_mask_is_no_tensor(use: str) -> None:
    with pytest.raises(errors.MaskIsNoTensor, match="a model that computes with its mask cannot run in a ring"):
        USES[use](Opaque())


def test_a_mask_can_be_asked_and_taken_whole() -> None:
    mask = Opaque()
    assert not hasattr(mask, "dtype") and bool(mask) and mask == mask and len({mask}) == 1
    assert mask[:, :, slice(0, None), :] is mask


def test_the_complex_positions_of_deepseek_are_those_of_the_whole_row(ranks: Ranks) -> None:
    """Its dynamic RoPE gives one complex tensor, not a cosine and a sine."""
    config = {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    }  # fmt: skip
    batch = tokens(24)
    want = build("DeepseekV2ForCausalLM", "eager", **{**SIZES, **config})(**batch, use_cache=False).logits
    for got in ranks(2).run(logits, "DeepseekV2ForCausalLM", {**SIZES, **config}, batch):
        assert (got - want).norm() < 2e-6 * want.norm()


def logits(kind: str, config: dict[str, Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model = build(kind, "ring_fp32", **config)
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        return sharded.gather(model(**sharded.inputs).logits)
