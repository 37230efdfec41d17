"""Rows that disagree: rounding that chooses another expert is excused, and experts that drop tokens are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import tests.helpers.jobs.self_check_jobs as jobs
from hf_ring_attn import errors
from hf_ring_attn.integration.selfcheck.check import _Check
from hf_ring_attn.integration.selfcheck.tolerance import Attempt
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.models.remote_models import remote


@pytest.mark.parametrize("size", [2, 4])
def test_experts_that_drop_tokens_are_refused_though_one_row_agrees(ranks: Ranks, size: int) -> None:
    """The second row's experts are all within their capacity, and the model passed."""
    for error, _, steps in ranks(size).run(capacity):
        assert (error, steps) == ("SelfCheckFailed", 0)


def capacity() -> tuple[str, str, int]:
    with mock.patch.object(jobs, "remote", lambda kind: remote(kind, at=2)):
        return jobs.refused("capacity")


@pytest.mark.parametrize("size", [2, 4])
def test_experts_of_a_large_capacity_are_refused_too(ranks: Ranks, size: int) -> None:
    """No random row filled them, so they trained: the trial step's row has the same word in all tokens of one rank."""
    for error, text, steps in ranks(size).run(jobs.refused, "large capacity"):
        assert (error, steps) == ("SelfCheckFailed", 0)
        assert "The first difference is made by its module 'layers.1.mix' (Capacity): " in text


@pytest.mark.parametrize(
    ("rows", "in_float32", "in_16_bits"),
    [
        ("+", True, True), ("-++", True, True), ("-+-", False, True), ("--+", False, True), ("---", False, False),
        ("- ", True, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("precise", [True, False])
def test_rows_that_must_agree(rows: str, in_float32: bool, in_16_bits: bool, precise: bool) -> None:
    """+: a row that agrees; -: one that disagrees, also by the amplified tolerance; a blank: a row without a loss."""
    tried: list[str] = []

    def attempt(seed: int, _rows: int) -> Attempt | None:
        tried.append(rows[seed])
        error = {"+": 0.5, "-": 9.0, " ": None}[rows[seed]]
        refusal = lambda limits: errors.Refused(f"row {seed}, {limits}")  # noqa: E731  it is an argument
        return None if error is None else Attempt([error], [1.0], precise, lambda: [2.0], refusal, [1.0])

    check: Any = SimpleNamespace(device=torch.device("cpu"))
    if in_float32 if precise else in_16_bits:
        assert _Check._run(check, attempt, 1) == "passed"
    else:
        with pytest.raises(errors.Refused, match=rf"row {rows.rindex('-')}, \[4.0\]"):
            _Check._run(check, attempt, 1)
    assert "".join(tried) == (rows if precise else rows[: rows.find("+") + 1] or rows)


@pytest.mark.parametrize(
    ("found", "own", "limit"),
    [
        (1e-5, None, 1e-5), (3e-5, 1e-6, 5e-5), (3e-5, 1e-7, 1e-5), (3e-4, 1e-5, 4e-4), (3e-3, 1e-4, 4e-4),
        (3e-3, 2e-3, 4e-3),
    ],
)  # fmt: skip
def test_a_small_distance_is_no_rounding_unless_the_model_makes_it(
    found: float, own: float | None, limit: float
) -> None:
    """``own``: the change by rounding; None: it need not be known."""

    def again() -> list[float]:
        assert own is not None
        return [own]

    attempt = Attempt([found], [4e-4], True, again, errors.Refused, [1e-5])
    assert attempt.agrees(torch.device("cpu")) == (found <= limit)
    assert own is None or attempt.limits == [pytest.approx(limit)]
