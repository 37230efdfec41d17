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
from hf_ring_attn.integration.selfcheck.compare import Attempt
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
        return None if error is None else Attempt([error], [1.0], precise, lambda: [2.0], refusal)

    check: Any = SimpleNamespace(device=torch.device("cpu"))
    check._agrees = lambda one: _Check._agrees(check, one)
    if in_float32 if precise else in_16_bits:
        assert _Check._run(check, attempt, 1) == "passed"
    else:
        with pytest.raises(errors.Refused, match=rf"row {rows.rindex('-')}, \[4.0\]"):
            _Check._run(check, attempt, 1)
    assert "".join(tried) == (rows if precise else rows[: rows.find("+") + 1] or rows)
