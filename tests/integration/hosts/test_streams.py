"""Streams (IterableDataset) in several rings give the rows that accelerate's dispatcher gives without rings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import IterableDataset

from hf_ring_attn.integration.hosts import streams
from tests.helpers.jobs.comparison import LOSS, PARAMETER, Ranks
from tests.helpers.jobs.runs import Mesh, Row, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, trainer_of

RUN = Run(
    why="", rows=Rows(count=13, length=23, labelled="answers"), evaluated=Rows(count=5, length=23, seed=2), steps=6,
    metrics="logits", arguments={"eval_steps": 6, "remove_unused_columns": False},
)  # fmt: skip
"""Two replicas have three full batches of two rows each and one row more, and to evaluate one and one row more."""


class Stream(IterableDataset[Row]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.make())


def of_files(rows: Rows, files: int) -> Any:
    """A stream of the `datasets` library, which reads so many files."""
    listed = [{name: x.tolist() for name, x in row.items()} for row in rows.make()]
    return Dataset.from_list(listed).to_iterable_dataset(files).with_format("torch")


def trained(mesh: Mesh, files: int) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    given = [of_files(rows, files) if files else Stream(rows) for rows in (RUN.rows, RUN.evaluated)]
    with launched(mesh), a_folder(None) as folder:
        trainer: Any = trainer_of(RUN, mesh, folder, train_dataset=given[0], eval_dataset=given[1])
        trainer.train()
        return numbers(trainer.state.log_history), dict(trainer.model.named_parameters())


@pytest.mark.parametrize("files", [0, 3])
@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(dp=2, cp=2)], ids=str)
def test_rings_get_the_rows_that_are_dispatched_without_them(ranks: Ranks, mesh: Mesh, files: int) -> None:
    """The last batch was filled with other rows, all of them counted, and rings read other files, unequally long."""
    want, weights = ranks(mesh.dp).run(trained, mesh.alone, files)[0]
    for log, found in ranks(mesh.size).run(trained, mesh, files):
        assert [pytest.approx(entry, rel=LOSS) for entry in want] == log
        for name, x in weights.items():
            torch.testing.assert_close(found[name], x, rtol=0, atol=PARAMETER)


def warned(mesh: Mesh, workers: int) -> list[str]:
    """What is logged where a stream is prepared; no worker is started."""
    run = replace(RUN, arguments={**RUN.arguments, "dataloader_num_workers": workers})
    said: list[str] = []
    taken = mock.patch.object(streams, "warn", lambda text, **_: said.append(text))
    with launched(mesh), a_folder(None) as folder, taken:
        trainer: Any = trainer_of(run, mesh, folder, train_dataset=Stream(RUN.rows))
        trainer.get_train_dataloader()
    return said


def test_a_stream_of_workers_in_several_rings_is_warned_about(ranks: Ranks) -> None:
    """Workers read copies of it: the main process knows neither its end nor, of several, their order in a batch."""
    assert ranks(4).run(warned, Mesh(dp=2, cp=2), 0) == [[]] * 4
    assert ranks(2).run(warned, Mesh(cp=2), 1) == [[]] * 2
    for said in ranks(4).run(warned, Mesh(dp=2, cp=2), 1):
        assert len(said) == 1 and "for 2 rings" in said[0]
