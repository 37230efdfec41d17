"""`hf_ring_attn.shard` with a model: which models it refuses before it reads their batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

import hf_ring_attn
from hf_ring_attn import errors
from tests.helpers.jobs.plain_jobs import tokens

IDS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize("labels", [IDS, IDS[:, :3]])
def test_an_encoder_decoder_is_not_told_about_its_labels(labels: Tensor) -> None:
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    batch = {"input_ids": IDS, "labels": labels, "decoder_input_ids": labels}
    with pytest.raises(errors.EncoderDecoder, match=r"T5ForConditionalGeneration is an encoder-decoder model \(t5\)"):
        hf_ring_attn.shard(batch, model=T5ForConditionalGeneration(config))


def test_a_model_in_the_place_of_the_group_is_told_its_name() -> None:
    with pytest.raises(errors.BadOption, match=r"group='Linear' is not .*: hf_ring_attn.shard\(batch, model=model\)"):
        hf_ring_attn.shard(tokens(8), torch.nn.Linear(1, 1))  # type: ignore[arg-type]  # what a program may do
