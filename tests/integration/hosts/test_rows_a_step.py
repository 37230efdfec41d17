"""The line at start says how many rows an optimizer step of a trainer has."""

from __future__ import annotations

from unittest import mock

import pytest

from hf_ring_attn.integration import log
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import train

ACCUMULATED = Run(why="", steps=2, arguments={"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2})


ONE_BY_ONE = Run(why="", steps=2)


def said(mesh: Mesh, *runs: Run) -> list[str]:
    lines: list[str] = []
    log._said.clear()
    with mock.patch.object(log._logger(), "info", lines.append):
        for run in runs:
            train(run, mesh)
    return lines


@pytest.mark.parametrize(("mesh", "rows"), [(Mesh(cp=2), 6), (Mesh(dp=2, cp=2), 12)], ids=["a ring", "two rings"])
def test_rows_of_all_rings_and_batches_count(ranks: Ranks, mesh: Mesh, rows: int) -> None:
    ours, *others = ranks(mesh.size).run(said, mesh, ACCUMULATED)
    assert [f"tokens a rank, {rows} rows a step, kernel reference" in line for line in ours] == [True]
    assert not any(others)


def test_a_second_trainer_of_a_process_says_its_own(ranks: Ranks) -> None:
    ours, _ = ranks(2).run(said, Mesh(cp=2), ACCUMULATED, ONE_BY_ONE)
    assert [line.split(", ")[1] for line in ours] == ["6 rows a step", "2 rows a step"]
