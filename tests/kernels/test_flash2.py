"""What flash2 alone has: calls out of FlashAttention 2's traps, as few as can be; its two libraries and their words."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_ring_attn.bench.replay import Transfer, replay
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels import KERNELS, Gradients, Kernel, Params, Request, flash2
from hf_ring_attn.kernels.flash2 import Flash2, How, Package, Torch, plan
from hf_ring_attn.kernels.flash4.calls import Bounds
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Band, Mask, Tile, tiles
from hf_ring_attn.sharding.mask import UNBOUNDED as FAR
from hf_ring_attn.testing import Case, inputs, packed
from hf_ring_attn.traffic import head_halves
from tests.helpers.cases import CASES
from tests.helpers.checks import Ranks, distance, narrow_answer, worst
from tests.helpers.kernel_answers import NO_HOLES, assert_same, mask_of, params_of
from tests.helpers.rank_functions import Answer as Answers
from tests.helpers.rank_functions import attention
from tests.helpers.rank_functions import whole as gathered
from tests.kernels.fake_flash2 import Fake
from tests.kernels.test_all_kernels import REQUEST
from tests.kernels.test_flash4 import plain


def ours(fake: Fake) -> Flash2:
    return Flash2([fake])


# ---- calls ---------------------------------------------------------------------------------------------------------


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Any band over documents whose keys are hidden at either end: rectangles with many queries and few keys."""
    lo = draw(st.sampled_from([-FAR, 0, -1, -3, -20]))
    hi = draw(st.sampled_from([FAR, 0, 1, 2, 5, 20]))
    length, batch = 32, draw(st.integers(1, 2))
    documents, hidden = torch.zeros(2, batch, length, dtype=torch.int64).unbind()
    for row in range(batch):
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=8)))
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            before, after = draw(st.integers(0, 20)), draw(st.integers(0, 20))
            documents[row, start:stop] = number if draw(st.integers(0, 5)) else -1
            hidden[row, start : min(stop, start + before)] = 1
            hidden[row, max(start, stop - after) : stop] = 1
    return Mask.of(Band(lo, hi), batch, length, documents, hidden.bool())


@given(masks(), st.sampled_from([1, 2, 4]), st.sampled_from(["ring", "gather", "sparse"]))
@settings(max_examples=150, deadline=None)
def test_any_band_over_hidden_keys(mask: Mask, size: int, path: Transfer) -> None:
    assert not mask.holes
    generator = torch.Generator().manual_seed(0)
    batch = len(mask.terms[0][1])
    q, k, v, dout = (torch.randn(batch, 32, heads, 4, generator=generator) for heads in (4, 2, 2, 4))
    got = replay(ours(Fake()), q, k, v, dout, mask, size, Params(0.5), torch.float32, path)
    assert_same(got, replay(KERNELS["reference"], q, k, v, dout, mask, 1, Params(0.5), torch.float32))


BANDS = [(0, FAR), (-FAR, 2), (0, 2), (-1, 7), (-FAR, 5), (-FAR, 20), (-25, 25), (-FAR, FAR)]


@pytest.mark.parametrize("documents", [1, 6])
@pytest.mark.parametrize("keys", [(0, 3), (30, 33), (20, 22)])
@pytest.mark.parametrize("band", BANDS)
def test_more_queries_than_keys_are_cut_out_of_the_traps(
    band: tuple[int, int], keys: tuple[int, int], documents: int
) -> None:
    """Issue 895 of flash-attention: a right bound as wide as the keys is dropped, and none beside a left one is not."""
    at = torch.arange(40 * documents)[None]
    hidden = (at % 40 < keys[0]) | (at % 40 >= keys[1])
    mask = Mask.of(Band(*band), 1, 40 * documents, at // 40, hidden)
    q, k, v, dout = torch.randn(4, 1, 40 * documents, 2, 4).unbind()
    fake = Fake()
    got = replay(ours(fake), q, k, v, dout, mask, 1, Params(0.5), torch.float32)
    assert_same(got, replay(KERNELS["reference"], q, k, v, dout, mask, 1, Params(0.5), torch.float32))
    assert len(fake.calls) <= 2 * 3


@pytest.mark.parametrize("band", [CAUSAL, Band()])
def test_a_packed_call_has_no_token_twice(band: Band) -> None:
    """It adds to each token once, so bits do not depend on the order of adds."""
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([3, 3, 20, 3, 3]))
    mask, layout = Mask.of(band, 1, 32, ids[None]), Layout(32, 2, 0)
    for runs in (layout.whole(), layout.runs()):
        table = tiles(mask, layout.runs(), runs).contiguous().numpy().tobytes()
        calls = plan(table, layout.local_length, sum(run.length for run in runs))
        assert max(len(call.q_starts) for call in calls) > 1, "the document in both chunks is one of several"
        for call in calls:
            for starts, lengths in ((call.q_starts, call.q_lengths), (call.k_starts, call.k_lengths)):
                stops = [a + b for a, b in zip(starts, lengths, strict=True)]
                assert all(stop <= start for stop, start in zip(stops, starts[1:], strict=False))


MANY = (packed(*[5] * 18, 6),)


@pytest.mark.parametrize(
    ("case", "size", "forward", "backward"),
    [
        # one call forward and one backward
        (plain(96), 1, 1, 1),
        (plain(96, batch=2), 1, 1, 1),
        # forward two a rank, for its two chunks, which are one on the last rank; backward one a pair of chunks and lane
        (plain(96), 2, 3, 4),
        (plain(96, batch=2), 2, 3, 4),
        (plain(96), 4, 7, 16),
        # documents: one call for all; another for the document that lies in two chunks
        (plain(96, documents=MANY), 1, 1, 1),
        (plain(96, batch=2, documents=MANY * 2), 1, 1, 1),
        (plain(96, documents=MANY, band=(0, 3)), 1, 1, 1),
        (plain(96, documents=MANY, band=(None, None)), 1, 1, 1),
        (plain(96, documents=MANY), 2, 2, 2 + 2),
        (plain(96, band=(0, 10)), 1, 1, 1),
    ],
)
def test_as_few_calls_as_can_be(case: Case, size: int, forward: int, backward: int) -> None:
    x, fake = inputs(case, torch.float32), Fake()
    tensors = x["q"], x["k"], x["v"], x["dout"]
    replay(ours(fake), *tensors, mask_of(case, x["documents"]), size, params_of(case, x), torch.float32)
    kinds = [kind for kind, _, _ in fake.calls]
    lanes = len(head_halves(case.kv_heads, size))
    assert (kinds.count("forward"), kinds.count("backward")) == (forward, backward * lanes)


def test_a_query_with_two_tiles_is_no_softmax_of_its_own() -> None:
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 8, 2, 8)
    table = torch.tensor([Tile(0, 0, 4, 4, at, 2, at, 0, FAR) for at in (0, 4)])
    with pytest.raises(AssertionError, match="a query met two tiles"):
        ours(Fake()).forward(q, k, k, table, Params(1.0))


def through_the_ring(case: Case, config: RingConfig) -> Answers:
    """This rank's share by the public function, in float32."""
    with mock.patch.dict(KERNELS, {"flash2": ours(Fake())}), mock.patch.object(Flash2, "unsupported", return_value=[]):
        return attention(case, config, given=inputs(case, torch.float32))


@pytest.mark.parametrize("backward", ["ring", "gather"])
def test_real_ranks_hand_it_the_out_of_its_heads(ranks: Ranks, backward: Literal["ring", "gather"]) -> None:
    case = next(case for case in NO_HOLES if case.why == "sinks, grouped heads")
    config = RingConfig(kernel="flash2", backward=backward, heads_per_gather=1)
    got = gathered(ranks(2).run(through_the_ring, case, config), case.length)
    errors = distance(got, narrow_answer(case, torch.float32))
    assert worst(errors) < 2e-6, errors


def test_the_backward_needs_the_forwards_out() -> None:
    kernel: Kernel = ours(Fake())
    q, lse = torch.randn(1, 4, 2, 8), torch.zeros(1, 2, 4)
    into = Gradients(*map(torch.zeros_like, (q, q, q)))  # type: ignore[arg-type]  # three tensors
    with pytest.raises(AssertionError, match="of out"):
        kernel.backward(q, q, q, q, lse, lse, torch.empty(0, 9, dtype=torch.int64), Params(1.0), into)


# ---- libraries -----------------------------------------------------------------------------------------------------


def test_the_first_library_that_can_serves_and_every_reason_is_given() -> None:
    unable, able, idle = Fake(["it is tired", "it is Saturday"]), Fake(), Fake()
    assert Flash2([unable]).unsupported(REQUEST) == ["fake: it is tired", "fake: it is Saturday"]
    kernel = Flash2([unable, able, idle])
    assert kernel.unsupported(REQUEST) == []
    q = torch.randn(1, 4, 2, 8)
    kernel.forward(q, q, q, torch.tensor([Tile(0, 0, 4, 0, 0, 4, 0, 0, FAR)]), Params(1.0))
    assert able.calls and not unable.calls and not idle.calls


def test_without_a_gpu_it_says_so_and_asks_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(flash2, "_package", lambda: pytest.fail("the package is imported"))
    assert Flash2().unsupported(REQUEST) == ["needs an NVIDIA GPU, and torch finds none"]


def test_torchs_own_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    library, known = Torch(), "2.13.0"
    monkeypatch.setattr(torch, "__version__", known)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert library.reasons(False, False) == []
    assert library.reasons(True, True) == [
        "it has no softcap", "it is deterministic only if the whole process is (torch.use_deterministic_algorithms)",
    ]  # fmt: skip
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    (reason,) = library.reasons(False, False)
    assert reason == "torch uses FA4 in its place (restore_flash_attention_impl() undoes it)"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: None, raising=False)
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    (reason,) = library.reasons(False, False)
    assert reason == "torch 3.0.0 is not one of ('2.11.', '2.12.', '2.13.')"
    monkeypatch.setattr(torch, "__version__", known)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert library.reasons(False, False) == ["this build of torch has none"]


@pytest.mark.parametrize("bounds", [Bounds(None, None), Bounds(None, 0), Bounds(7, 3)])
def test_torchs_ops_take_what_they_are_given(bounds: Bounds) -> None:
    """Without data: torch's own shape functions see the calls."""
    q, dout = (torch.empty(20, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    k = torch.empty(20, 2, 64, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    how = How(Params(0.1), bounds, (starts, starts, 12, 12))
    out, lse = Torch().forward(how, q, k, k)
    assert out.shape == q.shape and lse.shape == (4, 20) and lse.dtype == torch.float32
    gradients = Torch().backward(how, dout, q, k, k, out, lse)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


class Installed:
    """flash-attn 2.8's two functions with their own parameters, in their own order, computing with a fake."""

    def __init__(self) -> None:
        self.fake = Fake()
        self.deterministic: list[bool] = []

    def _wrapped_flash_attn_varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert not return_softmax and dropout_p == 0 and alibi_slopes is None
        bounds = self._bounds(causal, window_size_left, window_size_right)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return *self.fake.forward(How(Params(softmax_scale, softcap or None), bounds, lengths), q, k, v), q, q

    def _wrapped_flash_attn_varlen_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
        softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
        alibi_slopes: Tensor | None, deterministic: bool,
    ) -> Tensor:  # fmt: skip
        assert dropout_p == 0 and alibi_slopes is None
        self.deterministic.append(deterministic)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        bounds = self._bounds(causal, window_size_left, window_size_right)
        how = How(Params(softmax_scale, softcap or None), bounds, lengths)
        for to, x in zip((dq, dk, dv), self.fake.backward(how, dout, q, k, v, out, softmax_lse), strict=True):
            to.copy_(x)
        return softmax_lse

    def _bounds(self, causal: bool, left: int, right: int) -> Bounds:
        return Bounds(None if left < 0 else left, 0 if causal else None if right < 0 else right)


def of_version(version: str, interface: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    monkeypatch.setattr(flash2, "version", {"flash-attn": version}.__getitem__)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    return flash2._package.__wrapped__()


def test_the_package_is_taken_of_known_versions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_version("2.8.3", Installed(), monkeypatch)[1] == ()
    assert of_version("3.0.1", Installed(), monkeypatch)[1] == ("version 3.0.1 is not known here (2.7., 2.8.x are)",)
    for interface in (None, SimpleNamespace()):
        (reason,) = of_version("2.8.3", interface, monkeypatch)[1]
        assert reason.startswith("it does not import: ")


def test_the_package_gets_its_arguments_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Installed()
    found = of_version("2.8.3", installed, monkeypatch)
    monkeypatch.setattr(flash2, "_package", lambda: found)
    asked: Request = replace(REQUEST, softcap=True, deterministic=True)
    assert Flash2([Package()]).unsupported(asked) == []
    for case, params in (
        (
            next(case for case in CASES if case.why.startswith("window, documents, padding")),
            Params(0.5, 2.5, None, True),
        ),
        (plain(30), Params(0.3)),
        (plain(30, band=(-2, 7), batch=2), Params(0.3)),
    ):
        case = replace(case, head_dim=8, value_dim=8)
        x = inputs(case, torch.bfloat16)
        mask, tensors = mask_of(case, x["documents"]), (x["q"], x["k"], x["v"], x["dout"])
        got, want = (replay(kernel, *tensors, mask, 1, params) for kernel in (Flash2([Package()]), ours(Fake())))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert True in installed.deterministic and False in installed.deterministic
