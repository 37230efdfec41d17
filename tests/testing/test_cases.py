"""The table of cases: every feature that must be shown is in it, by its properties and not by its words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_ring_attn.testing import BIDIRECTIONAL, CAUSAL, PADDING, Case, inputs, packed, sliding
from tests.helpers.cases import CASES, WORLD_SIZES
from tests.helpers.oracle import oracle, visible

RINGS = [size for size in WORLD_SIZES if size > 1]


def counts(case: Case) -> list[int]:
    """How many tokens each document of a case has, holes left out."""
    rows = [[(document, n) for document, n in row if document != PADDING] for row in case.documents]
    return [sum(n for other, n in row if other == document) for row in rows for document in {d for d, _ in row}]


def span(case: Case) -> int | None:
    """The farthest that a query sees to either side, itself included; None without a window."""
    lo, hi = case.band
    return None if hi is None else 1 + max(hi, -(lo or 0))


def pads(case: Case, where: Callable[[list[bool]], bool]) -> bool:
    """Whether the padding of some row, run by run, is as asked; rows of nothing but padding do not count."""
    rows = [[document == PADDING for document, _ in row] for row in case.documents]
    return any(where(row) for row in rows if not all(row))


def ratio(number: int) -> Callable[[Case], bool]:
    return lambda case: case.heads == number * case.kv_heads


def shorter_than(length: int) -> Callable[[Case], bool]:
    return lambda case: 1 < case.length < length


FEATURES: dict[str, Callable[[Case], bool]] = {
    "one row": lambda c: c.batch == 1,
    "two rows": lambda c: c.batch == 2,
    **{f"H/G {n}": ratio(n) for n in (1, 3, 4)},
    "H/G 3 with several key heads": lambda c: c.heads == 3 * c.kv_heads > 3,
    "odd widths, values narrower": lambda c: c.head_dim % 2 == c.value_dim % 2 == 1 and c.value_dim < c.head_dim,
    "odd widths, values wider": lambda c: c.head_dim % 2 == c.value_dim % 2 == 1 and c.value_dim > c.head_dim,
    "odd length": lambda c: c.length % 2 == 1 and c.length > 16,
    "nothing to pad": lambda c: all(c.length % (2 * size) == 0 for size in RINGS),
    "one token": lambda c: c.length == 1,
    **{f"less than 2W at {size}": shorter_than(2 * size) for size in RINGS},
    "causal": lambda c: c.band == CAUSAL,
    "bidirectional": lambda c: c.band == BIDIRECTIONAL,
    "causal window below all chunks": lambda c: c.causal and (span(c) or 99) <= c.chunk(8),
    "causal window above all chunks": lambda c: c.causal and c.chunk(2) < (span(c) or 0) < c.length,
    "bidirectional window below all chunks": lambda c: not c.causal and (span(c) or 99) <= c.chunk(8),
    "bidirectional window above all chunks": lambda c: not c.causal and c.chunk(2) < (span(c) or 0) < c.length,
    "window of itself": lambda c: c.band == (0, 0),
    "window without effect": lambda c: (span(c) or 0) > c.length,
    "lopsided window": lambda c: None not in c.band and c.band[0] not in (0, -(c.band[1] or 0)),
    "documents shorter than every chunk": lambda c: any(n < c.chunk(8) for n in counts(c)),
    "mostly documents shorter than a chunk of four ranks": lambda c: sum(n < c.chunk(4) for n in counts(c)) > 9,
    "a document longer than two of four ranks hold": lambda c: (
        len(counts(c)) > 1 and any(4 * c.chunk(4) < n < c.length for n in counts(c))
    ),
    "rows of other documents": lambda c: len(set(c.documents)) > 1,
    "padding right": lambda c: pads(c, lambda row: row[-1]),
    "padding left": lambda c: pads(c, lambda row: row[0]),
    "padding between": lambda c: pads(c, lambda row: any(row[1:-1])),
    "a hole in a document": lambda c: any(
        a[0] == b[0] != PADDING for row in c.documents for a, b in zip(row, row[2:], strict=False)
    ),
    "a row of padding": lambda c: any(all(document == PADDING for document, _ in row) for row in c.documents),
    "softcap": lambda c: c.softcap is not None,
    "sinks": lambda c: c.sinks,
    "sinks with grouped heads": lambda c: c.sinks and c.heads > c.kv_heads,
    "sinks where nothing is seen": lambda c: c.sinks and pads(c, any),
    "sinks with a window": lambda c: c.sinks and span(c) is not None,
    "a scale of its own": lambda c: c.scale is not None,
    "everything, causal": lambda c: (
        c.causal and span(c) is not None and c.sinks and c.softcap is not None and len(set(c.documents)) > 1
        and c.heads > c.kv_heads and pads(c, any) and c.head_dim != c.value_dim and c.length % 2 == 1
    ),
    "everything, bidirectional": lambda c: (
        not c.causal and span(c) is not None and c.sinks and c.softcap is not None and len(set(c.documents)) > 1
        and c.heads > c.kv_heads and pads(c, any) and c.head_dim != c.value_dim
    ),
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_the_table_has(feature: str) -> None:
    assert any(FEATURES[feature](case) for case in CASES)


def test_the_rows_of_the_table_are_told_apart() -> None:
    assert len({case.why for case in CASES}) == len({case.seed for case in CASES}) == len(CASES)


def test_the_table_is_small() -> None:
    assert len(CASES) <= 40
    assert max(case.batch * case.length for case in CASES) <= 128


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"band": (1, None)}, "must hold 0"),
        ({"heads": 3}, "multiple of G"),
        ({"documents": (packed(4), packed(4))}, "every row or for none"),
        ({"documents": (packed(3),)}, "must make S tokens"),
        ({"documents": (((1, 2), (0, 2)),)}, "ends before"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        Case(**({"why": "nonsense", "length": 4} | change))  # type: ignore[arg-type]


def test_packed_and_windows_are_counted_as_documented() -> None:
    assert packed(2, -3, 1) == ((0, 2), (PADDING, 3), (1, 1))
    assert Case(why="", length=4, band=sliding(3)).window == (2, 0)
    assert Case(why="", length=4, band=(-3, 7)).window == (7, 3)
    assert Case(why="", length=4, band=BIDIRECTIONAL).window == (None, None)


# ---- the tensors -----------------------------------------------------------------------------------------------


def test_inputs_are_the_same_each_time_and_in_each_dtype_up_to_rounding() -> None:
    exact, again, rounded = inputs(CASES[-1]), inputs(CASES[-1]), inputs(CASES[-1], torch.bfloat16)
    for name, value in exact.items():
        assert isinstance(value, Tensor)
        assert torch.equal(value, again[name]), name  # type: ignore[literal-required]
        want = value if name == "documents" else value.bfloat16()
        got = rounded[name]  # type: ignore[literal-required]
        assert torch.equal(got, want), name
        assert got.dtype == want.dtype, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
def test_inputs_have_outliers(case: Case) -> None:
    x = inputs(case)
    for name in ("q", "k", "v", "dout"):
        assert x[name].abs().max() >= 8, name
    assert x["q"][..., 0].abs().max() >= 10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
def test_no_softmax_is_one_hot_by_and_large(case: Case) -> None:
    choice = visible(case, inputs(case)["documents"]).sum(2)[:, None].expand(-1, case.heads, -1) > 4
    largest = _largest_weight(case)[choice]
    assert not len(largest) or largest.median() < 0.7


def _largest_weight(case: Case) -> Tensor:
    """[B, H, S], the largest weight in each query's softmax, read off the oracle with unit vectors for values."""
    eye = torch.eye(case.length, dtype=torch.float64).expand(case.batch, case.kv_heads, -1, -1).transpose(1, 2)
    x = inputs(case)
    x["v"], x["dout"] = eye, torch.zeros(case.batch, case.length, case.heads, case.length, dtype=torch.float64)
    return oracle(replace(case, value_dim=case.length), x)["out"].amax(3).transpose(1, 2)
