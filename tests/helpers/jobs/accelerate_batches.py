"""The model and the batches of accelerate_ranks.py, and what one process makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

CP = 2


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((3,), index)}


def model(attention: str = "ring_fp32") -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    made = LlamaForCausalLM(config).double()
    made.set_attn_implementation(attention)
    return made


def batch(accelerator: Any, length: int = 24) -> dict[str, Tensor]:
    """Whole rows, other ones for each ring, with a different number of labels in each rank's share."""
    torch.manual_seed(7 + accelerator.process_index // CP)
    ids = torch.randint(0, 61, (2, length))
    labels = ids.clone()
    labels[:, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


def plain(inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the whole batch in this process alone, by transformers' own attention."""
    reference = model("sdpa")
    loss = reference(**inputs, use_cache=False).loss  # a cache hides documents from transformers
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]


def averaged(values: list[Tensor]) -> list[Tensor]:
    """The mean over all ranks: what DDP makes of gradients, so the reference of dp 2 is the mean over its rings."""
    for value in values:
        torch.distributed.all_reduce(value)
    return [value / torch.distributed.get_world_size() for value in values]
