"""Ids of tokens that a model's vocabulary lacks: all ranks end by one error that names the token."""

from __future__ import annotations

from typing import Any

import pytest

import hf_ring_attn
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, trainer_of
from tests.helpers.models.tiny_models import VOCABULARY, tiny


def batch_with(value: int) -> dict[str, Any]:
    batch = tokens(23)
    batch["input_ids"][1, 3] = value
    return batch


def called(how: str, value: int) -> float:
    model: Any = tiny("llama", "ring_fp32").train()
    batch = batch_with(value)
    if how == "whole rows":
        with hf_ring_attn.whole_rows(model):
            return float(model(**batch).loss.detach())
    with hf_ring_attn.shard(batch) as sharded:
        inputs = sharded.inputs
        if how == "replaced":
            inputs = {**inputs, "input_ids": inputs["input_ids"].clamp(0, VOCABULARY - 1)}
        return float(model(**inputs).loss.detach())


def trained(value: int) -> None:
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        trainer = trainer_of(Run(why="", rows=Rows(length=23)), Mesh(cp=2), folder)
        rows: Any = trainer.train_dataset
        for row in rows:
            row["input_ids"][3] = value
        trainer.train()


@pytest.mark.parametrize("value", [-100, VOCABULARY])
@pytest.mark.parametrize("how", ["shares", "whole rows", "Trainer"])
def test_an_unknown_id_ends_all_ranks_by_its_name(ranks: Ranks, how: str, value: int) -> None:
    """One rank raised torch's IndexError, and the other gloo's words of a closed connection."""
    job = (trained, value) if how == "Trainer" else (called, how, value)
    (here, there) = ranks(2).run(attempt, *job)
    assert here is not None and there is not None
    assert (here[0], there[0]) == ("UnknownToken", "RefusedElsewhere")
    assert f"input_ids has {value} at token 3 of row " in here[1]
    assert f"has {VOCABULARY} entries" in here[1]
    assert "UnknownToken: input_ids has" in there[1]


def test_an_id_that_the_program_replaces_is_no_matter(ranks: Ranks) -> None:
    found = ranks(2).run(called, "replaced", -100)
    batch = batch_with(-100)
    batch["input_ids"] = batch["input_ids"].clamp(min=0)
    want = float(tiny("llama", None).train()(**batch).loss.detach())
    assert found == [pytest.approx(want, rel=1e-6)] * 2
