"""A model of embeddings as users write one for Trainer: means of whole rows, and a loss among the rows of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import ModernBertConfig, ModernBertModel, ModernBertPreTrainedModel


class Embedder(ModernBertPreTrainedModel):  # type: ignore[no-untyped-call]
    """Each row picks the next one of its batch: wrong if a mean is of one rank's tokens, or counts padding."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__(config)
        self.model = ModernBertModel(config)
        self.loss_type = "ForSequenceClassification"  # whole rows, please
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, return_loss: bool = True, **inputs: Any
    ) -> dict[str, Tensor]:
        hidden = self.model(input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        real = attention_mask[..., None]
        rows = normalize((hidden * real).sum(1) / real.sum(1), dim=-1)
        following = torch.arange(len(rows), device=rows.device).roll(1)
        loss = {"loss": cross_entropy(rows @ rows.T / 0.2, following)} if return_loss else {}
        return {**loss, "embeddings": rows}
