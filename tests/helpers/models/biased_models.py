"""A Llama whose layers add learned biases to their scores: by `score_mod` in a ring, by a dense mask elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_ring_attn.biases import Alibi, RelativeBias


class BiasedAttention(LlamaAttention):
    """ALiBi with learned slopes in even layers, T5's bias in odd ones."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads = config.num_attention_heads
        self.bias = RelativeBias(heads, 8, 12) if layer_idx % 2 else Alibi(heads, learnable=True)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # as layers call it
        if self.config._attn_implementation == "ring_fp32":
            kwargs["score_mod"] = self.bias
        else:
            kwargs["attention_mask"] = self.dense(hidden_states, kwargs["attention_mask"])
        return super().forward(hidden_states, **kwargs)

    def dense(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """[B, H, S, S], to be added to scores."""
        at = torch.arange(x.shape[1], device=x.device)
        if seen is None:
            seen = at[:, None] >= at
        head = torch.arange(self.config.num_attention_heads, device=x.device)[:, None, None]
        bias: Tensor = self.bias(torch.zeros((), dtype=x.dtype, device=x.device), None, head, at[:, None], at[None])
        return bias.expand(x.shape[0], -1, -1, -1).masked_fill(~seen, -torch.inf)


class BiasedLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' own
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = BiasedAttention(config, number)
        self.post_init()  # type: ignore[no-untyped-call]  # likewise
