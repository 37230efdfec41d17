"""The reference kernel alone: the oracle's answer from any set of tiles, float32 sums, and memory linear in length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ring_attn.dtypes import accumulate_dtype
from hf_ring_attn.kernels import Gradients, Params, reference
from hf_ring_attn.sharding.layout import Run
from hf_ring_attn.sharding.mask import UNBOUNDED, Band, Mask, tiles
from hf_ring_attn.testing import BIDIRECTIONAL, Case, Inputs, inputs, packed, sliding
from tests.helpers.cases import CASES
from tests.helpers.checks import EXACT, UNROUNDED, distance, exact_answer, same_bits, worst
from tests.helpers.oracle import gradient_oracle, oracle
from tests.helpers.rank_functions import Answer, poisoned_memory

KERNEL = reference.Reference()
LONG = Case(why="several blocks a tile", length=200, heads=4, kv_heads=2, head_dim=16, value_dim=12, band=sliding(130))


def mask_of(case: Case, documents: Tensor | None) -> Mask:
    lo, hi = case.band
    band = Band(-UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi)
    return Mask.of(band, case.batch, case.length, documents)


def params_of(case: Case, x: Inputs) -> Params:
    return Params(case.head_dim**-0.5 if case.scale is None else case.scale, case.softcap, x["sinks"])


def pieces(length: int, size: int) -> list[Run]:
    """The row as runs of ``size`` tokens."""
    return [Run(at, at, min(size, length - at)) for at in range(0, length, size)]


def computed(case: Case, x: Inputs, table: Tensor) -> tuple[Answer, Gradients]:
    """out, lse and the gradients before their rounding."""
    q, k, v, dout, params = x["q"], x["k"], x["v"], x["dout"], params_of(case, x)
    out, lse = KERNEL.forward(q, k, v, table, params)
    wide = accumulate_dtype(q.dtype)
    delta = torch.einsum("bthd,bthd->bht", dout.to(wide), out.to(wide))
    into = Gradients(KERNEL.new_gradient(q), KERNEL.new_gradient(k), KERNEL.new_gradient(v))
    KERNEL.backward(dout, q, k, v, lse, delta, table, params, into)
    return {"out": out, "lse": lse, "dq": into.dq, "dk": into.dk, "dv": into.dv}, into


def without_sinks(answer: Answer) -> Answer:
    """A kernel leaves the gradient of sinks to the ring, which needs no tiles for it."""
    return {name: x for name, x in answer.items() if name != "dsinks"}


# ---- the answer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 1000], ids=["pieces of seven", "one piece"])
@pytest.mark.parametrize("case", [*CASES, LONG], ids=lambda case: case.why)
def test_it_is_the_oracle_in_float64_however_the_mask_is_cut(case: Case, size: int) -> None:
    x, runs = inputs(case), pieces(case.length, size)
    with poisoned_memory():
        got, _ = computed(case, x, tiles(mask_of(case, x["documents"]), runs, runs))
    assert worst(distance(got, without_sinks(exact_answer(case)))) < EXACT


@pytest.mark.parametrize("limit", [1, 2**12, 2**30], ids=["smallest blocks", "some", "largest blocks"])
def test_the_size_of_a_block_changes_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", limit)
    x, whole = inputs(LONG), pieces(LONG.length, LONG.length)
    got, _ = computed(LONG, x, tiles(mask_of(LONG, None), whole, whole))
    assert worst(distance(got, exact_answer(LONG))) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", [LONG, CASES[-1], CASES[-2]], ids=lambda case: case.why)
def test_sums_are_kept_in_float32(case: Case, dtype: torch.dtype) -> None:
    x, whole = inputs(case, dtype), pieces(case.length, case.length)
    got, into = computed(case, x, tiles(mask_of(case, x["documents"]), whole, whole))
    assert {into.dq.dtype, into.dk.dtype, into.dv.dtype, got["lse"].dtype} == {torch.float32}
    assert got["out"].dtype == dtype
    want = gradient_oracle(case, x, got["out"]) | {"lse": oracle(case, x)["lse"]}
    assert worst(distance(got, without_sinks(want))) < UNROUNDED


def test_a_tile_need_not_be_cut_to_what_is_visible() -> None:
    """Queries that see nothing in any tile, though a tile holds them, have out 0, lse -inf and gradients 0."""
    case = Case(why="the first five queries see no key", length=12, heads=4)
    x = inputs(case)
    loose = torch.tensor([[0, 0, 12, 0, 5, 7, 5, 0, UNBOUNDED]])
    tight = tiles(Mask.of(Band(0), 1, 12), [Run(0, 0, 12)], [Run(5, 5, 7)])
    assert not torch.equal(loose, tight)
    got, want = computed(case, x, loose)[0], computed(case, x, tight)[0]
    assert worst(distance(got, want)) < EXACT
    assert (got["lse"][:, :, :5] == -torch.inf).all() and not got["out"][:, :5].any() and not got["dq"][:, :5].any()


# ---- nothing to see ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0)])
def test_no_rows_and_no_tokens(batch: int, length: int) -> None:
    q, k = torch.zeros(batch, length, 4, 8), torch.zeros(batch, length, 2, 8)
    case = Case(why="nothing", length=4, heads=4)
    x = Inputs(q=q, k=k, v=k[..., :3], dout=q[..., :3], sinks=None, documents=None)
    runs = [Run(0, 0, length)]
    got, _ = computed(case, x, tiles(Mask.of(Band(0), batch, length), runs, runs))
    assert got["out"].shape == (batch, length, 4, 3)
    assert got["lse"].shape == (batch, 4, length)


def test_a_nan_stays_in_its_document() -> None:
    case = Case(why="three documents", length=60, heads=4, documents=(packed(17, 22, 21),), batch=1)
    clean, dirty = inputs(case), inputs(case)
    for name in ("q", "k", "v", "dout"):
        dirty[name][:, 20] = torch.nan
    whole = pieces(case.length, case.length)
    table = tiles(mask_of(case, clean["documents"]), whole, whole)
    want, got = computed(case, clean, table)[0], computed(case, dirty, table)[0]
    others = torch.ones(case.length, dtype=torch.bool)
    others[17:39] = False
    for name in ("out", "dq", "dk", "dv"):
        assert same_bits(got[name][:, others], want[name][:, others]), name
        assert got[name][:, 20].isnan().all(), name
    assert got["out"][:, 20:39].isnan().all(), "what sees a nan is nan"


# ---- memory ------------------------------------------------------------------------------------------------------


class Memory(TorchDispatchMode):
    """Watches every operation: the most bytes alive at once, and the most elements of one result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak_bytes = 0
        self.largest = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.alive[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
                self.largest = max(self.largest, x.numel())
        self.alive = {reference: size for reference, size in self.alive.items() if not reference.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self.alive.values()))
        return result


def memory_of(case: Case) -> Memory:
    x, whole = inputs(case, torch.float32), pieces(case.length, case.length)
    table = tiles(mask_of(case, None), whole, whole)
    memory = Memory()
    with memory:
        computed(case, x, table)
    return memory


@pytest.mark.parametrize("band", [(0, None), BIDIRECTIONAL, sliding(700)], ids=["causal", "bidirectional", "window"])
def test_memory_is_linear_in_length(band: tuple[int | None, int | None]) -> None:
    short = Case(why="", length=1024, heads=2, kv_heads=1, head_dim=16, value_dim=16, band=band)
    once, twice = memory_of(short), memory_of(replace(short, length=2048))
    # What grows is the state, out and gradients; blocks of scores do not, and S x S would make it four times as much.
    row_bytes = 4 * short.length * (7 * short.heads * (short.head_dim + 1))
    assert once.peak_bytes < twice.peak_bytes < once.peak_bytes + row_bytes
    assert twice.peak_bytes < 2 * once.peak_bytes
    assert once.largest == twice.largest == short.heads * reference.LARGEST_BLOCK**2


def test_the_watch_would_see_a_dense_mask() -> None:
    with Memory() as memory:
        torch.zeros(1024, 1024).masked_fill(torch.ones(1024, 1024).tril() == 0, -torch.inf)
    assert memory.largest == 1024**2
    assert memory.peak_bytes >= 2 * 4 * 1024**2


def test_keys_and_values_are_never_repeated() -> None:
    """With one query token and eight query heads a key head, a repeated block of keys would be the largest tensor."""
    heads, keys, width = 8, 2048, 512
    q, k = torch.randn(1, 1, heads, width), torch.randn(1, keys, 1, width)
    table = tiles(Mask.of(Band(), 1, keys), [Run(0, keys - 1, 1)], [Run(0, 0, keys)])
    params = Params(width**-0.5)
    into = Gradients(KERNEL.new_gradient(q), KERNEL.new_gradient(k), KERNEL.new_gradient(k))
    with Memory() as memory:
        out, lse = KERNEL.forward(q, k, k, table, params)
        delta = torch.einsum("bthd,bthd->bht", out, out)
        KERNEL.backward(out, q, k, k, lse, delta, table, params, into)
    assert memory.largest <= 2 * reference.LARGEST_BLOCK * width < heads * reference.LARGEST_BLOCK * width
