"""The Triton kernels on a GPU: what the interpreter cannot show. Also run tests/kernels/triton_cases.py there."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the reference's products, while memory is poisoned

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_ring_attn.kernels import KERNELS, Request
from hf_ring_attn.kernels.triton.blocks import TABLE, widest_head
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import tiles
from hf_ring_attn.testing import BIDIRECTIONAL, CAUSAL, Case, Inputs, inputs, packed, relative_error, sliding
from tests.gpu.launch import run
from tests.helpers.cases import CASES
from tests.helpers.checks import same_bits
from tests.helpers.kernel_answers import (
    Answer,
    computed,
    computed_in_float64,
    mask_of,
    on,
    params_of,
    table_of,
    unit,
    vanishing,
    wanted,
)
from tests.helpers.rank_functions import poisoned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]
TRITON = KERNELS["triton"]
WIDE = Case(why="D 128, grouped", length=3001, heads=8, kv_heads=2, head_dim=128, value_dim=128, seed=50)
SHAPES = (
    WIDE,
    replace(WIDE, why="D 128, window", band=sliding(700)),
    replace(WIDE, why="D 128, documents", documents=(packed(1500, 1, 200, 1000, -300),)),
    replace(WIDE, why="D 64, bidirectional, two rows", head_dim=64, value_dim=64, band=BIDIRECTIONAL, batch=2),
    replace(WIDE, why="D 96, sinks and softcap", head_dim=96, value_dim=96, sinks=True, softcap=20.0),
    replace(WIDE, why="D 80, one head a key head", head_dim=80, value_dim=80, heads=2),
    replace(WIDE, why="D 192, Dv 128", head_dim=192, value_dim=128, heads=2),
    replace(WIDE, why="D 256", head_dim=256, value_dim=256, heads=4),
    replace(WIDE, why="D 160, Dv 160", head_dim=160, value_dim=160, heads=2),
    replace(WIDE, why="D 64, Dv 256", head_dim=64, value_dim=256, heads=2),
    replace(WIDE, why="D 36: no descriptors", head_dim=36, value_dim=36, heads=2),
    replace(WIDE, why="D 512, grouped, window", head_dim=512, value_dim=512, heads=4, band=sliding(700)),
    replace(WIDE, why="D 512, Dv 128, softcap", head_dim=512, value_dim=128, heads=2, softcap=20.0),
)
needs_memory = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 70e9, reason="needs 70 GB"
)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
def test_16_bits_round_probabilities_and_nothing_else(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    got = computed(TRITON, case, on("cuda", x), table_of(case))
    want = wanted(case, x, got["out"].cpu())
    for name in want:
        error = relative_error(got[name], want[name])
        if name in vanishing(case):
            error = float((got[name].cpu().double() - want[name]).abs().max()) / unit(case, x)
        assert error < torch.finfo(dtype).eps, (name, error)


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.why)
@pytest.mark.parametrize("ring", [2, 5, 8])
def test_a_zigzag_chunk_gives_the_bits_of_the_whole_row(case: Case, ring: int) -> None:
    x = on("cuda", inputs(case, torch.bfloat16))
    layout = Layout(case.length, ring, 0)
    q, k, v = (layout.pad(y, 1) for y in (x["q"], x["k"], x["v"]))
    ids = torch.zeros(case.batch, case.length, dtype=torch.int64) if x["documents"] is None else x["documents"]
    mask = mask_of(replace(case, length=layout.padded, documents=()), layout.pad(ids, 1, -1))
    params = params_of(case, x)
    whole = TRITON.forward(q, k, v, tiles(mask, layout.whole(), layout.whole()), params)
    for rank in range(ring):
        mine = Layout(case.length, ring, rank)
        out, lse = TRITON.forward(mine.shard(q, 1), k, v, tiles(mask, mine.runs(), mine.whole()), params)
        assert same_bits(out, mine.shard(whole[0], 1)) and same_bits(lse, mine.shard(whole[1], 2))


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.why)
def test_every_run_gives_the_same_bits(case: Case) -> None:
    x, table = on("cuda", inputs(case, torch.bfloat16)), table_of(case)
    first = computed(TRITON, case, x, table)
    for _ in range(5):
        again = computed(TRITON, case, x, table)
        assert all(same_bits(again[name], first[name]) for name in first)


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.why)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_shapes_are_the_reference_in_float64(case: Case, dtype: torch.dtype) -> None:
    if max(case.head_dim, case.value_dim) > widest_head("cuda", dtype.itemsize):
        pytest.skip("refused: see test_wide_heads_in_float32_are_refused")
    x, table = on("cuda", inputs(case, dtype)), table_of(case)
    got = computed(TRITON, case, x, table)
    want = computed_in_float64(case, x, table, got["out"])
    bound = 4e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert max(errors.values()) < bound, errors


def test_wide_heads_in_float32_are_refused() -> None:
    """They would fit, and take longer than the reference does."""
    request = Request("cuda", torch.float32, 4, 4, 512, 512, False, False, False)
    reasons = TRITON.unsupported(request)
    assert reasons == ["heads are at most 256 wide in torch.float32 on this device, got 512 and 512"]
    assert TRITON.unsupported(replace(request, dtype=torch.bfloat16)) == []


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper")
@pytest.mark.parametrize("family", ["ampere", "ada", "other"])
def test_blocks_of_other_gpus_are_right(family: str) -> None:
    """Compiled to the instructions of those GPUs, which Hopper runs: with its own, some take too much shared memory."""
    rows = sum(key[0] == family for key in TABLE)
    assert f"{rows} rows of {family}, 0 wrong" in run(["-m", "tests.gpu.other_gpus", family], seconds=300)


def flash(x: Inputs) -> Answer:
    """torch's own flash attention 2, causal, one row."""
    q, k, v, length = x["q"], x["k"], x["v"], x["q"].shape[1]
    scale = q.shape[3] ** -0.5
    forward: Any = torch.ops.aten._flash_attention_forward
    backward: Any = torch.ops.aten._flash_attention_backward
    sizes = (None, None, length, length, 0.0, True)
    out, lse, state, unused, _ = forward(q, k, v, *sizes, False, scale=scale)
    dq, dk, dv = backward(x["dout"], q, k, v, out, lse, *sizes, state, unused, scale=scale)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def ours(case: Case, x: Inputs) -> Answer:
    got = computed(TRITON, case, x, table_of(case))
    return got | {name: TRITON.finish(got[name], x["q"].dtype) for name in ("dq", "dk", "dv")}


BIASED: dict[str, Callable[[Tensor], Tensor]] = {"signed": lambda v: v, "v biased": lambda v: v + 3}


@pytest.mark.skipif(torch.version.hip is not None, reason="compares with CUDA's flash attention")
@pytest.mark.parametrize("bias", BIASED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_are_those_of_flash_attention_2(dtype: torch.dtype, bias: str) -> None:
    case = replace(WIDE, length=4096, band=CAUSAL)
    x = on("cuda", inputs(case, dtype))
    x["v"] = BIASED[bias](x["v"])
    want, mine, theirs = computed_in_float64(case, x, table_of(case)), ours(case, x), flash(x)
    for name, answer in theirs.items():
        ratio = relative_error(mine[name], want[name]) / relative_error(answer, want[name])
        assert ratio < 1.02, (name, ratio)


@needs_memory
def test_more_than_two_to_the_31_elements() -> None:
    """The last queries of a long row with a window give what they give in a row of their own."""
    length, heads, tail = 2**21 + 2**17 + 100, 8, 2**12
    case = Case(why="long", length=length, heads=heads, kv_heads=heads, head_dim=128, value_dim=128, band=sliding(1000))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)
    )
    x = Inputs(q=q, k=k, v=v, dout=dout, sinks=None, documents=None)
    assert q.numel() > 2**31
    runs = Layout(length, 1, 0).whole()
    long = computed(TRITON, case, x, tiles(mask_of(case, None), runs, runs))
    start = length - tail - length % 128  # a multiple of every block
    short = replace(case, length=length - start)
    y = Inputs(q=q[:, start:], k=k[:, start:], v=v[:, start:], dout=dout[:, start:], sinks=None, documents=None)
    runs = Layout(short.length, 1, 0).whole()
    want = computed(TRITON, short, y, tiles(mask_of(short, None), runs, runs))
    for name in ("out", "dq", "dk", "dv"):
        assert same_bits(long[name][:, start + 1024 :], want[name][:, 1024:]), name
    assert same_bits(long["lse"][:, :, start + 1024 :], want["lse"][:, :, 1024:])


@needs_memory
def test_strides_past_two_to_the_31_elements() -> None:
    """Heads further apart than 2**31 elements, as in a transposed [B, H, T, D]."""
    length, tokens = 2**24 + 2**17, 3000
    store = torch.zeros(2, length, 128, dtype=torch.bfloat16, device="cuda")
    assert store.stride(0) > 2**31
    x = torch.randn(1, tokens, 2, 128, device="cuda", dtype=torch.bfloat16)
    apart = store[:, -tokens:].copy_(x[0].transpose(0, 1)).transpose(0, 1)[None]
    case = replace(WIDE, length=tokens, heads=2, kv_heads=2)
    answers = [computed(TRITON, case, Inputs(q=y, k=y, v=y, dout=y, sinks=None, documents=None), table_of(case))
               for y in (x, apart)]  # fmt: skip
    assert all(same_bits(answers[0][name], answers[1][name]) for name in answers[0])
