"""The ring on NCCL and by pulls, on as many GPUs as there are, up to four; and ranks that share them, by pulls."""

from __future__ import annotations

import pytest
import torch

from hf_ring_attn.errors import NoMemoryForBuffers
from hf_ring_attn.traffic import pulls
from tests.gpu.launch import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_pulls_and_messages_have_the_same_right_bits_every_time(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    assert "cases and 4 x 50 passes, 0 wrong" in run_ranks("pulls_ranks", ranks, nccl=True)


def test_eight_ranks_by_pulls_are_right_on_any_number_of_gpus() -> None:
    assert " passes, 0 wrong" in run_ranks("pulls_ranks", 8, nccl=False)


def test_a_buffer_takes_memory_that_torch_only_caches() -> None:
    device, left = torch.device("cuda", 0), 2**28
    torch.zeros(1, device=device)
    torch.cuda.empty_cache()  # what earlier tests left in torch's cache would serve the buffer, too
    free, total = torch.cuda.mem_get_info(device)
    if total - free - torch.cuda.memory_reserved(device) > 2**30:
        pytest.skip("other processes use this GPU: they would run out of memory, or this test would")
    cached = torch.empty(free - left, dtype=torch.uint8, device=device)
    with pytest.raises(NoMemoryForBuffers, match=r"CUDA out of memory\. .* needs 1024 MiB"):
        pulls._allocated(2**30, device)
    del cached
    assert torch.cuda.mem_get_info(device)[0] < 2**30
    buffer = pulls._allocated(2**30, device)
    assert buffer.fill_(7).sum(dtype=torch.int64).item() == 7 * 2**30
    torch.cuda.empty_cache()  # the programs of other tests need memory


def test_layers_around_attention_may_be_replayed_as_graphs() -> None:
    assert "6 compiled batches, 0 wrong" in run_ranks("graph_ranks", 2, nccl=False)
