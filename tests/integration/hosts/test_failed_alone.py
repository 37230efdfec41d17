"""A rank whose model fails in the self-check, alone: its job ends with its words, and no rank waits for a time-out.

The failed rank went on to whole rows, whose first message the others took for keys and values: gloo aborted.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

from hf_ring_attn.comm import meeting
from hf_ring_attn.integration import log
from tests.helpers.checks import Ranks
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, trainer_of
from tests.helpers.live_ranks import RanksFailed
from tests.helpers.models.tiny_models import tiny

SHARE = 14
"""Tokens of a rank in the check's row; in one process there are 26."""


class FailsInRing(Trainer):
    """Its loss cannot be computed from a rank's share."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if inputs["input_ids"].shape[1] == SHARE:
            raise ValueError("too short")
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def run_of(fsdp2: bool, kind: type[Trainer] = Trainer) -> Run:
    return Run(why="", rows=Rows(length=40), steps=2, kind=kind, fsdp2=fsdp2, arguments={"eval_strategy": "no"})


def failing(folder: str, in_ring: bool, fsdp2: bool) -> None:
    """Trains a model whose second layer fails in the check, on rank 1; a rank that ends leaves its error in a file."""
    model: Any = tiny("llama", "ring_fp32")

    def fail(_module: Any, args: Any) -> None:
        tokens = args[0].shape[1]
        if (tokens == SHARE if in_ring else tokens > SHARE) and dist.get_rank() == 1:
            raise ValueError("not here")

    model.model.layers[1].register_forward_pre_hook(fail)
    with launched(Mesh(cp=2)), mock.patch.object(meeting, "PATIENCE", timedelta(seconds=2)):
        try:
            trainer_of(run_of(fsdp2), Mesh(cp=2), folder, model).train()
        except Exception as error:  # noqa: BLE001 - the test judges the text, whatever it is
            Path(folder, f"{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
        os._exit(7)


@pytest.mark.parametrize("fsdp2", [False, True])
@pytest.mark.parametrize("in_ring", [False, True])
def test_a_rank_that_fails_alone_ends_the_job_by_its_words(
    ranks: Ranks, tmp_path: Path, in_ring: bool, fsdp2: bool
) -> None:
    with pytest.raises(RanksFailed) as error:
        ranks(2).run(failing, str(tmp_path), in_ring, fsdp2)
    assert not error.value.silent
    here, there = ((tmp_path / name).read_text() for name in "10")
    assert here.startswith("SelfCheckRaised: " if in_ring else "SelfCheckRowFailed: ")
    assert "ValueError: not here" in here
    expected = "PeerLost: " if in_ring or fsdp2 else "RefusedElsewhere: "
    assert there.startswith(expected), there


def trained(fsdp2: bool) -> int:
    """The steps of a Trainer whose loss fails on every rank's share."""
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        trainer = trainer_of(run_of(fsdp2, FailsInRing), Mesh(cp=2), folder)
        trainer.train()
        return trainer.state.global_step


@pytest.mark.parametrize("fsdp2", [False, True])
def test_a_loss_that_fails_on_every_share_gets_whole_rows(ranks: Ranks, fsdp2: bool) -> None:
    """Under FSDP2 it was refused, as if one rank had failed alone."""
    assert ranks(2).run(trained, fsdp2) == [2, 2]


def without_labels() -> list[str]:
    """Trains on rows without labels, which ends with transformers' error; returns the warnings before it."""
    log._said.clear()  # of the tests before
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        trainer = trainer_of(run_of(False), Mesh(cp=2), folder, tiny("llama", "ring_fp32"))
        trainer.train_dataset = [{"input_ids": torch.arange(1, 41)}] * 4
        with pytest.raises(ValueError, match="did not return a loss"):
            trainer.train()
        return [str(text) for text, kind in log._said if kind == "warning"]


def test_a_batch_without_labels_is_no_matter_of_the_ring(ranks: Ranks) -> None:
    for warnings in ranks(2).run(without_labels):
        assert not any("losses of whole rows" in text for text in warnings), warnings
