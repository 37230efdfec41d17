"""flash2 on a CPU: tables become calls over a fake of FlashAttention 2 with its conventions, traps and roundings."""

from __future__ import annotations

from typing import Literal
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ring_attn.bench.replay import Answer, Road, replay
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels import KERNELS, Gradients, Kernel, Params, Request
from hf_ring_attn.kernels.flash2 import Flash2
from hf_ring_attn.kernels.flash2.calls import plan
from hf_ring_attn.kernels.flash4.calls import Packed
from hf_ring_attn.sharding import plan as plan_module
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Band, Mask, Tile, tiles
from hf_ring_attn.sharding.mask import UNBOUNDED as FAR
from hf_ring_attn.testing import Case, inputs, packed, relative_error
from hf_ring_attn.traffic import head_halves
from tests.helpers.checks import Ranks, distance, narrow_answer, worst
from tests.helpers.rank_functions import Answer as Answers
from tests.helpers.rank_functions import attention
from tests.helpers.rank_functions import whole as gathered
from tests.kernels.fake_flash2 import Fake
from tests.kernels.test_flash4 import EXPRESSIBLE, mask_of, plain, whole

SIZES = (1, 2, 4, 8)
REQUEST = Request("cuda", torch.bfloat16, 8, 2, 128, 128, softcap=False, sinks=False, deterministic=False)


def ours(fake: Fake) -> Flash2:
    return Flash2([fake], tried=False)


def answers(case: Case, size: int, road: Road = "ring") -> tuple[Answer, Answer, Fake]:
    x = inputs(case, torch.float32)
    mask = mask_of(case, x["documents"])
    params = Params(case.head_dim**-0.5 if case.scale is None else case.scale, case.softcap, x["sinks"])
    tensors = x["q"], x["k"], x["v"], x["dout"]
    fake = Fake()
    got = replay(ours(fake), *tensors, mask, size, params, torch.float32, road)
    return got, replay(KERNELS["reference"], *tensors, mask, 1, params, torch.float32), fake


def assert_same(got: Answer, want: Answer) -> None:
    for name in Answer._fields:
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        if name == "lse":
            assert torch.equal(mine.isinf(), theirs.isinf())
            mine, theirs = mine.nan_to_num(neginf=0.0), theirs.nan_to_num(neginf=0.0)
        # Where the exact gradient is zero, what is left is the rounding of float32.
        assert relative_error(mine, theirs) < 1e-5 or float((mine - theirs).abs().max()) < 2e-5, name


WAYS: list[tuple[int, Road]] = [
    *[(size, "ring") for size in SIZES], (2, "gather"), (8, "gather"), (2, "sparse"), (4, "sparse"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "road"), WAYS)
@pytest.mark.parametrize("case", EXPRESSIBLE, ids=lambda case: case.why)
def test_calls_make_the_reference(case: Case, size: int, road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "KEY_BLOCK", 12)  # cases are shorter than the real one
    case = whole(case, size)
    if case.length == 0:
        pytest.skip("nothing is left of it")
    got, want, _ = answers(case, size, road)
    assert_same(got, want)


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
def test_any_band_over_hidden_keys(mask: Mask, size: int, road: Road) -> None:
    assert not mask.holes
    generator = torch.Generator().manual_seed(0)
    batch = len(mask.terms[0][1])
    q, k, v, dout = (torch.randn(batch, 32, heads, 4, generator=generator) for heads in (4, 2, 2, 4))
    got = replay(ours(Fake()), q, k, v, dout, mask, size, Params(0.5), torch.float32, road)
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
    """What it adds to a gradient it adds once, so bits do not depend on the order of adds."""
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([3, 3, 20, 3, 3]))
    mask, layout = Mask.of(band, 1, 32, ids[None]), Layout(32, 2, 0)
    for runs in (layout.whole(), layout.runs()):
        tokens, keys = layout.local_length, sum(run.length for run in runs)
        calls = plan(tiles(mask, layout.runs(), runs), tokens, keys).calls
        packed_calls = [call for call in calls if isinstance(call, Packed)]
        assert packed_calls, "the document in both chunks is one of several"
        for call in packed_calls:
            for starts, lengths in ((call.q_starts, call.q_lengths), (call.k_starts, call.k_lengths)):
                stops = [a + b for a, b in zip(starts, lengths, strict=True)]
                assert all(stop <= start for stop, start in zip(stops, starts[1:], strict=False))


def test_each_contribution_is_rounded_to_the_inputs_dtype() -> None:
    case = plain(96, heads=4, kv_heads=4)
    x = inputs(case, torch.bfloat16)
    kernel, tensors = ours(Fake()), (x["q"], x["k"], x["v"], x["dout"])
    one, many, narrow = (
        replay(kernel, *tensors, mask_of(case, None), size, Params(0.3), wide)
        for size, wide in ((1, torch.float32), (4, torch.float32), (4, None))
    )
    for name in ("dq", "dk", "dv"):
        first, sums = getattr(one, name), getattr(many, name)
        assert torch.equal(first, first.bfloat16().float()), "one call: what left it in 16 bits"
        assert not torch.equal(sums, sums.bfloat16().float()), "several calls: float32 sums of such"
        assert torch.equal(getattr(narrow, name), sums.bfloat16())
    assert kernel.rounds_gradients(REQUEST)


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
        # documents: one packed call, and one for the document that lies in two chunks
        (plain(96, documents=MANY), 1, 1, 1),
        (plain(96, batch=2, documents=MANY * 2), 1, 1, 1),
        (plain(96, documents=MANY, band=(0, 3)), 1, 1, 1),
        (plain(96, documents=MANY, band=(None, None)), 1, 1, 1),
        (plain(96, documents=MANY), 2, 2, 2 + 2),
        (plain(96, band=(0, 10)), 1, 1, 1),
    ],
)
def test_as_few_calls_as_can_be(case: Case, size: int, forward: int, backward: int) -> None:
    _, _, fake = answers(case, size)
    kinds = [kind for kind, _, _ in fake.calls]
    lanes = len(head_halves(case.kv_heads, size))
    assert (kinds.count("forward"), kinds.count("backward")) == (forward, backward * lanes)


def test_packed_rows_without_padding_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "index_select", None)
    monkeypatch.setattr(torch.Tensor, "index_add_", None)
    answers(plain(96, batch=2, documents=MANY * 2), 1)


def test_a_query_with_two_tiles_is_no_softmax_of_its_own() -> None:
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 8, 2, 8)
    table = torch.tensor([Tile(0, 0, 4, 4, at, 2, at, 0, FAR) for at in (0, 4)])
    with pytest.raises(AssertionError, match="a query met two tiles"):
        ours(Fake()).forward(q, k, k, table, Params(1.0))


def test_a_table_without_tiles() -> None:
    q, k, table = torch.randn(2, 5, 2, 8), torch.randn(2, 3, 2, 8), torch.empty(0, 9, dtype=torch.int64)
    sinks, fake = torch.tensor([1.0, -torch.inf]), Fake()
    for given_sinks, want in ((None, [-torch.inf] * 2), (sinks, sinks.tolist())):
        out, lse = ours(fake).forward(q, k, k, table, Params(1.0, sinks=given_sinks))
        assert out.shape == q.shape and not out.any() and lse[0, :, 0].tolist() == want
    assert not fake.calls


def test_views_with_any_strides() -> None:
    case = plain(30, batch=2, heads=4, kv_heads=2)
    x = inputs(case, torch.float32)
    mask, tensors = mask_of(case, None), [x["q"], x["k"], x["v"], x["dout"]]
    heads_first = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in tensors]
    apart = [y.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for y in tensors]
    first, *others = (
        replay(ours(Fake()), q, k, v, dout, mask, 1, Params(0.3), torch.float32)
        for q, k, v, dout in (tensors, heads_first, apart)
    )
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("case", [plain(96, batch=2, documents=MANY * 2, heads=4, sinks=True), plain(30, heads=4)])
def test_some_heads_of_a_larger_tensor(case: Case) -> None:
    """out and the sums of gradients may be views of a few heads."""
    x, kernel = inputs(case, torch.float32), ours(Fake())
    q, k, v, dout, sinks = x["q"], x["k"], x["v"], x["dout"], x["sinks"]
    runs = Layout(case.length, 1, 0).whole()
    table, params = tiles(mask_of(case, x["documents"]), runs, runs), Params(0.3, sinks=sinks)
    want, want_lse = kernel.forward(q, k, v, table, params)
    out, lse = torch.full_like(want, torch.nan), torch.empty_like(want_lse)
    sums = [[kernel.new_gradient(y) for y in (q, k, v)] for _ in range(2)]
    of_all = Gradients(sums[0][0], sums[0][1], sums[0][2])
    kernel.backward(dout, q, k, v, want_lse, want_lse, table, params, of_all, want)
    per_key_head = 4 // case.kv_heads
    for head in range(case.kv_heads):
        mine, of_k = slice(head * per_key_head, (head + 1) * per_key_head), slice(head, head + 1)
        few, some = params.of_heads(mine), (q[:, :, mine], k[:, :, of_k], v[:, :, of_k])
        lse[:, mine] = kernel.forward(*some, table, few, out[:, :, mine])[1]
        dq, dk, dv = (kernel.of_heads(y, part) for y, part in zip(sums[1], (mine, of_k, of_k), strict=True))
        kernel.backward(
            dout[:, :, mine], *some, want_lse[:, mine], want_lse[:, mine], table, few, Gradients(dq, dk, dv),
            out[:, :, mine],
        )  # fmt: skip
    for got, whole_one in zip((out, lse, *sums[1]), (want, want_lse, *sums[0]), strict=True):
        assert relative_error(got, whole_one) < 1e-6


def through_the_ring(case: Case, config: RingConfig) -> Answers:
    """This rank's share by the public function, in float32."""
    fakes = {"flash2": ours(Fake())}
    with mock.patch.dict(KERNELS, fakes), mock.patch.object(Flash2, "unsupported", return_value=[]):
        return attention(case, config, given=inputs(case, torch.float32))


@pytest.mark.parametrize("backward", ["ring", "gather"])
def test_real_ranks_hand_it_the_out_of_its_heads(ranks: Ranks, backward: Literal["ring", "gather"]) -> None:
    case = next(case for case in EXPRESSIBLE if case.why == "sinks, grouped heads")
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
