"""Saved attention by free memory, for tests/gpu/test_activations_on_gpu.py: torchrun ... -m tests.gpu.saving_ranks

A small model trains three steps in a ring on a GPU with plenty of memory: the first step measures, the others save what
attention computed, also where checkpoints wait in host memory. Their losses and gradients have the bits of steps that
never save. If the process may have little more memory than the first step took, no step saves.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.attention.op import attentions
from hf_ring_attn.command_ranks import world
from tests.gpu.verdict import told

TOKENS, LAYERS, STEPS = 16384, 4, 3


def steps(
    device: torch.device, save: Any, fraction: float = 1.0, offload_above: float | None = None
) -> tuple[list[int], list[list[Tensor]]]:
    """How often each step attended, a layer, and its loss and gradients. ``fraction``: of the GPU that may be used."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=LAYERS, vocab_size=1000, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=TOKENS,
    )  # fmt: skip
    kind: Any = LlamaForCausalLM
    model = kind._from_config(config, attn_implementation="ring_fp32", dtype=torch.bfloat16).to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    options = RingConfig(save_attention=save, deterministic=True, offload_above=offload_above)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gc.collect()  # a model of the run before may wait for it, and its memory would be missing
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(fraction)
    ran, bits = [], []
    for seed in range(STEPS):
        ids = torch.randint(0, 1000, (1, TOKENS), generator=torch.Generator().manual_seed(seed)).to(device)
        with (batch := hf_ring_attn.shard({"input_ids": ids, "labels": ids}, config=options, model=model)):
            loss = model(**batch.inputs).loss
        forward = attentions()  # after the self-check, which attends, too
        loss.backward()
        batch.reduce_gradients(model)
        ran.append(1 + (attentions() - forward) // LAYERS)
        bits.append([loss.detach().cpu(), *(x.grad.cpu() for x in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return ran, bits


def differences(device: torch.device) -> Iterator[str]:
    """Words for each run that saved in other steps than it should, or has other bits."""
    never, want = steps(device, False)
    peak = torch.cuda.max_memory_allocated(device)
    # Beyond the tenth that "auto" leaves free: less than the results take, but enough for a workspace of cuBLAS.
    tight = 1.2 * peak / torch.cuda.get_device_properties(device).total_memory
    for name, save, fraction, offload_above, expected in (
        ("never", False, 1.0, None, [2, 2, 2]), ("always", True, 1.0, None, [1, 1, 1]),
        ("auto", "auto", 0.5, None, [2, 1, 1]), ("auto with little memory", "auto", tight, None, [2, 2, 2]),
        ("auto with checkpoints on the host", "auto", 0.5, 0.0, [2, 1, 1]),
    ):  # fmt: skip
        ran, bits = (never, want) if name == "never" else steps(device, save, fraction, offload_above)
        if ran != expected:
            yield f"{name}: each step attended {ran} times, not {expected}"
        pairs = (pair for got, other in zip(bits, want, strict=True) for pair in zip(got, other, strict=True))
        if not all(torch.equal(*pair) for pair in pairs):
            yield f"{name}: other bits than without saved attention"


def main() -> None:
    with world("cuda", may_share=True) as (ring, device):
        failed = told(ring, list(differences(device)), "5 runs")
    sys.exit(failed)


if __name__ == "__main__":
    main()
