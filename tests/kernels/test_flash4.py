"""flash4 on a CPU: tables become calls, accumulators are arranged, over a fake of flash-attn-4 with its conventions."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ring_attn.bench.replay import replay
from hf_ring_attn.kernels import KERNELS, Params, Place, choose, flash4
from hf_ring_attn.kernels.flash4 import Flash4, library
from hf_ring_attn.kernels.flash4.blocks import Blocks, Sides
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.testing import Case, inputs, packed, relative_error
from hf_ring_attn.traffic import head_halves
from tests.helpers.cases import CASES
from tests.helpers.fake_flash4 import Fake
from tests.helpers.kernel_answers import NO_HOLES, mask_of, params_of
from tests.kernels.test_all_kernels import REQUEST

SIZES = (1, 2, 4, 8)


def test_only_documents_with_holes_are_not_tried() -> None:
    assert {case.why for case in CASES} - {case.why for case in NO_HOLES} == {
        "holes between and inside documents", "window across a hole of its document",
    }  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_rounded_once(dtype: torch.dtype, size: int) -> None:
    case = plain(96, batch=2, documents=(packed(20, 49, 9, -2, 16), packed(-3, 93)))
    x = inputs(case, dtype)
    mask, params = mask_of(case, x["documents"]), Params(0.3)
    tensors = x["q"], x["k"], x["v"], x["dout"]
    wide = replay(Flash4(library=Fake()), *tensors, mask, size, params, torch.float32)
    narrow = replay(Flash4(library=Fake()), *tensors, mask, size, params)
    for name in ("dq", "dk", "dv"):
        assert getattr(narrow, name).dtype == dtype
        assert torch.equal(getattr(narrow, name), getattr(wide, name).to(dtype)), name


@pytest.mark.parametrize(("batch", "length"), [(1, 16), (2, 16), (1, 18)])
@pytest.mark.parametrize("size", [1, 2])
def test_statistics_of_queries_go_with_them(size: int, batch: int, length: int) -> None:
    """Also where they lie in blocks as they are: an entry that holds its own key would never go."""
    kernel = Flash4(library=Fake((4, 4)))
    q, k, v, dout = torch.randn(4, batch, length * size, 2, 8).unbind()
    replay(kernel, q, k, v, dout, Mask.of(CAUSAL, batch, length * size), size, Params(0.3))
    gc.collect()
    assert not len(kernel._kept)


@pytest.mark.parametrize("of", ["q", "k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "segments", [[[0, 0, 9], [0, 9, 5]], [[0, 0, 5], [0, 7, 1], [1, 0, 12]]], ids=["rows", "documents"]
)
def test_some_heads_of_a_gradient_are_written_into_the_whole_one(
    segments: list[list[int]], dtype: torch.dtype, of: Literal["q", "k"]
) -> None:
    kernel, shared = Flash4(Fake()), len(segments) == 2
    place = Place(of, (2, 14, 2, 8), (8, 8), torch.tensor(segments), shared, 0.3)
    accumulator = torch.randn_like(kernel.new_gradient(torch.empty(0), place))
    whole = torch.full((2, 14, 5, 8), 7, dtype=dtype)
    want = kernel.finish(accumulator, dtype, place)
    assert torch.equal(kernel.finish(accumulator, dtype, place, whole[:, :, 1:3]), want)
    assert torch.equal(whole[:, :, 1:3], want) and (whole[:, :, 3:] == 7).all() and (whole[:, :, 0] == 7).all()


class Launches(TorchDispatchMode):
    """Notes the names of the ops that write, and "backward" for a call of flash-attn-4's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.overloadpacket.__name__ in ("clone", "copy_", "zeros"):
            self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("copied", ["q and k", "q, k, v and dout"])
def test_copies_of_q_and_k_are_written_before_the_backward_reads_them(copied: str) -> None:
    """Its kernel may begin before the one in front of it has ended, and reads q and k at once: no copy is in front."""
    case = plain(96, batch=2, documents=(packed(20, 49, 27), packed(96)))
    x = inputs(case, torch.float32)
    for name in ("q", "k") if copied == "q and k" else ("q", "k", "v", "dout"):
        x[name] = x[name].transpose(1, 2).contiguous().transpose(1, 2)  # as rotary embeddings of some models return it
    fake, launches = Fake(), Launches()
    backward = fake.backward

    def noted(*given: Any) -> None:
        launches.names.append("backward")
        backward(*given)

    with mock.patch.object(fake, "backward", noted), launches:
        replay(Flash4(fake), x["q"], x["k"], x["v"], x["dout"], mask_of(case, x["documents"]), 1, params_of(case, x))
    before = launches.names[: launches.names.index("backward")]
    assert "clone" in before and before[-1] == "zeros"


def test_a_rank_of_padding_alone() -> None:
    """Nothing is seen: no call, zeros, and lse -inf or that of the sinks."""
    ids = torch.tensor([[0, 0, 0, -1, -1, -1, -1, -1]])
    mask, sinks = Mask.of(CAUSAL, 1, 8, ids), torch.randn(2)
    q, k, v, dout = torch.randn(4, 1, 8, 2, 8).unbind()
    for given in (None, sinks):
        fake = Fake()
        got = replay(Flash4(library=fake), q, k, v, dout, mask, 4, Params(1.0, sinks=given))
        want = replay(KERNELS["reference"], q, k, v, dout, mask, 1, Params(1.0, sinks=given))
        assert all(relative_error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))
        assert len([kind for kind, _, _ in fake.calls if kind == "forward"]) == 3


def plain(length: int, **more: object) -> Case:
    return replace(CASES[4], length=length, why=f"{length} tokens", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "size", "forward", "backward"),
    [
        # one call forward and one backward
        (plain(96), 1, 1, 1),
        (plain(96, batch=2), 1, 1, 1),
        # forward two a rank, for its two chunks, which are one on the last rank; backward one a step and lane of heads
        (plain(96), 2, 3, 4),
        (plain(96, batch=2), 4, 7, 16),
        # chunks of 13 tokens: the second does not begin a block, so a step takes two calls, and three for its own keys
        (plain(104), 4, 7, 4 * 3 + 12 * 2),
        # documents: one packed call; more for those that lie in two chunks
        (plain(96, documents=(packed(*[5] * 18, 6),)), 1, 1, 1),
        (plain(96, documents=(packed(*[5] * 18, 6),)), 2, 2, 2 + 2),
        (plain(96, band=(0, 10)), 1, 1, 1),
    ],
)
def test_as_few_calls_as_can_be(case: Case, size: int, forward: int, backward: int) -> None:
    x, fake = inputs(case, torch.float32), Fake()
    tensors = x["q"], x["k"], x["v"], x["dout"]
    replay(Flash4(fake), *tensors, mask_of(case, x["documents"]), size, params_of(case, x), torch.float32)
    kinds = [kind for kind, _, _ in fake.calls]
    lanes = len(head_halves(case.kv_heads, size))
    assert (kinds.count("forward"), kinds.count("backward")) == (forward, backward * lanes)


def test_accumulators_in_flash_attn_4s_own_arrangement_for_lengths() -> None:
    segments = torch.tensor([[0, 0, 5], [0, 7, 1], [1, 0, 12], [0, 0, 0]])
    place = Place("k", (2, 12, 2, 8), (8, 8), segments, False, 1.0)
    blocks = Blocks.of(place, Sides(3, 4))
    assert [segment.block for segment in blocks.segments[:3]] == [0, (7 + 4) // 4, (12 + 8) // 4]
    assert blocks.shape(2, 8) == (2, (24 // 4 + 4) * 4 * 8)
    assert Blocks.of(place, Sides(3, 4)) is blocks
    assert Blocks.of(replace(place, of="q"), Sides(3, 4)).side == 3


def test_shared_segments_lie_row_by_row() -> None:
    place = Place("q", (2, 14, 2, 8), (8, 8), torch.tensor([[0, 0, 7], [0, 7, 7]]), True, 1.0)
    blocks = Blocks.of(place, Sides(3, 4))
    assert blocks.shape(4, 8) == (2, 4, 6 * 3 * 8)
    assert [segment.block for segment in blocks.segments] == [0, 3]
    assert len(blocks.joined) == 2
    assert len(Blocks.of(replace(place, segments=torch.tensor([[0, 0, 9], [0, 9, 5]])), Sides(3, 4)).joined) == 1


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_only_hopper_is_served(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """flash4 compiles for Blackwell and was never run there, so it refuses by name and triton serves."""
    monkeypatch.setattr(flash4, "_capability", lambda: capability)
    monkeypatch.setattr(flash4, "not_installed", lambda: ())
    got = ".".join(map(str, capability))
    assert Flash4().unsupported(REQUEST) == [f"was tried on Hopper (compute capability 9.0) alone, got {got}"]
    assert Flash4().lacks(REQUEST) == []
    monkeypatch.setattr(type(KERNELS["triton"]), "unsupported", lambda *_: [])
    assert choose("auto", REQUEST).name == "triton"


def test_versions_that_were_not_tested_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5"}

    def installed(**versions: str) -> tuple[str, ...]:
        found = tested | {name.replace("_", "-"): text for name, text in versions.items()}
        monkeypatch.setattr(library, "version", found.__getitem__)
        return library.not_installed.__wrapped__()

    assert installed() == ()
    assert installed(flash_attn_4="4.1.0") == ("flash-attn-4 4.1.0 is not tested (tested: 4.0.0b36)",)
    (reason,) = installed(nvidia_cutlass_dsl="4.9.0")
    assert reason == "nvidia-cutlass-dsl is 4.9.0 (flash-attn-4 is tested with 4.8.x)"


def test_what_hopper_lacks_for_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "_capability", lambda: (9, 0))
    monkeypatch.setattr(flash4, "not_installed", lambda: ("flash-attn-4 is not installed",))
    assert Flash4().lacks(REQUEST) == ["flash-attn-4 is not installed"]
    assert Flash4().lacks(replace(REQUEST, head_dim=80)) == [], "it could not serve this"
    monkeypatch.setattr(flash4, "not_installed", lambda: ())
    monkeypatch.setattr(flash4, "load", lambda: library.Loaded(None, ("flash-attn-4 does not import: ImportError",)))
    assert Flash4().lacks(REQUEST) == ["flash-attn-4 does not import: ImportError"]


def test_a_library_that_does_not_import_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    loaded = library.load.__wrapped__()
    assert loaded.library is None
    assert loaded.reasons[0].startswith("flash-attn-4 does not import: ")


def test_the_mask_of_a_causal_row_has_no_holes() -> None:
    assert not Mask.of(CAUSAL, 1, 8).holes
    assert Mask.of(CAUSAL, 1, 8, torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2]])).holes
