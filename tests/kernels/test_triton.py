"""The Triton kernels: their schedules against dense masks, what they refuse, their arithmetic in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor

from hf_ring_attn.kernels import KERNELS, Request, triton
from hf_ring_attn.kernels.triton import blocks
from hf_ring_attn.kernels.triton.schedule import schedule
from hf_ring_attn.sharding.mask import tiles
from hf_ring_attn.sharding.visible import bounds
from hf_ring_attn.testing import BIDIRECTIONAL, CAUSAL, Case, inputs, sliding
from tests.helpers.cases import CASES
from tests.helpers.kernel_answers import mask_of, pieces
from tests.helpers.oracle import visible
from tests.helpers.patience import patient

REQUEST = Request("cpu", torch.bfloat16, 4, 2, 64, 64, softcap=False, sinks=False, deterministic=True)
PARTS = 4


# ---- schedules ---------------------------------------------------------------------------------------------------


@st.composite
def masks(draw: st.DrawFn) -> Case:
    """Any band, with documents, padding and holes in up to two rows."""
    length = draw(st.integers(1, 70))
    rows = []
    for _ in range(batch := draw(st.integers(1, 2))):
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
        ids = sorted(draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts))))
        hidden = draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
        rows.append(tuple((-1 if hide else n, count) for n, count, hide in zip(ids, counts, hidden, strict=True)))
    band = draw(st.sampled_from([CAUSAL, BIDIRECTIONAL, sliding(1), sliding(9), sliding(33), (-5, 5), (None, 2)]))
    return Case(why="drawn", batch=batch, length=length, band=band, documents=tuple(rows))


def table_and_mask(case: Case, piece: int) -> tuple[Tensor, Tensor]:
    """The tiles of a case cut into pieces, and its dense mask [B, queries, keys]."""
    documents = inputs(case)["documents"]
    runs = pieces(case.length, piece)
    return tiles(mask_of(case, documents), runs, runs), visible(case, documents)


@given(masks(), st.sampled_from([5, 1000]))
@settings(max_examples=60, deadline=None)
def test_bounds_are_the_mask(case: Case, piece: int) -> None:
    table, want = table_and_mask(case, piece)
    layers = bounds(table, case.batch, case.length).long()
    keys = torch.arange(case.length)
    seen = (keys >= layers[:, 0, :, :, None]) & (keys < layers[:, 1, :, :, None])
    assert torch.equal(seen.sum(0), want.long())  # each pair on one layer


@given(masks(), st.sampled_from([5, 1000]), st.sampled_from(["queries", "keys"]), st.sampled_from([(8, 4), (4, 16)]))
@settings(max_examples=60, deadline=None)
def test_programs_visit_every_block_once_and_mask_where_they_must(
    case: Case, piece: int, side: str, blocks: tuple[int, int]
) -> None:
    block, other = blocks
    table, want = table_and_mask(case, piece)
    want = want if side == "queries" else want.transpose(1, 2)
    made = schedule(table, side, block, other, case.batch, case.length, idle=True, by_row=False)
    count = -(-case.length // block)
    owners = [[row, index] for row in range(case.batch) for index in range(count)]
    assert sorted(made.programs[:, :2].tolist()) == owners
    for row, index, entry, past in made.programs.tolist():
        mine = want[row, index * block : (index + 1) * block]
        visited: list[int] = []
        for first, middle, last in made.runs[entry:past].tolist():
            visited += range(first, last)
            for full in range(middle, last):
                part = mine[:, full * other : (full + 1) * other]
                assert part.all() and part.shape[1] == other
        assert visited == sorted(set(visited)), "ascending, none twice"
        needed = {n for n in range(-(-case.length // other)) if mine[:, n * other : (n + 1) * other].any()}
        assert set(visited) == needed


def test_a_dense_mask_is_masked_at_its_edge_only_and_the_longest_program_goes_first() -> None:
    case = Case(why="dense", batch=2, length=64)
    table, _ = table_and_mask(case, 1000)
    made = schedule(table, "queries", 16, 8, 2, 64, idle=False, by_row=False)
    lengths = [int((made.runs[a:b, 2] - made.runs[a:b, 0]).sum()) for _, _, a, b in made.programs.tolist()]
    masked = int((made.runs[:, 1] - made.runs[:, 0]).sum())
    assert lengths == sorted(lengths, reverse=True) and masked == 2 * 4 * 2
    by_row = schedule(table, "queries", 16, 8, 2, 64, idle=False, by_row=True)
    assert by_row.programs[:, 0].tolist() == [0] * 4 + [1] * 4


# ---- what it refuses -----------------------------------------------------------------------------------------------


def test_the_processor_is_refused_with_every_reason_and_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "find_spec", lambda _: None)
    before = "triton" in sys.modules
    reasons = KERNELS["triton"].unsupported(replace(REQUEST, dtype=torch.float64, head_dim=640))
    assert reasons == [
        "needs a CUDA or ROCm GPU, got tensors on cpu",
        "triton is not installed",
        "computes in bfloat16, float16 or float32, got torch.float64",
        "heads are at most 512 wide on this device, got 640 and 64",
    ]
    assert ("triton" in sys.modules) == before


@pytest.mark.parametrize("family", [*blocks.FAMILIES, "other"])
def test_a_gpu_is_refused_a_dtype_without_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 ended with a ValueError there, so that no other kernel could serve it."""
    monkeypatch.setattr(triton, "find_spec", lambda _: object())
    monkeypatch.setattr(blocks, "family_of", lambda _: family)
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    reasons = KERNELS["triton"].unsupported(replace(REQUEST, device="cuda", dtype=torch.float64))
    assert reasons == ["computes in bfloat16, float16 or float32, got torch.float64"]


def test_the_interpreter_takes_tensors_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "find_spec", lambda _: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert KERNELS["triton"].unsupported(replace(REQUEST, dtype=torch.float16)) == []
    assert KERNELS["triton"].unsupported(REQUEST) == ["triton's interpreter cannot multiply bfloat16"]
    assert KERNELS["triton"].unsupported(replace(REQUEST, device="mps")) != []


# ---- the arithmetic ------------------------------------------------------------------------------------------------


def why_not_interpreted() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4"):
        return "the interpreter of triton before 3.7 does not work with numpy 2.4 or later"
    return None


ALL_FILE, CASES_FILE, SCORES_FILE = (
    str(Path(__file__).with_name(name)) for name in ("test_all_kernels.py", "triton_cases.py", "triton_score_cases.py")
)
TABLE, BITS = "test_a_table_is_the_oracle", "test_a_chunk"
RUNS = {
    **{
        f"table, {n}": ["--full", *(f"{ALL_FILE}::{TABLE}[triton-{case.why}]" for case in CASES[n::PARTS])]
        for n in range(PARTS)
    },
    "contract": [ALL_FILE, "-k", f"triton and not {TABLE} and not auto"],
    "bits": [CASES_FILE, "-k", BITS],
    "rest": [CASES_FILE, "-k", f"not {BITS}"],
    "score_mods": [SCORES_FILE, "-k", "all or takes or others"],
    "score_mods, rest": [SCORES_FILE, "-k", "not (all or takes or others)"],
}


@pytest.mark.slow
@pytest.mark.skipif(why_not_interpreted() is not None, reason=str(why_not_interpreted()))
@pytest.mark.parametrize(
    "name",
    # The interpreter's products are numpy's, whose bits depend on shapes on some processors; the other takes a minute.
    [pytest.param(name, marks=[pytest.mark.full] * (name in ("bits", "score_mods, rest"))) for name in RUNS],
)
@pytest.mark.turns
def test_in_the_interpreter(name: str) -> None:
    """Cases in processes of their own, since a process that has imported triton can no longer interpret it."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *RUNS[name]],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=patient(110),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
