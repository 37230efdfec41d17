"""A Trainer's own loss of whole rows, with loss="gathered" or rows of other names, is that of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_ring_attn import RingConfig
from tests.helpers.jobs import whole_row_jobs as jobs
from tests.helpers.jobs.comparison import Ranks, assert_trains_as_without_ring, by_turns
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, refusal_of, trainer_of

PADDED = Rows(shortest=9, pad_to="right", length=23, labelled="answers")
PAIRS = jobs.Pairs(shortest=9, pad_to="right", length=23)
DICTS = replace(PAIRS, nested=True)
TEXTS = jobs.Texts(shortest=9, length=23)
QUERIES = jobs.Pairs(shortest=9, pad_to="left", length=23, names=("query_", "passage_"))
ACCUMULATED = {"gradient_accumulation_steps": 2}
GATHERED = Run(
    why="", rows=PADDED, evaluated=replace(PADDED, count=5, seed=2), ring=RingConfig(loss="gathered"), metrics="logits",
    predicts="labelled",
)  # fmt: skip
NAMED = replace(
    GATHERED, rows=PAIRS, evaluated=replace(PAIRS, count=5, seed=2), metrics="", predicts="", ring=RingConfig(),
    arguments={"eval_strategy": "no"},
)  # fmt: skip
RANKED = {**ACCUMULATED, "learning_rate": 0.5, "eval_strategy": "no"}
ALONE = {"average_tokens_across_devices": False}
RUNS = [
    replace(GATHERED, why="weights by separators and places", kind=jobs.Weighs, arguments=ACCUMULATED),
    replace(GATHERED, why="the same, LoRA", kind=jobs.Weighs, lora=True),
    replace(GATHERED, why="terms beside the model's loss", kind=jobs.AddsToTheModels, predicts=""),
    replace(GATHERED, why="a teacher with another attention", kind=jobs.Distils),
    replace(GATHERED, why="a teacher in the ring", kind=jobs.DistilsInTheRing),
    replace(GATHERED, why="a function of outputs", loss_function=True, ring=RingConfig(), metrics="", predicts=""),
    replace(GATHERED, why="a loss function of the model's own", change=jobs.with_a_loss_function, ring=RingConfig()),
    replace(GATHERED, why="the model's loss with that of experts", model="mixtral", arguments=ACCUMULATED,
        metrics="", predicts=""),
    replace(GATHERED, why="labels smoothed", arguments={"label_smoothing_factor": 0.1}),
    replace(GATHERED, why="counts of rings not averaged", kind=jobs.Weighs, arguments=ALONE),
    replace(GATHERED, why="counts, and numbers of all rows", kind=jobs.Counts, arguments=ACCUMULATED),
    replace(GATHERED, why="counts that are not averaged", kind=jobs.Counts, arguments={**ALONE, **ACCUMULATED}),
    replace(GATHERED, why="the model's loss, not averaged", arguments={**ALONE, **ACCUMULATED}),
    replace(GATHERED, why="checkpointed", kind=jobs.Weighs, arguments={"gradient_checkpointing": True}),
    replace(GATHERED, why="recurrent layers", model="qwen3_5", kind=jobs.Weighs, arguments={"learning_rate": 1e-3}),
    replace(NAMED, why="two kinds of rows", kind=jobs.Prefers, arguments=RANKED),
    replace(
        NAMED, why="a dict of each kind of rows", kind=jobs.PrefersDicts, rows=DICTS,
        evaluated=replace(DICTS, count=5, seed=2),
    ),
    replace(NAMED, why="a classifier in a module of one's own", kind=jobs.Reranks, change=jobs.Reranker, rows=DICTS,
        evaluated=replace(DICTS, count=6, seed=2), arguments={**RANKED, "learning_rate": 1e-2}),
    replace(NAMED, why="texts, of which the loss makes tokens", kind=jobs.MakesTokens, rows=TEXTS,
        evaluated=replace(TEXTS, count=5, seed=2), arguments={**RANKED, "learning_rate": 1e-3}),
    replace(
        GATHERED, why="a model's own loss", change=jobs.Regularized.of, kind=jobs.ReadsAttributes, metrics="",
        predicts="",
    ),
    replace(
        NAMED, why="a module around the model", kind=jobs.Retrieves, change=jobs.Retriever, rows=QUERIES,
        evaluated=replace(QUERIES, count=6, seed=2),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("run", "mesh"), by_turns(RUNS))
@pytest.mark.turns
def test_a_loss_of_whole_rows_is_that_of_one_process(ranks: Ranks, run: Run, mesh: Mesh) -> None:
    assert_trains_as_without_ring(ranks, run, mesh)


def refusal_of_hooked(kind: type[jobs.Hooked]) -> tuple[str, int]:
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        return refusal_of(trainer_of(replace(GATHERED, kind=kind), Mesh(cp=2), folder))


@pytest.mark.parametrize("kind", [jobs.Hooked, jobs.HooksMasked])
def test_states_that_a_hook_takes_out_are_refused(ranks: Ranks, kind: type[jobs.Hooked]) -> None:
    for error, steps in ranks(2).run(refusal_of_hooked, kind):
        assert error.startswith("PastOutputs: the loss uses states from inside a model"), error
        assert steps == 0
