"""transformers' masks as data: every mask that masking_utils can make is recognised exactly, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from transformers import LlamaConfig, masking_utils
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.integration.attention.function import ring_attention_forward
from hf_ring_attn.integration.attention.masks import CHUNKS_BY_POSITION, needed_parameters, ring_mask
from hf_ring_attn.integration.context.batch_context import MaskSpec
from hf_ring_attn.integration.context.mask_functions import Combined, SameGroup, recognise
from hf_ring_attn.integration.patching.changes import render
from hf_ring_attn.sharding.mask import BIDIRECTIONAL, CAUSAL, Band

LENGTH = 12
WINDOW = 4
Maker = Callable[..., Any]


def configured(attention: str) -> Any:
    config: Any = LlamaConfig()
    config._attn_implementation = attention
    config.sliding_window, config.attention_chunk_size = WINDOW, WINDOW
    return config


def made(maker: Maker, attention: str, **given: Any) -> Any:
    """What a model with this attn_implementation gets of a function of masking_utils for two rows of 12 tokens."""
    config = configured(attention)
    given = {"attention_mask": None, "past_key_values": None, **given}
    if maker in (create_bidirectional_mask, create_bidirectional_sliding_window_mask):
        given.pop("position_ids", None)
    return maker(config=config, inputs_embeds=torch.zeros(2, LENGTH, 8), **given)


def visible(spec: MaskSpec) -> Tensor:
    """[2, 12, 12] bool: with equal scores, and a value that is 1 in a place of its own, out says what was seen."""
    q = torch.zeros(2, 1, LENGTH, 4, dtype=torch.float64)
    values = torch.eye(LENGTH, dtype=torch.float64).expand(2, 1, -1, -1)
    out, _ = ring_attention_forward(torch.nn.Identity(), q, q, values, spec)
    return out[:, :, 0] > 0


PADDING = torch.ones(2, LENGTH, dtype=torch.int64)
PADDING[0, :3], PADDING[1, -4:] = 0, 0
PACKED = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((5, 1, 6), (2, 10))])

BLOCKS = torch.full((2, LENGTH), -1)
BLOCKS[0, 4:9], BLOCKS[1, 2:3], BLOCKS[1, 3:10] = 0, 0, 1
PACKED_BLOCKS = torch.full((2, LENGTH), -1)
PACKED_BLOCKS[0, 1:5], PACKED_BLOCKS[0, 6:12], PACKED_BLOCKS[1, 4:11] = 0, 1, 0
INNER_BLOCKS = torch.tensor([[0, 0, 0, -1, 1, 1, 1, 1, -1, 2, 2, -1]]).expand(2, -1)
TWO_SPANS = torch.tensor([[0, 0, -1, -1, 0, 0, 0, -1, 1, 1, 1, 1]]).expand(2, -1)


def windowed_blocks(**given: Any) -> Any:
    """Gemma 3's local layers: the window holds for images too."""
    blocks = masking_utils.blockwise_overlay(given.pop("block_sequence_ids"))
    window = masking_utils.sliding_window_overlay(WINDOW)
    return create_causal_mask(or_mask_function=blocks, and_mask_function=window, **given)


MASKS: list[tuple[str, Maker, dict[str, Any]]] = [
    ("chunks", create_chunked_causal_mask, {}),
    ("chunks, padded", create_chunked_causal_mask, {"attention_mask": PADDING}),
    ("chunks, packed", create_chunked_causal_mask, {"position_ids": PACKED}),
    ("blocks", create_causal_mask, {"block_sequence_ids": BLOCKS}),
    ("blocks, one in two spans", create_causal_mask, {"block_sequence_ids": TWO_SPANS}),
    ("blocks, padded", create_causal_mask, {"block_sequence_ids": BLOCKS, "attention_mask": PADDING}),
    ("blocks, packed", create_causal_mask, {"block_sequence_ids": PACKED_BLOCKS, "position_ids": PACKED}),
    ("blocks beyond a window", create_sliding_window_causal_mask, {"block_sequence_ids": BLOCKS}),
    ("blocks in a window", windowed_blocks, {"block_sequence_ids": BLOCKS}),
    ("blocks in a window, padded", windowed_blocks, {"block_sequence_ids": BLOCKS, "attention_mask": PADDING}),
    ("causal", create_causal_mask, {}),
    ("causal, padded", create_causal_mask, {"attention_mask": PADDING}),
    ("causal, packed", create_causal_mask, {"position_ids": PACKED}),
    ("window", create_sliding_window_causal_mask, {}),
    ("window, padded", create_sliding_window_causal_mask, {"attention_mask": PADDING}),
    ("window, packed", create_sliding_window_causal_mask, {"position_ids": PACKED}),
    ("bidirectional", create_bidirectional_mask, {}),
    ("bidirectional, padded", create_bidirectional_mask, {"attention_mask": PADDING}),
    ("bidirectional window", create_bidirectional_sliding_window_mask, {}),
    ("bidirectional window, padded", create_bidirectional_sliding_window_mask, {"attention_mask": PADDING}),
]


if "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters:  # not in transformers 5.17
    MASKS.append(("blocks beyond chunks", create_chunked_causal_mask, {"block_sequence_ids": INNER_BLOCKS}))


CUTS_BLOCKS = Version(version("transformers")) >= Version("5.24")
"""Since transformers 5.24 a block that crosses a border of documents ends there."""
if CUTS_BLOCKS:
    MASKS.append(
        ("blocks across documents", create_causal_mask, {"block_sequence_ids": BLOCKS, "position_ids": PACKED})
    )


@pytest.mark.parametrize(("maker", "given"), [row[1:] for row in MASKS], ids=[row[0] for row in MASKS])
def test_a_mask_as_data_is_the_mask(maker: Maker, given: dict[str, Any]) -> None:
    spec = made(maker, "ring_fp32", **given)
    assert isinstance(spec, MaskSpec)
    zero = made(maker, "eager", **given)  # 0 where a key is seen; None where all are
    want = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool) if zero is None else zero[:, 0] == 0
    got = visible(spec)
    real = PADDING.bool() if "attention_mask" in given else torch.ones_like(PADDING, dtype=torch.bool)
    assert torch.equal(got[real], want[real])


@pytest.mark.skipif(CUTS_BLOCKS, reason="the block ends at the border")
def test_a_block_that_crosses_documents_is_refused() -> None:
    with pytest.raises(errors.CrossedDocuments, match="crosses a border of documents"):
        made(create_causal_mask, "ring_fp32", block_sequence_ids=BLOCKS, position_ids=PACKED)


@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["without", "with"])
def test_other_blocks_in_a_later_call_of_a_batch_are_refused(blocks: Tensor | None) -> None:
    """The mask of the first call was used again, since kinds of masks are compared without their tensors."""
    given = {"input_ids": torch.ones(2, LENGTH, dtype=torch.int64), "block_sequence_ids": blocks}
    batch = hf_ring_attn.shard(given, config=RingConfig(self_check=False))
    same = torch.full_like(BLOCKS, -1) if blocks is None else blocks
    mask = batch.inputs["attention_mask"]
    with batch:
        for again in (same, same.clone()):
            made(create_causal_mask, "ring_fp32", attention_mask=mask, block_sequence_ids=again)
        with pytest.raises(errors.ShardedMask):
            made(create_causal_mask, "ring_fp32", attention_mask=mask, block_sequence_ids=TWO_SPANS)


def test_places_are_copied_to_a_device_once() -> None:
    """In each layer whose queries are scaled by place they were copied again, and the host waited for the GPU."""
    spec, meta = made(create_causal_mask, "ring_fp32"), torch.device("meta")
    assert spec.places_on(meta) is spec.places_on(meta)
    assert torch.equal(spec.places_on(torch.device("cpu")), spec.places)


def test_one_spec_for_all_layers_of_a_kind() -> None:
    """Tables of tiles are made once: the next batch of the same shape finds them again."""
    first, second = (made(create_causal_mask, "ring_fp32") for _ in range(2))
    assert first.plan is second.plan


@pytest.mark.parametrize("maker", [create_causal_mask, create_sliding_window_causal_mask, create_bidirectional_mask])
def test_a_mask_that_is_handed_on_is_returned_as_it_is(maker: Maker) -> None:
    """PaliGemma makes the mask of its text model, which is called with it and asks for one once more."""
    spec = made(create_causal_mask, "ring_fp32", block_sequence_ids=BLOCKS)
    assert made(maker, "ring_fp32", attention_mask=spec) is spec


def test_a_function_without_what_is_read_is_refused_by_its_patch() -> None:
    def of_today(
        config: Any, inputs_embeds: Any, attention_mask: Any, cache: Any, position_ids: Any, layer_idx: Any
    ) -> None: ...
    def of_old(
        config: Any, inputs_embeds: Any, attention_mask: Any, past_key_values: Any, position_ids: Any, layer_idx: Any
    ) -> None: ...
    def renamed(
        config: Any, inputs_embeds: Any, attention_mask: Any, kv: Any, position_ids: Any, layer_idx: Any
    ) -> None: ...

    for known in (of_today, of_old, masking_utils._preprocess_mask_arguments):
        assert needed_parameters(known) == render(known)
    assert needed_parameters(renamed) != render(renamed)
    assert needed_parameters(None) != "no such attribute"


def test_cached_decoding_gets_an_ordinary_mask() -> None:
    mask = ring_mask(1, q_length=2, kv_length=5, q_offset=3, kv_offset=0, config=configured("ring_fp32"))
    assert isinstance(mask, Tensor)
    assert mask[0, 0].tolist() == [[True, True, True, True, False], [True] * 5]


def everything(batch: int, head: int, query: int, key: int) -> bool:
    return True


REFUSED: dict[str, tuple[Maker, dict[str, Any], str]] = {
    "or_mask_function": (create_causal_mask, {"or_mask_function": everything}, f"{__name__}.everything"),
    "and_mask_function": (create_causal_mask, {"and_mask_function": everything}, f"{__name__}.everything"),
    "or_mask_function, window": (
        create_sliding_window_causal_mask, {"or_mask_function": everything}, f"{__name__}.everything"
    ),
}  # fmt: skip


if CHUNKS_BY_POSITION:
    REFUSED["blocks by position in a document"] = (
        create_causal_mask,
        {"or_mask_function": masking_utils.blockwise_overlay(torch.zeros(2, 12)), "position_ids": PACKED},
        "transformers.masking_utils.blockwise_overlay.<locals>.inner_mask",
    )


@pytest.mark.parametrize("why", REFUSED)
def test_a_mask_that_is_not_recognised_is_refused_by_name(why: str) -> None:
    maker, given, name = REFUSED[why]
    with pytest.raises(errors.UnknownMask) as refusal:
        made(maker, "ring_fp32", **given)
    text = str(refusal.value)
    assert text.startswith(
        f"the mask function {name} is not one that ring_fp32 knows, so it cannot be computed exactly"
    )
    assert "causal_mask_function" in text and "Use attn_implementation='sdpa' or 'eager' without a ring" in text


def test_an_impostor_is_not_recognised() -> None:
    """The name alone does not make a function of masking_utils."""

    def causal_mask_function(batch: int, head: int, query: int, key: int) -> bool:
        return True

    causal_mask_function.__qualname__ = "causal_mask_function"
    with pytest.raises(errors.UnknownMask):
        recognise(causal_mask_function)


def test_expressions() -> None:
    window = masking_utils.sliding_window_causal_mask_function(WINDOW)
    assert recognise(masking_utils.causal_mask_function) == CAUSAL
    assert recognise(masking_utils.bidirectional_mask_function) == BIDIRECTIONAL
    assert recognise(window) == Band(0, WINDOW - 1)
    assert recognise(masking_utils.sliding_window_bidirectional_mask_function(3)) == Band(-3, 3)
    packed = masking_utils.and_masks(masking_utils.packed_sequence_mask_function(PACKED > 3), window)
    assert recognise(packed) == Combined("all", (SameGroup("documents"), Band(0, WINDOW - 1)))
