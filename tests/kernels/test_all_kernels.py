"""The contract of `kernels/base.py`, a kernel a row: one table of cases, one set of promises, for every kernel.

Fakes in plain torch stand in for libraries that need a GPU. triton has its row on a GPU or with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_ring_attn.bench import replay
from hf_ring_attn.bench.replay import Answer, Transfer, places
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.dtypes import accumulate_dtype
from hf_ring_attn.kernels import KERNELS, Gradients, Kernel, Params, Place, Request, ScoreMod, choose
from hf_ring_attn.kernels.flash2 import Flash2
from hf_ring_attn.kernels.flash4 import Flash4
from hf_ring_attn.kernels.reference import Reference
from hf_ring_attn.kernels.triton import Triton
from hf_ring_attn.sharding import plan as plan_module
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.testing import Case, Inputs, inputs, packed, relative_error, sliding
from hf_ring_attn.traffic import head_halves
from tests.helpers.cases import CASES
from tests.helpers.checks import UNROUNDED, same_bits
from tests.helpers.fake_flash4 import Fake as FakeFlash4
from tests.helpers.kernel_answers import (
    NO_HOLES,
    assert_same,
    mask_of,
    on,
    params_of,
    table_of,
    unit,
    vanishing,
    wanted,
    without_padding,
)
from tests.helpers.rank_functions import poisoned_memory
from tests.kernels.fake_flash2 import Fake as FakeFlash2
from tests.kernels.flex_cases import on_cpu

FLEX: Kernel
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
REQUEST = Request("cuda", torch.bfloat16, 8, 2, 128, 128, softcap=False, sinks=False, deterministic=False)
HERE = replace(REQUEST, device="cpu", dtype=torch.float32)


def unchanged(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A score_mod, since flex serves attention with one alone."""
    return score + 0.0


@dataclass(frozen=True)
class Row:
    """A kernel. Its answers are within ``bound`` of the oracle's from inputs of ``dtype``."""

    make: Callable[[], Kernel]
    cases: list[Case]
    serves: Request
    dtype: torch.dtype = torch.float32
    bound: float = UNROUNDED
    half: torch.dtype = torch.bfloat16
    rounds: bool = False
    device: str = "cpu"


ROWS = {
    "reference": Row(Reference, list(CASES), HERE, torch.float64, 1e-12),
    "flash4": Row(lambda: Flash4(FakeFlash4()), NO_HOLES, REQUEST, bound=1e-5),
    "flash2": Row(lambda: Flash2([FakeFlash2()]), NO_HOLES, REQUEST, bound=1e-5, rounds=True),
    "flex": Row(lambda: FLEX, NO_HOLES[::5], replace(REQUEST, score_mod=True), torch.float64, 1e-9, rounds=True),
}
if os.environ.get("TRITON_INTERPRET") == "1" or DEVICE == "cuda":
    served = replace(HERE, device=DEVICE)
    ROWS["triton"] = Row(Triton, list(CASES), served, half=torch.float16, device=DEVICE)
every_row = pytest.mark.parametrize("name", ROWS)
DETAIL = Case(
    why="two rows, documents, a window, grouped heads, sinks", batch=2, length=44, heads=4, kv_heads=2, head_dim=8,
    value_dim=8, band=sliding(13), documents=(packed(9, 30, -1, 4), packed(-2, 40, 2)), sinks=True, scale=0.4, seed=41,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _flex() -> Iterator[None]:
    global FLEX
    with on_cpu() as FLEX:
        yield


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


# ---- one table of tiles --------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """A case as a kernel gets it: tensors, a table of tiles, and the places of its accumulators."""

    kernel: Kernel
    case: Case
    x: Inputs
    table: Tensor
    params: Params

    @classmethod
    def of(cls, name: str, case: Case, dtype: torch.dtype | None = None) -> Problem:
        row = ROWS[name]
        x = on(row.device, inputs(case, dtype or row.dtype))
        params = params_of(case, x)
        if name == "flex":
            params = replace(params, score_mod=ScoreMod.of(unchanged, torch.device("cpu")))
        return cls(row.make(), case, x, table_of(case), params)

    def places(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Place, Place, Place]:
        layout = Layout(self.case.length, 1, 0)
        plan = Plan.of(Ring.simulated(1, 0), layout, mask_of(self.case, self.x["documents"]))
        known = plan.tables
        return places(q, k, v, known.queries, known.segments[0], self.params.scale)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(self.x["q"], self.x["k"], self.x["v"], self.table, self.params)

    def backward(self, out: Tensor, lse: Tensor, lanes: list[slice], times: int = 1) -> list[tuple[Tensor, Place]]:
        """dq, and dk and dv of each lane of heads, before their rounding, with their places."""
        x, kernel = self.x, self.kernel
        q, group = x["q"], x["q"].shape[2] // x["k"].shape[2]
        delta, home = kernel.delta(x["dout"], out), self.places(q, x["k"], x["v"])
        dq = kernel.new_gradient(q, home[0])
        assert not dq.any() and dq.is_contiguous() and dq.dtype == accumulate_dtype(q.dtype)
        sums = [(dq, home[0])]
        for lane in lanes:
            heads, k, v = slice(lane.start * group, lane.stop * group), x["k"][:, :, lane], x["v"][:, :, lane]
            home = self.places(q[:, :, heads], k, v)
            new = kernel.new_gradient(k, home[1]), kernel.new_gradient(v, home[2])
            into = Gradients(kernel.of_heads(dq, heads), *new, home)
            for _ in range(times):
                kernel.backward(
                    x["dout"][:, :, heads], q[:, :, heads], k, v, lse[:, heads], delta[:, heads], self.table,
                    self.params.of_heads(heads), into, out[:, :, heads],
                )  # fmt: skip
            sums += zip(new, home[1:], strict=True)
        return sums

    def finished(self, sums: list[tuple[Tensor, Place]], dtype: torch.dtype) -> dict[str, Tensor]:
        dq, *pairs = [self.kernel.finish(total, dtype, place) for total, place in sums]
        return {"dq": dq, "dk": torch.cat(pairs[::2], 2), "dv": torch.cat(pairs[1::2], 2)}

    def answer(self, lanes: list[slice] | None = None, times: int = 1) -> dict[str, Tensor]:
        out, lse = self.forward()
        lanes = head_halves(self.x["k"].shape[2], 2) if lanes is None else lanes
        wide = accumulate_dtype(out.dtype)
        return {"out": out, "lse": lse, **self.finished(self.backward(out, lse, lanes, times), wide)}


def far(got: dict[str, Tensor], want: dict[str, Tensor], case: Case, x: Inputs) -> dict[str, float]:
    """Relative errors; of a gradient that is zero in units of its terms."""
    errors = {name: relative_error(got[name].cpu(), want[name]) for name in want}
    for name in vanishing(case):
        errors[name] = float((got[name].cpu().double() - want[name]).abs().max()) / unit(case, x)
    return errors


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(name, case, id=f"{name}-{case.why}") for name in ROWS for case in ROWS[name].cases]
)
@pytest.mark.turns
def test_a_table_is_the_oracle(name: str, case: Case) -> None:
    """Forward, and backward of some heads at a time, as in the lanes of a ring."""
    problem = Problem.of(name, case)
    got, x = problem.answer(), inputs(case, ROWS[name].dtype)
    errors = far(got, wanted(case, x, got["out"].cpu()), case, x)
    assert max(errors.values()) < ROWS[name].bound, errors


@every_row
def test_some_heads_of_larger_tensors_and_nothing_beside_them(name: str) -> None:
    """out is written into some heads of a larger tensor; sums of all heads at once are those of one at a time."""
    problem = Problem.of(name, DETAIL)
    want = problem.answer([slice(0, 2)])
    x, out = problem.x, torch.full_like(want["out"], torch.nan)
    for head in (1, 0):
        heads, lane = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        found, lse = problem.kernel.forward(
            x["q"][:, :, heads], x["k"][:, :, lane], x["v"][:, :, lane], problem.table, problem.params.of_heads(heads),
            out[:, :, heads],
        )  # fmt: skip
        assert found.data_ptr() == out[:, :, heads].data_ptr()
        assert relative_error(lse, want["lse"][:, heads]) < ROWS[name].bound
        assert out[:, :, :2].isnan().all() == (head == 1), "heads that nobody asked for"
    got = problem.answer([slice(0, 1), slice(1, 2)]) | {"out": out}
    errors = {key: relative_error(got[key], want[key]) for key in want}
    assert max(errors.values()) < ROWS[name].bound, errors


@every_row
def test_gradients_are_added_to_what_others_began(name: str) -> None:
    problem = Problem.of(name, DETAIL)
    once, twice = problem.answer(), problem.answer(times=2)
    for key in ("dq", "dk", "dv"):
        assert relative_error(twice[key], 2 * once[key]) < 1e-6, key


@every_row
def test_finish_rounds_once_and_writes_where_it_is_asked_to(name: str) -> None:
    row = ROWS[name]
    problem = Problem.of(name, DETAIL, row.half)
    out, lse = problem.forward()
    sums = problem.backward(out, lse, [slice(0, 2)], times=3)
    wide, narrow = problem.finished(sums, torch.float32), problem.finished(sums, row.half)
    for key, x in wide.items():
        assert x.dtype == torch.float32 and not same_bits(x, x.to(row.half).float()), key
        assert same_bits(narrow[key], x.to(row.half)), key
    (total, place), larger = sums[0], torch.full((2, 44, 7, 8), torch.nan, dtype=row.half, device=row.device)
    problem.kernel.finish(total, row.half, place, larger[:, :, 2:6])
    assert same_bits(larger[:, :, 2:6], narrow["dq"])
    assert larger[:, :, :2].isnan().all() and larger[:, :, 6:].isnan().all()


@every_row
def test_it_says_whether_contributions_are_rounded(name: str) -> None:
    """One causal call: float32 sums of one contribution show it."""
    row = ROWS[name]
    case = Case(why="causal", length=24, heads=2, kv_heads=2, head_dim=8, value_dim=8)
    problem = Problem.of(name, case, row.half)
    out, lse = problem.forward()
    found = problem.finished(problem.backward(out, lse, [slice(0, 2)]), torch.float32)
    assert row.rounds == problem.kernel.rounds_gradients
    for key, x in found.items():
        assert same_bits(x, x.to(row.half).float()) == row.rounds, key


@every_row
def test_shapes_dtypes_and_memory_of_what_it_returns(name: str) -> None:
    """The fakes of the torch ops say so to a compiler."""
    for dtype in (ROWS[name].dtype, ROWS[name].half):
        problem = Problem.of(name, DETAIL, dtype)
        out, lse = problem.forward()
        assert out.shape == (2, 44, 4, 8) and out.dtype == dtype and out.is_contiguous()
        assert lse.shape == (2, 4, 44) and lse.dtype == accumulate_dtype(dtype) and lse.is_contiguous()
        gradients = problem.finished(problem.backward(out, lse, [slice(0, 2)]), dtype).values()
        assert [x.shape[2] for x in gradients] == [4, 2, 2] and {x.dtype for x in gradients} == {dtype}
        owners = {x.untyped_storage().data_ptr() for x in (out, lse, *(problem.x[key] for key in ("q", "k", "v")))}
        assert len(owners) == 5, "nothing shares memory"


@every_row
def test_views_with_any_strides(name: str) -> None:
    problem = Problem.of(name, DETAIL)
    want, x = problem.answer(), problem.x
    for order in ((0, 2, 1, 3), (3, 0, 2, 1)):
        back = tuple(order.index(dim) for dim in range(4))
        tensors = (x["q"], x["k"], x["v"], x["dout"])
        q, k, v, dout = (y.permute(order).contiguous().permute(back) for y in tensors)
        problem.x = Inputs(q=q, k=k, v=v, dout=dout, sinks=x["sinks"], documents=x["documents"])
        got = problem.answer()
        assert all(relative_error(got[key], want[key]) < 1e-6 for key in want)


@every_row
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_table_without_tiles(with_sinks: bool, name: str) -> None:
    """Zeros everywhere, and lse is the sink or -inf."""
    problem = Problem.of(name, replace(DETAIL, sinks=with_sinks))
    problem.table = torch.empty(0, 9, dtype=torch.int64)
    got = problem.answer()
    assert not any(got[key].any() for key in ("out", "dq", "dk", "dv"))
    sinks = problem.x["sinks"]
    want = torch.full((4,), -torch.inf, device=ROWS[name].device) if sinks is None else sinks
    assert torch.equal(got["lse"], want.to(got["lse"].dtype)[None, :, None].expand(2, -1, 44))


# ---- a ring --------------------------------------------------------------------------------------------------------

ZIGZAG: list[tuple[int, int, Transfer]] = [
    *((size, 0, "ring") for size in (1, 2, 4, 8)), (2, 0, "gather"), (8, 0, "gather"), (2, 0, "sparse"),
    (4, 0, "sparse"),
]  # fmt: skip
BALANCED: list[tuple[int, int, Transfer]] = [(4, 3, "ring"), (2, 8, "gather"), (4, 4, "sparse")]
"""Ring size, chunks of a rank at random (0: the zigzag's two), and the transport of keys and gradients."""
MORE: list[tuple[int, int, Transfer]] = [(2, 4, "ring"), (8, 2, "ring")]
WAYS = [
    *product(("flash2", "flash4"), ZIGZAG), *product(("flash2", "flash4", "reference"), BALANCED),
    ("flash4, square blocks", (2, 0, "ring")),
]  # fmt: skip
SELDOM = list(product(("flash2", "flash4", "reference"), MORE))
RINGS: dict[str, Callable[[], Kernel]] = {name: ROWS[name].make for name in ("flash2", "flash4", "reference")} | {
    "flash4, square blocks": lambda: Flash4(FakeFlash4((4, 4)))
}


@cache
def alone(case: Case) -> Answer:
    x, params = inputs(case, torch.float32), params_of(case, inputs(case, torch.float32))
    tensors, mask = (x["q"], x["k"], x["v"], x["dout"]), mask_of(case, x["documents"])
    return replay.replay(Reference(), *tensors, mask, 1, params, torch.float32)


@pytest.mark.parametrize(
    ("name", "way"), [*WAYS, *(pytest.param(*one, marks=pytest.mark.full) for one in SELDOM)], ids=str
)
@pytest.mark.parametrize("case", NO_HOLES, ids=lambda case: case.why)
@pytest.mark.turns
def test_a_ring_is_one_process(
    case: Case, name: str, way: tuple[int, int, Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that other ranks began, some heads at a time; whichever chunks a rank holds."""
    size, chunks, path = way
    case = without_padding(case, size * max(chunks, 2) // 2)
    if case.length == 0:
        pytest.skip("nothing is left of it")
    want, x = alone(case), inputs(case, torch.float32)
    owners = list(range(size)) * chunks
    random.Random(chunks).shuffle(owners)
    made: list[Layout] = []

    def layout(length: int, world_size: int, rank: int) -> Layout:
        made.append(Layout(length, world_size, rank, tuple(owners)))
        return made[-1]

    monkeypatch.setattr(plan_module, "KEY_BLOCK", 12)  # cases are shorter than the real one
    if chunks:
        monkeypatch.setattr(replay, "Layout", layout)
        monkeypatch.setattr(replay, "ranks_of", replay.ranks_of.__wrapped__)
    tensors, mask = (x["q"], x["k"], x["v"], x["dout"]), mask_of(case, x["documents"])
    got = replay.replay(RINGS[name](), *tensors, mask, size, params_of(case, x), torch.float32, path)
    assert bool(made) == bool(chunks)
    assert_same(got, want)


# ---- what it refuses -------------------------------------------------------------------------------------------------

FLASHES, HOLES = ("flash2", "flash4"), "a document's keys must be one run"
BAD_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool, torch.complex64)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"device": "cpu"}, "needs an NVIDIA GPU, got tensors on cpu") for name in FLASHES),
    *((name, {"dtype": torch.float32}, "computes in bfloat16 or float16, got torch.float32") for name in FLASHES),
    *((name, {"holes": True}, HOLES) for name in (*FLASHES, "flex")),
    *((name, {"score_mod": True}, "it has no score_mod") for name in FLASHES),
    ("flash2", {"head_dim": 192}, "keys and values must be of one width, got 192 and 128"),
    ("flash2", {"head_dim": 264, "value_dim": 264}, "heads are a multiple of 8 wide, 256 at most, got 264"),
    ("flash2", {"head_dim": 100, "value_dim": 100}, "heads are a multiple of 8 wide, 256 at most, got 100"),
    ("flash4", {"head_dim": 80, "value_dim": 80}, "heads are 64, 96, 128, 192/128, 256 wide (keys/values), got 80/80"),
    ("flex", {"score_mod": False}, "it computes only attention with a score_mod"),
    ("flex", {"deterministic": True}, "it adds the gradients of what a score_mod uses in no fixed order"),
    *(
        (name, {"dtype": dtype}, f"got {dtype}")
        for name, dtype in product(ROWS, BAD_DTYPES) if name != "flex"  # its row is that of a CPU
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused_says_why(name: str, change: dict[str, Any], words: str) -> None:
    kernel, serves = ROWS[name].make(), ROWS[name].serves
    assert kernel.unsupported(serves) == []
    (reason,) = kernel.unsupported(replace(serves, **change))
    assert words in reason


def test_auto_takes_flash2_never_and_the_others_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in KERNELS:
        monkeypatch.setattr(type(KERNELS[name]), "unsupported", lambda *_: [])
    for name in ("flash4", "triton", "flex", "reference"):
        taken.append(choose("auto", REQUEST).name)
        monkeypatch.setattr(type(KERNELS[name]), "unsupported", lambda *_: ["no"])
    assert taken == ["flash4", "triton", "flex", "reference"]
    assert choose("flash2", REQUEST).name == "flash2"


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, torch; from hf_ring_attn.kernels import KERNELS, Request\n"
        "request = Request('cpu', torch.bfloat16, 8, 2, 128, 128, softcap=True, sinks=False, deterministic=False)\n"
        "assert all(KERNELS[name].unsupported(request) for name in KERNELS if name != 'reference')\n"
        "assert not {'flash_attn', 'cutlass', 'quack'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
