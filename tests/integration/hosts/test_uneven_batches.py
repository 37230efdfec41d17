"""`even_batches=False` in several rings, of which one gets more batches or rows than another.

In training rings waited for one without a batch, or had other numbers of steps. An evaluation waited, too, or gathered
losses of unequal sizes: 4.92 where accelerate's default gives 4.46, without a ring too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import TrainerCallback

from hf_ring_attn import errors
from hf_ring_attn.integration.hosts.uneven_batches import unequal_counts
from tests.helpers.jobs.accelerate_batches import model
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, assert_trains_as_without_ring
from tests.helpers.jobs.plain_jobs import told
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, refusal_of, train, trainer_of

RINGS = Mesh(dp=2, cp=2)
UNEVEN: dict[str, Any] = {"accelerator_config": {"even_batches": False}}


class Between(TrainerCallback):
    """A program's own, for which gradients are averaged after each batch."""

    def on_substep_end(self, *_given: Any, **_named: Any) -> None: ...


def trained_rows(count: int, arguments: dict[str, Any], **more: Any) -> tuple[str, int]:
    """The refusal, and the steps until then, of a Trainer with two rows a batch."""
    run = Run(why="", rows=Rows(count=count), arguments={"eval_strategy": "no", **UNEVEN, **arguments})
    with launched(RINGS), a_folder(None) as folder:
        return refusal_of(trainer_of(run, RINGS, folder, **more))


@pytest.mark.parametrize(
    "options", [{"max_steps": 2}, {"max_steps": -1}, {"gradient_accumulation_steps": 2, "max_steps": 1}], ids=str
)
def test_training_is_refused_on_every_rank_before_the_first_step(ranks: Ranks, options: dict[str, Any]) -> None:
    for said, steps in ranks(4).run(trained_rows, 5, options):
        assert said.startswith("UnevenBatches: with even_batches=False some rings get more batches (2) than others (1)")
        assert steps == 0


@pytest.mark.parametrize(
    ("count", "options", "wanted"),
    [
        (5, {"max_steps": 1}, 1), (7, {"max_steps": 3}, 3), (5, {"dataloader_drop_last": True}, 4),
        (5, {"max_steps": -1, "num_train_epochs": 0.5}, 1),
    ],
    ids=str,
)  # fmt: skip
def test_training_that_no_ring_lacks_a_batch_for_is_not_refused(
    ranks: Ranks, count: int, options: dict[str, Any], wanted: int
) -> None:
    for said, steps in ranks(4).run(trained_rows, count, options):
        assert said == ""
        assert steps == wanted


IN_STEPS: dict[str, Any] = {
    **UNEVEN, "gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "no", "eval_strategy": "no"
}  # fmt: skip
"""Five rows are a step of two batches in one ring, and of one batch in the other."""


@pytest.mark.parametrize("more", [{}, {"average_tokens_across_devices": False}], ids=str)
def test_a_step_with_a_batch_less_in_one_ring_is_that_of_processes(ranks: Ranks, more: dict[str, Any]) -> None:
    """It was refused."""
    assert_trains_as_without_ring(ranks, Run(why="", rows=Rows(count=5), arguments={**IN_STEPS, **more}), RINGS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"include_num_input_tokens_seen": "all"}, {}),
        ({"max_steps": -1, "gradient_accumulation_steps": 1}, {}),
        ({}, {"callbacks": [Between()]}),
    ],
    ids=["tokens counted", "a step less", "code between batches"],
)
def test_rings_that_meet_at_each_batch_are_refused(ranks: Ranks, change: dict[str, Any], why: dict[str, Any]) -> None:
    for said, steps in ranks(4).run(trained_rows, 5, {**IN_STEPS, **change}, **why):
        assert said.startswith("UnevenBatches")
        assert steps == 0


def lines_of_trainer() -> list[str]:
    run = Run(why="", steps=0, evaluated=Rows(count=5), arguments=UNEVEN)
    return told(lambda: train(run, RINGS))


def test_an_evaluation_by_trainer_is_not_warned_of(ranks: Ranks) -> None:
    """It said that a ring would wait."""
    assert [line for lines in ranks(4).run(lines_of_trainer) for line in lines if "even_batches" in line] == []


@pytest.mark.parametrize("count", [5, 7])
def test_an_evaluation_is_that_of_even_batches(ranks: Ranks, count: int) -> None:
    rows = Rows(count=count, labelled="answers", length=23, seed=2)
    run = Run(why="", steps=0, evaluated=rows, metrics="logits", predicts="labelled")
    want = ranks(2).run(train, run, RINGS.alone)[0]
    for got in ranks(4).run(train, replace(run, arguments=UNEVEN), RINGS):
        assert_equal_runs(got, want)


def gathered(count: int, split: bool) -> list[list[list[int]]]:
    """What a loop gathers of its batches: two rows a ring."""
    with launched(RINGS):
        options = DataLoaderConfiguration(even_batches=False, split_batches=split)
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        loader = DataLoader(torch.arange(2 * count).view(count, 2), batch_size=4 if split else 2)  # type: ignore[arg-type, var-annotated]
        _, prepared = accelerator.prepare(model(), loader)
        return [accelerator.gather_for_metrics({"rows": rows})["rows"].tolist() for rows in prepared]


@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
def test_a_loop_gathers_unequal_rows(ranks: Ranks, split: bool) -> None:
    """Silently other rows, as without rings."""
    for got in ranks(4).run(gathered, 7, split):
        assert [row for rows in got for row in rows] == torch.arange(14).view(7, 2).tolist()


def gathered_until_refused(count: int, objects: bool) -> str:
    with launched(RINGS):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        loader = DataLoader(torch.arange(count), batch_size=2)  # type: ignore[arg-type, var-annotated]
        _, prepared = accelerator.prepare(model(), loader)
        try:
            for rows in prepared:
                accelerator.gather_for_metrics(rows.tolist() if objects else rows, use_gather_object=objects)
        except errors.UnevenBatches as error:
            return f"{type(error).__name__}: {error}"
        return ""


def is_what_was_sent() -> bool:
    with launched(Mesh(cp=2)):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model())
        sent: list[torch.Tensor] = []

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            sent.append(torch.cat([tensor, tensor]))
            return sent[-1]

        with mock.patch.object(accelerator, "gather", gather):
            found: torch.Tensor = accelerator.gather_for_metrics(torch.zeros(2, 4))
        return found.data_ptr() == sent[0].data_ptr()


def test_gathered_logits_are_not_copied(ranks: Ranks) -> None:
    """An evaluation held them twice."""
    assert ranks(2).run(is_what_was_sent) == [True, True]


@pytest.mark.parametrize("objects", [False, True], ids=["tensors", "objects"])
def test_a_loop_that_gathers_at_the_end_of_a_rings_batches_is_refused_on_every_rank(
    ranks: Ranks, objects: bool
) -> None:
    """The ring that ended first was told, and the others waited for it."""
    for said in ranks(4).run(gathered_until_refused, 5, objects):
        assert said.startswith("UnevenBatches: with even_batches=False some rings get more batches (2) than others (1)")


@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize("drop_last", [False, True], ids=["", "drop_last"])
@pytest.mark.parametrize("rings", [1, 2, 3])
def test_counts_are_those_of_the_batches(split: bool, drop_last: bool, rings: int) -> None:
    for rows in range(1, 40):
        given = BatchSampler(SequentialSampler(range(rows)), 6, drop_last)
        shards = [BatchSamplerShard(given, rings, index, split, even_batches=False) for index in range(rings)]
        counts = [len(list(shard)) for shard in shards]
        wanted = None if min(counts) == max(counts) else (min(counts), max(counts))
        loaders = [DataLoader(range(rows), batch_sampler=SkipBatchSampler(shard)) for shard in shards]  # type: ignore[arg-type, var-annotated]
        assert [unequal_counts(loader) for loader in loaders] == [wanted] * rings


def test_a_loader_without_accelerates_sampler_is_left_alone() -> None:
    assert unequal_counts(DataLoader(range(5), batch_size=2)) is None  # type: ignore[arg-type]
    assert unequal_counts(None) is None
