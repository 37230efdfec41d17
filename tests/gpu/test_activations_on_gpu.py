"""Checkpoints and attention on the host, MLPs in chunks, on a GPU: the same step in less memory, as fast."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.layers.host_memory import HostMemory
from hf_ring_attn.testing import relative_error
from tests.gpu.launch import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOKENS, LAYERS = 16384, 6
INPUT = TOKENS * 1024 * 2 / 2**30
"""GiB of a layer's input."""


def test_tensors_come_back_while_their_memory_is_used_by_others() -> None:
    memory = HostMemory(torch.device("cuda", 0))
    for _ in range(3):
        given, copies = [], []
        x = torch.randn(64, 1 << 20, device="cuda", dtype=torch.bfloat16)
        for _ in range(5):
            given.append(x.float().sum().item())
            copies.append(memory.store(x))
            x = x * 1.01  # the memory of the one before is free now
        del x
        while copies:
            found = copies[-1].fetch()
            torch.full_like(found, float("nan"))
            assert found.float().sum().item() == given.pop()
            del found
            copies.pop()
    assert memory.fetched_early == 12 and len(memory.buffers.idle) == 5


def step(
    checkpointing: bool = True, around: Callable[[Any], AbstractContextManager[Any]] | None = None,
    trained: str = "norm", **options: Any,
) -> tuple[Tensor, dict[str, Tensor], float]:  # fmt: skip
    """The loss and gradients, on the host, and the GiB of the GPU that a step needs beyond what others hold there.

    ``around``: makes a context for the model's forward. ``trained``: a part of the names of the trained weights. By
    default there are few: gradients of a layer's matrices are as large as its input, so as many bytes come as go.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=LAYERS, vocab_size=1000, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=TOKENS,
    )  # fmt: skip
    kind: Any = LlamaForCausalLM
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = kind._from_config(config, attn_implementation="ring_fp32", dtype=torch.bfloat16).cuda().train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, weight in model.named_parameters():
        weight.requires_grad_(trained in name)
    ids = torch.randint(0, 1000, (1, TOKENS), generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        batch = hf_ring_attn.shard(
            {"input_ids": ids, "labels": ids}, config=RingConfig(deterministic=True, **options), model=model
        )
        with nullcontext() if around is None else around(model), batch:
            loss = model(**batch.inputs).loss
        loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.requires_grad}
    return loss.detach().cpu(), gradients, peak / 2**30


def test_offloading_keeps_the_bits_and_frees_memory() -> None:
    loss, gradients, peak = step(mlp_tokens=2048)
    for gib, freed in ((0.0, LAYERS - 2), (2.5 * INPUT, LAYERS - 4)):
        got, found, less = step(mlp_tokens=2048, offload_above=gib)
        assert torch.equal(got, loss)
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
        assert less < peak - (freed - 0.5) * INPUT, (peak, less)


def test_chunks_are_as_near_and_need_less_memory() -> None:
    loss, gradients, peak = step(trained="")
    got, found, less = step(trained="", mlp_tokens=2048)
    assert relative_error(got, loss) < 1e-3
    for name, gradient in gradients.items():
        assert relative_error(found[name].float(), gradient.float()) < 2e-2, name
    assert less < peak - 4 * TOKENS * 4096 * 2 / 2**30 / 2, (peak, less)


def test_saved_attention_leaves_the_gpu_with_its_checkpoint() -> None:
    """Of each layer its input, its attention's output (as large), and its log-sum-exp."""
    loss, gradients, peak = step(mlp_tokens=2048, save_attention=True)
    got, found, less = step(mlp_tokens=2048, save_attention=True, offload_above=0.0)
    assert torch.equal(got, loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert less < peak - (LAYERS - 2.5) * 2 * INPUT, (peak, less)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trls_offloading_keeps_the_bits_and_frees_memory(checkpointing: bool) -> None:
    """Its context is the one that TRL's trainers enter for `activation_offloading`."""
    trl = pytest.importorskip("trl.models.activation_offloading")

    def offloading(model: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = trl.get_act_offloading_ctx_manager(model=model, max_fwd_stash_size=1)
        return context

    loss, gradients, peak = step(checkpointing)
    got, found, less = step(checkpointing, offloading)
    assert torch.equal(got, loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert less < peak - INPUT, (peak, less)


def test_attention_is_saved_once_a_step_has_shown_that_it_fits() -> None:
    assert "5 runs, 0 wrong" in run_ranks("saving_ranks", 2, nccl=False)
