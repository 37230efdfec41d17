r"""Embeddings of whole rows: the halves of a text are a positive pair, the other texts of the batch are negatives.

torchrun --nproc_per_node 2 examples/embeddings.py                 # a bidirectional model, mean of real tokens
torchrun --nproc_per_node 2 examples/embeddings.py --pool last     # a decoder, its last real token
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, BatchEncoding, ModernBertConfig, set_seed

import hf_ring_attn
from small import small_llama
from text import VOCABULARY, documents, tokenizer

PAIRS = 4


def small_encoder(attention: str) -> Any:
    """A ModernBERT with two layers, one of them with a window."""
    config = ModernBertConfig(
        vocab_size=VOCABULARY, num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"],
        hidden_size=64, intermediate_size=192, num_attention_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        cls_token_id=None, sep_token_id=None,
    )  # fmt: skip
    set_seed(0)
    return AutoModel.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]


def batches(count: int) -> Iterator[BatchEncoding]:
    """First halves of texts, then second halves, padded: input_ids and attention_mask [2 * PAIRS, S]."""
    texts = [text for text in documents(20 * count * PAIRS) if 300 < len(text) < 700][: count * PAIRS]
    for start in range(0, len(texts), PAIRS):
        rows = texts[start : start + PAIRS]
        halves = [text[: len(text) // 2] for text in rows] + [text[len(text) // 2 :] for text in rows]
        yield tokenizer()(halves, padding=True, return_tensors="pt")


def contrast(embeddings: Tensor, temperature: float = 0.1) -> Tensor:
    """InfoNCE: each first half [PAIRS, D] picks its second half among those of the batch."""
    first, second = normalize(embeddings, dim=-1).chunk(2)
    return cross_entropy(first @ second.T / temperature, torch.arange(len(first)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool", choices=("mean", "last"), default="mean")
    pool = parser.parse_args().pool
    distributed.init_process_group("gloo")
    model = small_encoder("ring_fp32") if pool == "mean" else small_llama("ring_fp32").model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step, batch in enumerate(batches(4)):
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            hidden = model(**sharded.inputs).last_hidden_state  # this rank's tokens
        real = sharded.inputs["attention_mask"]
        embeddings = sharded.row_mean(hidden, real) if pool == "mean" else sharded.last_token(hidden, real)
        loss = contrast(embeddings)  # of whole rows, the same on every rank
        loss.backward()
        sharded.reduce_gradients(model)  # neither DDP nor FSDP does it here
        optimizer.step()
        optimizer.zero_grad()
        if distributed.get_rank() == 0:
            print(f"step {step}: loss {loss:.7f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
