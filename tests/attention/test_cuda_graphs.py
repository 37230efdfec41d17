"""CUDA graphs: a ring's ops are kept out of them, and refused in one that is captured all the same."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from hf_ring_attn.attention import op as ops
from hf_ring_attn.comm.ring import LOCAL, Ring
from hf_ring_attn.errors import CapturedGraph
from hf_ring_attn.traffic import Messages, traffic_of

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["ring_flash_attn_fwd", "ring_flash_attn_bwd"])
def test_the_ops_tell_inductor_to_leave_them_out_of_its_graphs(name: str) -> None:
    assert (torch.Tag.cudagraph_unsafe,) == ops.UNSAFE, "torch of these tests has the tag"
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.hf_ring_attn, name).default.tags


@pytest.mark.parametrize("transport", ["auto", "messages", "pulls"])
def test_a_ring_in_a_graph_is_refused_before_anything_is_queued(transport: str) -> None:
    ring = Ring("a ring that is not here")  # whoever asks for its process group fails
    ring.__dict__.update(size=4, rank=0)
    text = (
        "attention in a ring of 4 was called while a CUDA graph was captured. A replayed graph does not exchange data "
        "with the other ranks in order, so it could read another attention's. Use torch.compile without CUDA graphs "
        "(no mode='reduce-overhead'), or leave attention out of the graph."
    )
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        with pytest.raises(CapturedGraph, match=f"^{re.escape(text)}$"):
            traffic_of(ring, GPU, transport)
        assert isinstance(traffic_of(Ring(LOCAL), GPU, transport), Messages), "a ring of one sends nothing"
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
        assert isinstance(traffic_of(ring, GPU, "messages"), Messages)
