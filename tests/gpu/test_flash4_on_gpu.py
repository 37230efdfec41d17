"""flash4 on Hopper: the ring's answer is one GPU's, forward bit for bit, and as near to float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch
from torch import Tensor

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.bench.replay import Answer, Transfer, replay
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels import KERNELS, Params, Request
from hf_ring_attn.kernels.flash4 import Flash4
from hf_ring_attn.sharding.mask import UNBOUNDED, Band, Mask
from hf_ring_attn.testing import BIDIRECTIONAL, Case, inputs, mismatch, packed, relative_error, sliding

FLASH4, REFERENCE = KERNELS["flash4"], KERNELS["reference"]
REQUEST = Request("cuda", torch.bfloat16, 8, 2, 128, 128, softcap=False, sinks=False, deterministic=False)
REASONS = FLASH4.unsupported(REQUEST) if torch.cuda.is_available() else ["needs a GPU"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))]

D128 = Case(why="D 128, grouped", length=2048, heads=8, kv_heads=2, head_dim=128, value_dim=128, seed=70)
DOCUMENTS = packed(700, 1, 129, 1300, 64, 3, 515, 1000, 200, 160, 24)  # 4096 tokens
CASES = (
    D128,
    replace(D128, why="chunks of 375 at ring 8", length=6000),
    replace(D128, why="chunks of 3 at ring 8", length=48),
    replace(D128, why="two rows", batch=2, length=1040),
    replace(D128, why="one head a key head", heads=3, kv_heads=3),
    replace(D128, why="one head a key head, chunks of 375", heads=3, kv_heads=3, length=6000),
    replace(D128, why="D 64, eight heads a key head", head_dim=64, value_dim=64, kv_heads=1, length=2992),
    replace(D128, why="D 64, one head a key head", head_dim=64, value_dim=64, heads=2, length=2992),
    replace(D128, why="D 96, three heads a key head", head_dim=96, value_dim=96, heads=6, length=2992),
    replace(D128, why="D 96, one head a key head", head_dim=96, value_dim=96, heads=2, length=2992),
    replace(D128, why="D 256, two heads a key head", head_dim=256, value_dim=256, heads=4, length=2992),
    replace(D128, why="D 256, one head a key head", head_dim=256, value_dim=256, heads=2, length=2992),
    replace(D128, why="D 192/128, one head a key head", head_dim=192, heads=4, kv_heads=4, length=2992),
    replace(D128, why="D 192/128, four heads a key head", head_dim=192, length=2992),
    replace(D128, why="bidirectional", band=BIDIRECTIONAL, length=2992),
    replace(D128, why="window of 300", band=sliding(300), length=4096),
    replace(D128, why="window of 1500, chunks of 375", band=sliding(1500), length=6000),
    replace(D128, why="bidirectional window", band=(-700, 300), length=4096),
    replace(D128, why="D 256, window", head_dim=256, value_dim=256, heads=4, band=sliding(900), length=4096),
    replace(D128, why="D 192/128, window", head_dim=192, band=sliding(900), length=4096),
    replace(D128, why="documents", documents=(DOCUMENTS,), length=4096),
    replace(D128, why="documents, one head a key head", documents=(DOCUMENTS,), length=4096, heads=2),
    replace(D128, why="D 256, documents", documents=(DOCUMENTS,), length=4096, heads=4, head_dim=256, value_dim=256),
    replace(D128, why="documents with a window", documents=(DOCUMENTS,), length=4096, band=sliding(333)),
    replace(D128, why="documents, bidirectional", documents=(DOCUMENTS,), length=4096, band=BIDIRECTIONAL),
    replace(
        D128, why="other documents in each row, padding", batch=3, length=4096,
        documents=(DOCUMENTS, packed(-100, 3000, 996), packed(2000, -2096)),
    ),
    replace(D128, why="padding on the right, two rows", batch=2, documents=(packed(2048), packed(777, -1271))),
    replace(D128, why="softcap", softcap=20.0, length=2992),
    replace(D128, why="sinks", sinks=True, length=2992),
    replace(
        D128, why="sinks, window, documents, D 64", sinks=True, band=sliding(128), head_dim=64, value_dim=64,
        documents=(DOCUMENTS,), length=4096,
    ),
)  # fmt: skip
IDS = [case.why for case in CASES]


def mask_of(case: Case, documents: Tensor | None) -> Mask:
    lo, hi = case.band
    band = Band(-UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi)
    return Mask.of(band, case.batch, case.length, documents)


@cache
def answer(case: Case, size: int, dtype: torch.dtype, path: Transfer = "ring", exact: bool = False) -> Answer:
    """On the GPU; ``exact``: in float64 by the reference, from the same rounded inputs."""
    x = inputs(case, dtype)
    q, k, v, dout = (x[name].cuda().to(torch.float64 if exact else dtype) for name in ("q", "k", "v", "dout"))
    sinks = None if x["sinks"] is None else x["sinks"].cuda()
    params = Params(case.head_dim**-0.5, case.softcap, sinks)
    kernel = REFERENCE if exact else FLASH4
    return replay(kernel, q, k, v, dout, mask_of(case, x["documents"]), size, params, path=path)


def errors(got: Answer, want: Answer) -> dict[str, float]:
    return {name: relative_error(getattr(got, name), getattr(want, name)) for name in ("out", "dq", "dk", "dv")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_one_gpu_is_as_near_to_float64_as_16_bits_allow(case: Case, dtype: torch.dtype) -> None:
    got, want = answer(case, 1, dtype), answer(case, 1, dtype, exact=True)
    print(case.why, errors(got, want))  # noqa: T201  # shown with -rP: the figures of a results page
    for name, error in errors(got, want).items():
        assert error < torch.finfo(dtype).eps, name
    assert relative_error(got.lse, want.lse) < 1e-5


PLAIN = [case for case in CASES if not (case.documents or case.sinks) and case.band in ((0, None), (None, None))]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.why)
def test_one_gpu_is_as_near_to_float64_as_flash_attn_4_itself(case: Case) -> None:
    if case.head_dim != case.value_dim and case.heads != case.kv_heads:
        pytest.skip("its own backward refuses it")
    x = inputs(case, torch.bfloat16)
    q, k, v, dout = (x[name].cuda() for name in ("q", "k", "v", "dout"))
    flash_attn = import_module("flash_attn.cute.interface")
    out, lse = flash_attn._flash_attn_fwd(q, k, v, causal=case.causal, softcap=case.softcap, return_lse=True)[:2]
    stock = flash_attn._flash_attn_bwd(q, k, v, out, dout, lse, causal=case.causal, softcap=case.softcap or 0.0)
    got, want = answer(case, 1, torch.bfloat16), answer(case, 1, torch.bfloat16, exact=True)
    assert torch.equal(got.out, out) and torch.equal(got.lse, lse)
    of_stock, of_ours = errors(Answer(out, lse, *stock), want), errors(got, want)
    for name in ("dq", "dk", "dv"):
        assert of_ours[name] < 1.02 * of_stock[name], name


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_ring_is_one_gpu(case: Case, size: int) -> None:
    one, many = (answer(case, n, torch.bfloat16) for n in (1, size))
    assert torch.equal(many.out, one.out)
    assert torch.equal(many.lse, one.lse)
    want = answer(case, 1, torch.bfloat16, exact=True)
    of_one, of_many = errors(one, want), errors(many, want)
    for name in ("dq", "dk", "dv"):
        assert mismatch(getattr(many, name), getattr(one, name)) < 0.005, name
        assert of_many[name] < 1.02 * of_one[name], name


@pytest.mark.parametrize("case", [case for case in CASES if case.length > 2048][::3], ids=lambda case: case.why)
@pytest.mark.parametrize("path", ["gather", "sparse"])
def test_another_path_is_one_gpu(case: Case, path: Transfer) -> None:
    one, many = answer(case, 1, torch.bfloat16), answer(case, 4, torch.bfloat16, path)
    assert torch.equal(many.out, one.out)
    assert torch.equal(many.lse, one.lse)
    for name in ("dq", "dk", "dv"):
        assert mismatch(getattr(many, name), getattr(one, name)) < 0.005, name


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.why)
def test_deterministic_gives_the_same_bits(case: Case) -> None:
    x = inputs(case, torch.bfloat16)
    q, k, v, dout = (x[name].cuda() for name in ("q", "k", "v", "dout"))
    sinks = None if x["sinks"] is None else x["sinks"].cuda()
    params = Params(case.head_dim**-0.5, case.softcap, sinks, deterministic=True)
    mask = mask_of(case, x["documents"])
    first, *others = (replay(FLASH4, q, k, v, dout, mask, 4, params) for _ in range(4))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    one = answer(case, 1, torch.bfloat16)
    assert max(mismatch(getattr(first, name), getattr(one, name)) for name in ("dq", "dk", "dv")) < 0.005


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradients_before_the_rounding_round_to_those_after(case: Case) -> None:
    """The two paths out of the accumulators, flash-attn-4's own and ours, agree."""
    x = inputs(case, torch.bfloat16)
    q, k, v, dout = (x[name].cuda() for name in ("q", "k", "v", "dout"))
    sinks = None if x["sinks"] is None else x["sinks"].cuda()
    params = Params(case.head_dim**-0.5, case.softcap, sinks, deterministic=True)
    mask = mask_of(case, x["documents"])
    wide = replay(Flash4(), q, k, v, dout, mask, 2, params, torch.float32)
    narrow = replay(Flash4(), q, k, v, dout, mask, 2, params)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(wide, name).bfloat16(), getattr(narrow, name)), name


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
def test_the_public_function_takes_it_and_heads_first_tensors(documents: tuple[tuple[int, int], ...] | None) -> None:
    """As transformers hands them over: [B, H, T, D] transposed; through autograd, whose backward has its own thread."""
    case = replace(D128, batch=2, length=4096, documents=(documents,) * 2 if documents else (), sinks=True)
    x = inputs(case, torch.bfloat16)
    given = {name: x[name].cuda() for name in ("q", "k", "v")}
    leaves = {name: y.transpose(1, 2).contiguous().requires_grad_() for name, y in given.items()}
    sinks = x["sinks"]
    assert sinks is not None
    sinks = sinks.cuda().requires_grad_()
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves.values())
    out = ring_attention(q, k, v, sinks=sinks, documents=x["documents"], config=RingConfig(kernel="flash4"))
    dout = x["dout"].cuda()
    out.backward(dout)
    got = Answer(out, out, *(leaf.grad.transpose(1, 2) for leaf in leaves.values() if leaf.grad is not None))
    assert all(error < 0.005 for error in errors(got, answer(case, 1, torch.bfloat16, exact=True)).values())

    want = sinks.detach().double().requires_grad_()
    exact = ring_attention(
        *(y.double() for y in given.values()),
        sinks=want,
        documents=x["documents"],
        config=RingConfig(kernel="reference"),
    )
    exact.backward(dout.double())
    assert sinks.grad is not None and want.grad is not None
    assert relative_error(sinks.grad, want.grad) < 0.02


def test_a_sum_of_outputs_has_a_gradient_of_ones_that_is_not_laid_out() -> None:
    q, k, v = (torch.randn(1, 300, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, config=RingConfig(kernel="flash4"))
    out.sum().backward()
    assert v.grad is not None
    assert relative_error(v.grad.float().sum(1), torch.full((1, 4, 128), 300.0)) < 0.01
