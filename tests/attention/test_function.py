"""`ring_attention` as people call it: what they ask for and get, what it leaves alone, and its edges."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from hf_ring_attn.attention import call
from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.biases import Alibi
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.reference import Reference
from hf_ring_attn.sharding import plan
from hf_ring_attn.testing import Case, inputs, packed, relative_error
from hf_ring_attn.traffic import traffic_of
from tests.helpers.checks import EXACT, Ranks, distance, exact_answer, same_bits, worst
from tests.helpers.rank_functions import attention, held, qkv, whole


def out_of(*args: Any, **kwargs: Any) -> Tensor:
    out = ring_attention(*args, **kwargs)
    assert isinstance(out, Tensor)
    return out


# ---- what is asked and what comes back ---------------------------------------------------------------------------

PACKED = Case(why="three documents, one hole", length=21, heads=4, documents=(packed(5, 8, -2, 6),))


def test_documents_may_be_one_row_for_all_or_one_for_each() -> None:
    documents = torch.tensor([0, 0, 0, 4, 4, 4, -1, 9])
    one, each = (out_of(**qkv(), documents=ids) for ids in (documents, documents.expand(2, -1)))
    assert torch.equal(one, each)
    assert torch.equal(one, out_of(**qkv(), documents=documents.int()))
    assert not one[:, 6].any()
    assert torch.equal(one[:, 3], qkv()["v"].repeat_interleave(2, 2)[:, 3]), "the first token of a document sees itself"
    assert not torch.equal(one, out_of(**qkv()))


def shares_of(case: Case, length: int | None) -> dict[str, Tensor]:
    return attention(case, length=length)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_length_that_is_told_is_the_one_that_is_found(ranks: Ranks, size: int) -> None:
    told, found = (whole(ranks(size).run(shares_of, PACKED, length), 21) for length in (21, None))
    assert all(torch.equal(told[name], found[name]) for name in told)
    assert worst(distance(told, exact_answer(PACKED))) < EXACT


def test_the_lse_comes_on_request_and_is_not_differentiable() -> None:
    x = {name: value.bfloat16().requires_grad_() for name, value in qkv().items()}
    answer = ring_attention(**x, return_lse=True)
    assert isinstance(answer, tuple)
    out, lse = answer
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (out.shape, lse.shape) == ((2, 8, 4, 5), (2, 4, 8))
    assert out.requires_grad and not lse.requires_grad
    assert torch.equal(out, out_of(**x))


def test_a_sink_without_weight_has_no_gradient_where_nothing_is_seen_either() -> None:
    """exp(sink - lse) is exp(-inf - -inf) there."""
    x, sinks = qkv(), torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf]).requires_grad_()
    out_of(**x, sinks=sinks, documents=torch.tensor([0, 0, 0, 0, 0, 0, 0, -1])).sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.isfinite().all() and sinks.grad[[0, 3]].eq(0).all() and sinks.grad[[1, 2]].all()


def test_the_default_scale_is_that_of_the_head() -> None:
    assert torch.equal(out_of(**qkv()), out_of(**qkv(), scale=6**-0.5))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_kernels_get_a_scale_above_zero_for_any(
    scale: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash attention masks products before it scales them: a negative scale would make their -inf +inf, and 0 nan."""
    kernel, seen = Reference.forward, []

    def forward(self: Reference, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, *more: Any) -> Any:
        seen.append(params.scale)
        return kernel(self, q, k, v, tiles, params, *more)

    monkeypatch.setattr(Reference, "forward", forward)
    case = Case(why="a scale that is not above 0", length=13, heads=4, scale=scale, softcap=softcap)
    x, want = inputs(case), exact_answer(case)
    q, k, v = (x[name].requires_grad_() for name in ("q", "k", "v"))
    out = out_of(q, k, v, scale=scale, softcap=softcap)
    out.backward(x["dout"])
    assert seen and min(seen) > 0
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    assert all(relative_error(x, want[name]) < EXACT for name, x in found.items() if x is not None), found


def test_a_window_is_counted_as_documented() -> None:
    """(left, right): a causal window of w tokens is (w - 1, 0), and causal hides what is to the right."""
    x = qkv()
    x["q"] = torch.zeros_like(x["q"])  # each visible value counts the same
    v = x["v"].repeat_interleave(2, 2)
    for window, causal, seen in (
        ((2, 0), True, slice(2, 5)),
        ((2, 3), True, slice(2, 5)),
        ((1, 2), False, slice(3, 7)),
        ((None, 1), False, slice(0, 6)),
        ((0, None), False, slice(4, 8)),
        ((None, None), True, slice(0, 5)),
        ((None, None), False, slice(0, 8)),
    ):
        out = out_of(**x, window=window, causal=causal)
        torch.testing.assert_close(out[:, 4], v[:, seen].mean(1), msg=f"{window}, causal={causal}")


@pytest.mark.parametrize("kind", [numpy.uint8, numpy.uint64, numpy.int8, numpy.int64])
def test_a_window_may_be_of_numpys_numbers(kind: type[Any]) -> None:
    """One without a sign has no negative: -uint8(3) is 253, so other keys were seen, without an error."""
    x, sides = qkv(), (2, 3)
    got = out_of(**x, window=tuple(map(kind, sides)), causal=False)
    assert torch.equal(got, out_of(**x, window=sides, causal=False))


def under_a_default_device(length: int) -> float:
    """The largest distance of results if tables are made while torch makes tensors elsewhere, from those without."""
    ids, mine = torch.arange(length) // 5, held(length, dist.get_rank(), dist.get_world_size())
    q, apart = torch.randn(1, length, 2, 4, dtype=torch.float64)[:, mine], 0.0
    for options in ({}, {"documents": ids}, {"window": (2, 0)}):
        found = []
        for device in ("meta", None):
            plan._cached.cache_clear()
            torch.set_default_device(device)
            try:
                x = q.clone().requires_grad_()
                out = out_of(x, x, x, length=length, **options)
                found.append((out, *torch.autograd.grad(out.square().sum(), x)))
            finally:
                torch.set_default_device(None)
        apart = max(apart, *(float((a - b).detach().abs().max()) for a, b in zip(*found, strict=True)))
    return apart


@pytest.mark.parametrize("size", [1, 2])
def test_a_default_device_is_not_that_of_tables(ranks: Ranks, size: int) -> None:
    """torch.set_default_device("cuda") ended the first attention: tables are made and read on the host."""
    assert ranks(size).run(under_a_default_device, 24) == [0.0] * size


def in_pairs(cases: list[Case]) -> dict[str, Tensor]:
    """Ranks 0 and 2 share one sequence while 1 and 3 share another, as data parallel copies of a ring do."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    which, place = dist.get_rank() % 2, dist.get_rank() // 2
    x, case = inputs(cases[which]), cases[which]
    leaves = [x[name][:, held(case.length, place, 2)].requires_grad_() for name in ("q", "k", "v")]
    out = out_of(*leaves, documents=x["documents"], group=pairs[which])
    gradients = torch.autograd.grad(out, leaves, x["dout"][:, held(case.length, place, 2)])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def test_rings_side_by_side_keep_to_their_groups(ranks: Ranks) -> None:
    cases = [PACKED, Case(why="another row", batch=2, length=15, heads=4, seed=9)]
    shares = ranks(4).run(in_pairs, cases)
    for which, case in enumerate(cases):
        got, want = whole(shares[which::2], case.length), exact_answer(case)
        assert worst(distance(got, {name: want[name] for name in got})) < EXACT


# ---- what is left alone ------------------------------------------------------------------------------------------


def untouched(config: RingConfig) -> list[bool]:
    """Inputs and what the caller does with outputs afterwards have nothing to do with each other."""
    mine = held(8, dist.get_rank(), dist.get_world_size())
    x = {name: row[:, mine].requires_grad_() for name, row in qkv().items()}
    before = {name: row.detach().clone() for name, row in x.items()}
    sinks, documents = torch.zeros(4, requires_grad=True), torch.zeros(8, dtype=torch.int64)
    out = out_of(**x, sinks=sinks, documents=documents, config=config)
    dout = torch.ones_like(out)
    gradients = torch.autograd.grad(out, [*x.values(), sinks], dout)
    tensors = [out, *gradients, *x.values(), sinks, documents, dout]
    owners = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return [torch.equal(x[name], before[name]) for name in x] + [
        len(owners) == len(tensors), not documents.any().item(), not sinks.any().item(), bool((dout == 1).all()),
    ]  # fmt: skip


@pytest.mark.parametrize("config", [RingConfig(), RingConfig(backward="gather", heads_per_gather=1)])
@pytest.mark.parametrize("size", [1, 2])
def test_the_callers_tensors_are_neither_written_to_nor_shared(ranks: Ranks, size: int, config: RingConfig) -> None:
    assert ranks(size).run(untouched, config) == [[True] * 7] * size


def frozen(*trained: str) -> dict[str, bool]:
    """Which inputs have a gradient, where only these require one, and whether it is the usual one."""
    mine = held(8, dist.get_rank(), dist.get_world_size())
    x: dict[str, Any] = {name: row[:, mine] for name, row in qkv().items()} | {"sinks": torch.zeros(4)}
    usual = {name: value.clone().requires_grad_() for name, value in x.items()}
    out_of(**usual).square().sum().backward()
    for name in trained:
        x[name].requires_grad_()
    out_of(**x).square().sum().backward()
    return {name: torch.equal(value.grad, usual[name].grad) for name, value in x.items() if value.grad is not None}


@pytest.mark.parametrize("trained", [("q",), ("k",), ("v",), ("q", "v"), ("sinks",)], ids="+".join)
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_for_those_who_ask(ranks: Ranks, size: int, trained: tuple[str, ...]) -> None:
    assert ranks(size).run(frozen, *trained) == [dict.fromkeys(trained, True)] * size


def test_without_gradients_nothing_is_kept() -> None:
    leaves = {name: value.requires_grad_() for name, value in qkv().items()}
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = out_of(**leaves)
        assert not out.requires_grad
        assert torch.equal(out, out_of(**leaves).detach())
    assert not out_of(**qkv()).requires_grad


def compiled_out(**leaves: Tensor) -> Tensor:
    return torch.compile(out_of, backend="aot_eager")(**leaves)


@pytest.mark.parametrize("context", [torch.inference_mode, FakeTensorMode], ids=lambda context: context.__name__)
@pytest.mark.parametrize("call", [out_of, compiled_out], ids=lambda call: call.__name__)
def test_what_a_call_caches_serves_calls_of_other_kinds(
    call: Callable[..., Tensor], context: Callable[[], AbstractContextManager[Any]]
) -> None:
    plan._cached.cache_clear()
    leaves = {name: value.requires_grad_() for name, value in qkv().items()}
    with context() as mode:
        out_of(**{name: mode.from_tensor(x) if isinstance(mode, FakeTensorMode) else x for name, x in leaves.items()})
    call(**leaves).sum().backward()
    assert plan._cached.cache_info().currsize == 1
    assert all(x.grad is not None and x.grad.any() for x in leaves.values())


def strided() -> list[bool]:
    """Inputs as transformers has them, [B, H, T, D] seen as [B, T, H, D], and heads cut out of one projection."""
    mine = held(8, dist.get_rank(), dist.get_world_size())
    x = {name: row[:, mine] for name, row in qkv().items()}
    wide = torch.cat([x["q"], x["k"]], 2)
    other = {
        "q": wide[:, :, :4], "k": wide[:, :, 4:], "v": x["v"].transpose(1, 2).contiguous().transpose(1, 2),
    }  # fmt: skip
    answers = []
    for tensors in (x, other):
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        out = out_of(**leaves)
        answers.append([out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))])
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)] + [not other["v"].is_contiguous()]


@pytest.mark.parametrize("size", [1, 2])
def test_inputs_need_not_be_contiguous(ranks: Ranks, size: int) -> None:
    assert ranks(size).run(strided) == [[True] * 5] * size


# ---- edges -------------------------------------------------------------------------------------------------------


def nothing(batch: int, documents: bool, config: RingConfig) -> list[tuple[int, ...]]:
    x = {name: row.requires_grad_() for name, row in qkv(0, batch=batch).items()}
    ids = torch.zeros(batch, 0, dtype=torch.int64) if documents else None
    out = out_of(**x, documents=ids, config=config)
    return [tuple(y.shape) for y in (out, *torch.autograd.grad(out.sum(), list(x.values())))]


@pytest.mark.parametrize("config", [RingConfig(), RingConfig(backward="gather")], ids=lambda config: config.backward)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_no_tokens_and_no_rows(ranks: Ranks, size: int, batch: int, documents: bool, config: RingConfig) -> None:
    want = [(batch, 0, 4, 5), (batch, 0, 4, 6), (batch, 0, 2, 6), (batch, 0, 2, 5)]
    assert ranks(size).run(nothing, batch, documents, config) == [want] * size


def sizes_of_transports(batch: int, tokens: int, score_mod: Any) -> set[int]:
    """The sizes of the rings whose transports an attention of nothing takes, forward and backward."""
    sizes = set[int]()

    def noted(ring: Ring, *args: Any) -> Any:
        sizes.add(ring.size)
        return traffic_of(ring, *args)

    mine = held(tokens, dist.get_rank(), dist.get_world_size())
    x = {name: row[:, mine].requires_grad_() for name, row in qkv(tokens, batch=batch).items()}
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    with mock.patch.object(call, "traffic_of", noted):
        out = out_of(**x, documents=ids, score_mod=score_mod)
        gradients = torch.autograd.grad(out.sum(), list(x.values()))
    assert [g.shape for g in gradients] == [row.shape for row in x.values()] and out.shape[:2] == (batch, len(mine))
    return sizes


@pytest.mark.parametrize("score_mod", [None, Alibi(4)], ids=["plain", "score_mod"])
@pytest.mark.parametrize(("batch", "tokens"), [(2, 0), (0, 8), (0, 7)])
def test_nothing_is_sent_of_nothing(ranks: Ranks, batch: int, tokens: int, score_mod: Any) -> None:
    """Pulls have no memory for it, and raised an IndexError."""
    assert ranks(2).run(sizes_of_transports, batch, tokens, score_mod) == [{1}] * 2


def spoiled(case: Case, token: int, config: RingConfig) -> dict[str, Tensor]:
    x = inputs(case)
    for name in ("q", "k", "v", "dout"):
        x[name][:, token] = torch.nan
    return attention(case, config, given=x)


@pytest.mark.parametrize("config", [RingConfig(), RingConfig(backward="gather")], ids=lambda config: config.backward)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_nan_stays_in_its_document_and_is_not_hidden_there(ranks: Ranks, size: int, config: RingConfig) -> None:
    clean = whole(ranks(size).run(attention, PACKED, config), 21)
    dirty = whole(ranks(size).run(spoiled, PACKED, 7, config), 21)
    others = torch.ones(21, dtype=torch.bool)
    others[5:13] = False
    for name in ("out", "dq", "dk", "dv"):
        assert same_bits(clean[name][:, others], dirty[name][:, others]), name
        assert dirty[name][:, 7].isnan().all(), name
    assert dirty["out"][:, 7:13].isnan().all(), "whoever sees a nan is nan"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nan_in_padding_is_seen_by_nobody(ranks: Ranks, size: int) -> None:
    clean = whole(ranks(size).run(attention, PACKED), 21)
    dirty = whole(ranks(size).run(spoiled, PACKED, 14, RingConfig()), 21)
    assert all(same_bits(clean[name], dirty[name]) for name in ("out", "lse", "dq", "dk", "dv"))


WITHOUT_RING = """
import torch, hf_ring_attn, torch.distributed as dist
q = torch.randn(1, 6, 2, 4)
out = hf_ring_attn.ring_attention(q, q, q)
want = torch.nn.functional.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3, is_causal=True).transpose(1, 2)
assert not dist.is_initialized()
assert (out - want).abs().max() < 1e-5
assert hf_ring_attn.positions(6, rank=1, world_size=2).tolist() == [2, 3, 4, 5]
"""


@pytest.mark.turns
def test_the_public_names_work_alone() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_RING], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
