"""What a plan takes save_attention="auto" to decide is what a step would, if the forecast were exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hf_ring_attn.integration.memory.auto_saving import LEFT_FREE
from hf_ring_attn.plan.hardware import GIB
from hf_ring_attn.plan.memory import memory_of
from hf_ring_attn.plan.search import decided, kept
from tests.plan.shapes import llama_8b
from tests.plan.test_memory import setup


@pytest.mark.parametrize("part", [0.98, 1.02])
def test_saving_leaves_a_tenth_of_what_the_allocator_can_have(part: float) -> None:
    """The CUDA context and NCCL's buffers are not in it, and what the allocator loses may be in the tenth."""
    one = setup(tokens=2**17)
    saved = memory_of(llama_8b(), replace(one, save_attention=True))
    outside = sum(saved.outside.values())
    usable = saved.allocated / (1 - LEFT_FREE) / part
    one = replace(one, gpu=replace(one.gpu, memory_gib=(usable + outside) / GIB))
    assert decided(llama_8b(), one).save_attention is (part < 1)


@pytest.mark.parametrize(("host", "saves"), [(50.0, True), (48.0, False), (math.inf, False)])
def test_auto_saves_on_the_host_if_half_of_what_is_free_there_is_enough(host: float, saves: bool) -> None:
    """Inputs take 16 GiB of a process's host memory, and results 16.25."""
    one = setup(tokens=2**17, offload_above=0.0)
    one = replace(one, gpu=replace(one.gpu, host_memory_gib=host))
    assert decided(llama_8b(), one).save_attention is saves


def test_auto_keeps_as_many_layers_as_leave_a_tenth() -> None:
    """As measured on two H200: all at 32K tokens, 8 at 128K (recipes/results/2026-11-29-kept-layers)."""
    found = [kept(llama_8b(), setup(tokens=tokens, liger=True)) for tokens in (2**15, 2**17, 2**18)]
    assert found == [32, 8, 1]
