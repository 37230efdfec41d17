"""flash2 on a GPU: as near to float64 as FlashAttention 2 is, on one GPU and in a ring, however a mask is cut."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the reference's products, while memory is poisoned

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.bench.replay import Answer, Transfer, replay
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels import KERNELS, Params, Request
from hf_ring_attn.kernels.flash2 import Flash2, How, Package, Torch
from hf_ring_attn.kernels.flash4.calls import Bounds
from hf_ring_attn.sharding.mask import UNBOUNDED, Band, Mask
from hf_ring_attn.testing import BIDIRECTIONAL, Case, Inputs, inputs, packed, relative_error, sliding
from tests.helpers.kernel_answers import mask_of
from tests.helpers.rank_functions import poisoned_memory

FLASH2, REFERENCE = KERNELS["flash2"], KERNELS["reference"]
REQUEST = Request("cuda", torch.bfloat16, 8, 2, 128, 128, softcap=False, sinks=False, deterministic=False)
ABLE = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ABLE, reason="needs an NVIDIA GPU of capability 8.0 or later")]
NO_PACKAGE = "; ".join(Package().reasons(True, True))

D128 = Case(why="D 128, grouped", length=2048, heads=8, kv_heads=2, head_dim=128, value_dim=128, seed=90)
DOCUMENTS = packed(700, 1, 129, 1300, 64, 3, 515, 1000, 200, 160, 24)  # 4096 tokens
CASES = (
    D128,
    replace(D128, why="chunks of 375 at ring 8", length=6000),
    replace(D128, why="chunks of 3 at ring 8", length=48),
    replace(D128, why="chunks of one token at ring 8", length=16),
    replace(D128, why="two rows", batch=2, length=1040),
    replace(D128, why="one head a key head", heads=3, kv_heads=3, length=2992),
    replace(D128, why="D 64, eight heads a key head", head_dim=64, value_dim=64, kv_heads=1, length=2992),
    replace(D128, why="D 72", head_dim=72, value_dim=72, heads=2, length=2992),
    replace(D128, why="D 96", head_dim=96, value_dim=96, heads=6, length=2992),
    replace(D128, why="D 192", head_dim=192, value_dim=192, heads=4, length=2992),
    replace(D128, why="D 256", head_dim=256, value_dim=256, heads=4, length=2992),
    replace(D128, why="bidirectional", band=BIDIRECTIONAL, length=2992),
    replace(D128, why="window of 300", band=sliding(300), length=4096),
    replace(D128, why="window of 1500, chunks of 375", band=sliding(1500), length=6000),
    replace(D128, why="bidirectional window", band=(-700, 300), length=4096),
    replace(D128, why="all of the future, little of the past", band=(None, 200), length=2992),
    replace(D128, why="D 256, window", head_dim=256, value_dim=256, heads=4, band=sliding(900), length=4096),
    replace(D128, why="documents", documents=(DOCUMENTS,), length=4096),
    replace(D128, why="documents of one token", documents=(packed(*[1] * 64),), length=64),
    replace(D128, why="D 256, documents", documents=(DOCUMENTS,), length=4096, heads=4, head_dim=256, value_dim=256),
    replace(D128, why="documents with a window", documents=(DOCUMENTS,), length=4096, band=sliding(333)),
    replace(D128, why="documents, bidirectional", documents=(DOCUMENTS,), length=4096, band=BIDIRECTIONAL),
    replace(
        D128, why="other documents in each row, padding", batch=3, length=4096,
        documents=(DOCUMENTS, packed(-100, 3000, 996), packed(2000, -2096)),
    ),
    replace(D128, why="padding on the right, two rows", batch=2, documents=(packed(2048), packed(777, -1271))),
    replace(D128, why="sinks", sinks=True, length=2992),
    replace(
        D128, why="sinks, window, documents, D 64", sinks=True, band=sliding(128), head_dim=64, value_dim=64,
        documents=(DOCUMENTS,), length=4096,
    ),
)  # fmt: skip
IDS = [case.why for case in CASES]
SIZES = (1, 2, 4, 8)


@cache
def given(case: Case, dtype: torch.dtype) -> Inputs:
    return inputs(case, dtype)


def answer(
    kernel: Any, case: Case, size: int, dtype: torch.dtype, mask: Mask, path: Transfer = "ring", exact: bool = False,
    deterministic: bool = False,
) -> Answer:  # fmt: skip
    x = given(case, dtype)
    q, k, v, dout = (x[name].cuda().to(torch.float64 if exact else dtype) for name in ("q", "k", "v", "dout"))
    sinks = None if x["sinks"] is None else x["sinks"].cuda()
    params = Params(case.head_dim**-0.5, case.softcap, sinks, deterministic)
    return replay(kernel, q, k, v, dout, mask, size, params, path=path)


def plain_mask(case: Case, dtype: torch.dtype = torch.bfloat16) -> Mask:
    return mask_of(case, given(case, dtype)["documents"])


@cache
def exact(case: Case, dtype: torch.dtype) -> Answer:
    """In float64 by the reference, from the same rounded inputs; on the CPU."""
    got = answer(REFERENCE, case, 1, dtype, plain_mask(case, dtype), exact=True)
    return Answer(*(x.cpu() for x in got))


def far(got: Answer, want: Answer, dtype: torch.dtype) -> dict[str, float]:
    """How often what 16 bits allow: eps. lse is in float32: in units of 1e-5.

    Where every query sees one key the exact dq and dk are zero: what is computed is the rounding of larger terms.
    """
    errors = {}
    for name in Answer._fields:
        mine, theirs = getattr(got, name), getattr(want, name)
        error = relative_error(mine, theirs)
        if name in ("dq", "dk") and not float(theirs.norm()) > 1e-3 * float(want.dv.norm()):
            error = float(mine.cpu().double().norm() / want.dv.norm())
        errors[name] = error / (1e-5 if name == "lse" else torch.finfo(dtype).eps)
    return errors


def test_it_is_served_and_by_torch() -> None:
    assert FLASH2.unsupported(REQUEST) == []
    assert Flash2([Torch()]).unsupported(REQUEST) == []
    assert FLASH2.rounds_gradients


@pytest.mark.skipif(not NO_PACKAGE, reason="the package is here")
@pytest.mark.parametrize("asked", ["softcap", "deterministic"])
def test_what_only_the_package_has_is_refused_without_it(asked: str) -> None:
    reasons = FLASH2.unsupported(replace(REQUEST, **{asked: True}))  # type: ignore[arg-type]  # a flag
    assert len(reasons) == 2 and reasons[0].startswith("torch's own: it ")
    assert reasons[1] == f"the flash-attn package: {NO_PACKAGE}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_one_gpu_is_as_near_to_float64_as_16_bits_allow(case: Case, dtype: torch.dtype) -> None:
    errors = far(answer(FLASH2, case, 1, dtype, plain_mask(case, dtype)), exact(case, dtype), dtype)
    print(case.why, errors)  # noqa: T201  # shown with -rP: the figures of a results page
    assert max(errors.values()) < 1, errors


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_ring_is_as_near_to_float64_as_16_bits_allow(case: Case, size: int) -> None:
    got = answer(FLASH2, case, size, torch.bfloat16, plain_mask(case))
    errors = far(got, exact(case, torch.bfloat16), torch.bfloat16)
    print(case.why, size, errors)  # noqa: T201  # as above
    assert max(errors.values()) < 1, errors


@pytest.mark.parametrize("case", CASES[1::3], ids=lambda case: case.why)
@pytest.mark.parametrize("path", ["gather", "sparse"])
def test_another_path_is_as_near(case: Case, path: Transfer) -> None:
    got = answer(FLASH2, case, 4, torch.bfloat16, plain_mask(case), path)
    errors = far(got, exact(case, torch.bfloat16), torch.bfloat16)
    assert max(errors.values()) < 1, errors


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_no_number_is_read_from_memory_that_was_not_written(case: Case) -> None:
    with poisoned_memory():
        got = answer(FLASH2, case, 2, torch.bfloat16, plain_mask(case))
    errors = far(got, exact(case, torch.bfloat16), torch.bfloat16)
    assert max(errors.values()) < 1, errors


HIDDEN = {
    "the last": lambda at: at >= 300,
    "the first": lambda at: at < 1700,
    "all but three": lambda at: (at < 900) | (at >= 903),
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("band", [(0, None), (0, 99), (0, 700), (None, 150), (-40, None), (-600, 500)], ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_many_queries_and_few_keys(hidden: str, band: tuple[int | None, int | None], size: int) -> None:
    """Keys that nobody sees: where queries outnumber keys FlashAttention 2 takes wide bounds for none (issue 895)."""
    case = replace(D128, band=band, head_dim=64, value_dim=64)
    lo, hi = band
    mask = Mask.of(
        Band(-UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi), 1, case.length,
        None, HIDDEN[hidden](torch.arange(case.length))[None],
    )  # fmt: skip
    assert not mask.holes
    got = answer(FLASH2, case, size, torch.bfloat16, mask)
    want = answer(REFERENCE, case, 1, torch.bfloat16, mask, exact=True)
    errors = far(got, Answer(*(x.cpu() for x in want)), torch.bfloat16)
    assert max(errors.values()) < 1, errors


def one_call(q: Tensor, k: Tensor, bounds: Bounds, ends: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
    """out of one packed call of torch's own; ``ends``: where rectangles of q and k end."""
    starts = [torch.tensor([0, *some], dtype=torch.int32, device="cuda") for some in ends]
    most = [max(b - a for a, b in pairwise((0, *some))) for some in ends]
    out, _ = Torch().forward(How(Params(0.125), bounds, (starts[0], starts[1], most[0], most[1])), q, k, k)
    return out


def test_the_trap_is_there() -> None:
    """Why tiles are cut: a right bound that hides something is dropped where it is as wide as the keys. When this
    fails, the library has changed."""
    q, k = (torch.randn(n, 2, 64, device="cuda", dtype=torch.bfloat16) for n in (40, 3))
    ends = (40,), (3,)
    free, dropped = (one_call(q, k, bounds, ends) for bounds in (Bounds(None, None), Bounds(None, 37)))
    assert torch.equal(free, dropped)
    assert not torch.equal(one_call(q[:3], k, Bounds(None, 0), ((3,), (3,))), dropped[:3])


def test_rectangles_of_a_packed_call_are_those_of_calls_of_their_own() -> None:
    q, k = (torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (300, 500))
    bounds = Bounds(60, 0)
    both = one_call(q, k, bounds, ((100, 300), (180, 500)))
    first = one_call(q[:100], k[:180], bounds, ((100,), (180,)))
    second = one_call(q[100:], k[180:], bounds, ((200,), (320,)))
    assert relative_error(both, torch.cat([first, second])) < 0.005


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
def test_the_public_function_takes_it_and_heads_first_tensors(documents: tuple[tuple[int, int], ...] | None) -> None:
    """As transformers hands them over: [B, H, T, D] transposed; through autograd, with the sinks' gradient."""
    case = replace(D128, batch=2, length=4096, documents=(documents,) * 2 if documents else (), sinks=True)
    x = given(case, torch.bfloat16)
    tensors = {name: x[name].cuda() for name in ("q", "k", "v")}
    leaves = {name: y.transpose(1, 2).contiguous().requires_grad_() for name, y in tensors.items()}
    assert x["sinks"] is not None
    sinks = x["sinks"].cuda().requires_grad_()
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves.values())
    out = ring_attention(q, k, v, sinks=sinks, documents=x["documents"], config=RingConfig(kernel="flash2"))
    dout = x["dout"].cuda()
    out.backward(dout)

    wide = [y.double().requires_grad_() for y in (*tensors.values(), sinks.detach())]
    want = ring_attention(*wide[:3], sinks=wide[3], documents=x["documents"], config=RingConfig(kernel="reference"))
    want.backward(dout.double())
    assert relative_error(out, want) < 0.0078
    got: list[Tensor | None] = [leaf.grad.transpose(1, 2) for leaf in leaves.values() if leaf.grad is not None]
    for mine, theirs in zip([*got, sinks.grad], wide, strict=True):
        assert mine is not None and theirs.grad is not None
        assert relative_error(mine, theirs.grad) < (0.0078 if mine.dim() == 4 else 0.02)


def test_a_sum_of_outputs_has_a_gradient_of_ones_that_is_not_laid_out() -> None:
    q, k, v = (torch.randn(1, 300, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    ring_attention(q, k, v, config=RingConfig(kernel="flash2")).sum().backward()
    assert v.grad is not None
    assert relative_error(v.grad.float().sum(1), torch.full((1, 4, 128), 300.0)) < 0.01


def test_tensors_that_do_not_begin_at_sixteen_bytes() -> None:
    case = replace(D128, length=200, head_dim=64, value_dim=64)
    x = given(case, torch.bfloat16)
    params, mask = Params(0.125), plain_mask(case)

    def shifted(y: Tensor) -> Tensor:
        store = torch.zeros(y.numel() + 3, dtype=y.dtype, device="cuda")
        return store[3:].view(y.shape).copy_(y)

    tensors = [x["q"], x["k"], x["v"], x["dout"]]
    q, k, v, dout = (shifted(y) for y in tensors)
    errors = far(replay(FLASH2, q, k, v, dout, mask, 1, params), exact(case, torch.bfloat16), torch.bfloat16)
    assert max(errors.values()) < 1, errors


# ---- the package, where it is installed ----------------------------------------------------------------------------

with_package = pytest.mark.skipif(bool(NO_PACKAGE), reason=f"the flash-attn package: {NO_PACKAGE}")


@with_package
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_package_is_as_near(case: Case, softcap: float | None, size: int) -> None:
    kernel, case = Flash2([Package()]), replace(case, softcap=softcap)
    assert kernel.unsupported(replace(REQUEST, softcap=True, deterministic=True)) == []
    got, again = (answer(kernel, case, size, torch.bfloat16, plain_mask(case), deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    errors = far(got, exact(case, torch.bfloat16), torch.bfloat16)
    assert max(errors.values()) < 1, errors
