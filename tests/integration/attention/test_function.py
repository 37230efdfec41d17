"""The attention function: outside a ring it decodes as transformers does, and what it cannot do it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_ring_attn import RingConfig, errors, kernels, ring_attention
from hf_ring_attn.attention import kernel_choice
from hf_ring_attn.biases import Alibi
from hf_ring_attn.integration.attention import function
from hf_ring_attn.integration.attention.function import ring_attention_forward
from hf_ring_attn.integration.attention.masks import ring_mask
from hf_ring_attn.integration.context.batch_context import MaskSpec
from hf_ring_attn.kernels import Request
from hf_ring_attn.kernels.reference import Reference
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import packed, tokens, told
from tests.helpers.models.tiny_models import tiny

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 4, 2, 10, 8


def qkv(dtype: torch.dtype = torch.float32, keys: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((HEADS, LENGTH), (KV_HEADS, keys), (KV_HEADS, keys))
    return tuple(torch.randn(BATCH, heads, tokens, WIDTH).to(dtype) for heads, tokens in shapes)  # type: ignore[return-value]


def causal() -> MaskSpec:
    spec = ring_mask(BATCH, LENGTH, LENGTH)
    assert isinstance(spec, MaskSpec)
    return spec


def in_a_batch() -> MaskSpec:
    spec = causal()
    spec.in_batch = True
    return spec


class Layer(nn.Module):
    """What transformers' own attention functions read of the module that calls them."""

    is_causal = True
    num_key_value_groups = HEADS // KV_HEADS


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_a_ring_it_is_sdpa(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    out, weights = ring_attention_forward(
        Layer(), q, k, v, causal(), scaling=0.3, position_ids=None, sliding_window=None
    )
    want = sdpa_attention_forward(Layer(), q.double(), k.double(), v.double(), None, scaling=0.3)[0]
    assert weights is None
    assert out.dtype == dtype and out.shape == (BATCH, LENGTH, HEADS, WIDTH) and out.is_contiguous()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=2 * rounding, atol=2 * rounding)


@pytest.mark.parametrize("asked", ["auto", "reference"])
def test_the_line_tells_what_a_faster_kernel_lacks(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faster(Reference):
        name = "faster"

        def lacks(self, request: Request) -> list[str]:
            return ["its package does not import"]

        unsupported = lacks

    lines: list[str] = []
    monkeypatch.setattr(kernels, "KERNELS", {"faster": Faster(), **kernels.KERNELS})
    monkeypatch.setattr(function, "say", lines.append)
    kernel_choice.why_not_preferred.cache_clear()
    spec = causal()
    spec.config = RingConfig(kernel=asked)
    ring_attention_forward(Layer(), *qkv(), spec)
    kernel_choice.why_not_preferred.cache_clear()
    why = " (not faster: its package does not import)" if asked == "auto" else ""
    assert lines == [f"no ring active; kernel reference{why}"]


def test_queries_and_keys_of_different_dtypes() -> None:
    """PEFT and norms hand over float32 queries beside bfloat16 values: the widest counts, the query's comes back."""
    q, k, v = qkv(torch.bfloat16)
    out, _ = ring_attention_forward(Layer(), q.float(), k, v, causal())
    want, _ = ring_attention_forward(Layer(), q.float(), k.float(), v.float(), causal())
    assert out.dtype == torch.float32
    assert torch.equal(out, want)


def test_under_autocast_it_computes_as_sdpa_does() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = ring_attention_forward(Layer(), q, k, v, causal())
    want, _ = ring_attention_forward(Layer(), q.bfloat16(), k.bfloat16(), v.bfloat16(), causal())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)


def test_another_mask_means_another_attention() -> None:
    """A vision tower, say: a tensor or nothing is sdpa's business."""
    q, k, v = qkv()
    mask = torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.3
    for given in (mask, None):
        out, _ = ring_attention_forward(Layer(), q, k, v, given, is_causal=False)
        assert torch.equal(out, sdpa_attention_forward(Layer(), q, k, v, given, is_causal=False)[0])


# ---- generation ------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "with a draft": {"prompt_lookup_num_tokens": 2},
}
GENERATED = [(model, "greedy") for model in ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "deepseek_v3")]
GENERATED += [("deepseek_v32", "greedy"), ("glm_moe_dsa", "greedy"), ("deepseek_v32", "no cache")]
GENERATED += [("llama", way) for way in WAYS if way != "greedy"]
GENERATED += [(model, way) for model in ("gemma2", "gpt_oss") for way in ("a static cache", "no cache")]


@pytest.mark.parametrize(("model", "way"), GENERATED)
@pytest.mark.turns
def test_generate_is_that_of_transformers(model: str, way: str) -> None:
    """Past the window, with the first row padded on the left."""
    prompt = torch.randint(1, 97, (1 if way == "with a draft" else 2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    texts, scores = [], []
    for attention in (None, "ring_fp32"):
        net: Any = tiny(model, attention)
        found = net.eval().generate(
            prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, output_scores=True,
            return_dict_in_generate=True, **WAYS[way],
        )  # fmt: skip
        texts.append(found.sequences)
        scores.append(torch.stack(found.scores))
    assert torch.equal(*texts)
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


def generated_by_units(prompt: Tensor) -> Tensor:
    """The text of a model whose layers of attention FSDP2 shards each by itself."""
    net: Any = tiny("gemma2", "ring_fp32")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*(layer.self_attn for layer in net.model.layers), net):
        fully_shard(part, mesh=mesh)
    text: Tensor = net.eval().generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return text


def test_a_layer_of_attention_that_is_a_unit_of_fsdp2_decodes_by_its_own_file(ranks: Ranks) -> None:
    """FSDP2 makes a subclass in a file of its own, which has no eager attention: softcap was refused."""
    prompt = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(3))
    net: Any = tiny("gemma2")
    want = net.eval().generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for got in ranks(2).run(generated_by_units, prompt):
        assert torch.equal(got, want)


DOCUMENTS = packed(9, 14)
WITH_A_CACHE: dict[str, tuple[str | None, dict[str, Any], bool]] = {
    "documents": ("ring_fp32", {**DOCUMENTS}, True),
    "documents, without a cache": ("ring_fp32", {**DOCUMENTS, "use_cache": False}, False),
    "documents with a mask": ("ring_fp32", {**DOCUMENTS, "attention_mask": torch.ones(2, 23, dtype=torch.long)}, False),
    "documents, transformers' attention": (None, {**DOCUMENTS}, False),
    "one document": ("ring_fp32", packed(23), False),
    "no positions": ("ring_fp32", tokens(23), False),
}


@pytest.mark.parametrize("case", WITH_A_CACHE)
def test_documents_that_a_cache_joins_are_warned_of(case: str) -> None:
    """Transformers separates them without a cache only, as a ring always does."""
    attention, batch, warns = WITH_A_CACHE[case]
    model: Any = tiny("llama", attention)
    with torch.no_grad():
        texts = told(model, **batch)
    assert [text for text in texts if "start anew within a row" in text and "use_cache=False" in text] == texts
    assert len(texts) == warns


# ---- refusals --------------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.1}, "Layer called attention with dropout=0.1: it is not exact in a ring; set it to 0.0"),
    "a cap of 0": ({"softcap": 0.0}, "softcap=0.0: transformers' eager attention divides scores by it"),
    "T5's bias": (
        {"position_bias": torch.zeros(1)}, "position_bias: a bias of S x S scores built from local lengths (T5)"
    ),
    "a bias": ({"attn_bias": torch.zeros(1)}, "attn_bias: an additive bias is not supported. Compute it by a function"),
    "chosen blocks": ({"block_indices": torch.zeros(1)}, "block_indices: sparse attention over chosen blocks"),
    "weights": ({"output_attentions": True}, "output_attentions: attention weights never exist in a ring"),
    "weights, advice": ({"output_attentions": True}, "output_attentions=False in the model's config"),
    "masked heads": ({"head_mask": torch.zeros(1)}, "head_mask: masking of heads is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("why", ARGUMENTS)
def test_arguments_that_it_cannot_honour(why: str) -> None:
    given, text = ARGUMENTS[why]
    with pytest.raises(errors.UnsupportedArgument) as refusal:
        ring_attention_forward(Layer(), *qkv(), in_a_batch(), **given)
    assert text in str(refusal.value)


@pytest.mark.parametrize("name", ["position_bias", "attn_bias", "block_indices"])
def test_other_scores_with_no_sharded_batch(name: str) -> None:
    """They were told to train without a ring, which may train them."""
    given: dict[str, Any] = {name: torch.zeros(1)}
    with pytest.raises(errors.UnsupportedArgument, match=f"{name}: with no sharded batch .* plain attention"):
        ring_attention_forward(Layer(), *qkv(), causal(), **given)


def test_a_choice_is_of_the_calls_queries() -> None:
    with pytest.raises(errors.BadShape, match=r"indices has shape \(1, 1, 3\), but it must be"):
        ring_attention_forward(Layer(), *qkv(), causal(), indices=torch.zeros(1, 1, 3, dtype=torch.int64))


def test_an_argument_that_is_off_is_none() -> None:
    (out, _), (same, _) = (ring_attention_forward(Layer(), *qkv(), causal(), **more) for more in ({}, OFF))
    assert torch.equal(out, same)


OFF: dict[str, Any] = {"output_attentions": False, "head_mask": None}


def test_a_score_mod_where_transformers_would_attend() -> None:
    for mask in (None, torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)):
        with pytest.raises(errors.UnsupportedArgument, match="score_mod: with a mask that is not") as refusal:
            ring_attention_forward(Layer(), *qkv(), mask, score_mod=Alibi(4))
        assert "use_cache=False" in str(refusal.value)


def test_a_layer_hands_its_score_mod_on() -> None:
    q, k, v = qkv()
    out, _ = ring_attention_forward(Layer(), q, k, v, causal(), score_mod=Alibi(q.shape[1]))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(out, ring_attention(q, k, v, score_mod=Alibi(q.shape[2])))


def test_keys_of_another_length() -> None:
    with pytest.raises(errors.UnshardedInput, match="its rank's 10 of 10 tokens, got 10 queries and 13 keys"):
        ring_attention_forward(Layer(), *qkv(keys=13), in_a_batch())


def test_keys_of_its_own_with_no_sharded_batch() -> None:
    """A fresh DeepSeek V4 was refused with words about an active ring."""
    with pytest.raises(errors.UnsupportedArgument, match="13 keys for 10 tokens: with no sharded batch"):
        ring_attention_forward(Layer(), *qkv(keys=13), causal())


@pytest.mark.parametrize("given", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"sinks": torch.zeros(4)}])
def test_decoding_that_only_the_model_knows(given: dict[str, Any]) -> None:
    """torch's sdpa has neither softcap nor sinks, and this module's file has no eager attention to take instead."""
    with pytest.raises(errors.UnsupportedArgument, match=f"{__name__} has no eager_attention_forward to decode with"):
        ring_attention_forward(Layer(), *qkv(), None, **given)
