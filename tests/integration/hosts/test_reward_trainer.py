"""RewardTrainer in a ring is RewardTrainer in one process without the plugin."""

from __future__ import annotations

from functools import cache

import pytest

from tests.helpers.jobs.comparison import LOSS, Ranks, assert_rings_learn_alike
from tests.helpers.jobs.reward_jobs import DEFECTS, STEPS, Case, SpreadRewards, trained, trained_with
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trl_runs import Outcome

METRICS = {"loss", "grad_norm", "num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin"}

CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ACCUMULATED = Case("accumulated, with margins", {"gradient_accumulation_steps": 2}, margin=True)
CASES = [
    ACCUMULATED,
    Case("centred, padded on the left", {"center_rewards_coefficient": 0.1}, left=True),
    Case("LoRA and a trained score head", {"gradient_accumulation_steps": 2}, lora=True),
    Case("LoRA, checkpointed", CHECKPOINTED, lora=True),
    Case("windows, and metrics of scores", kind="Qwen2ForSequenceClassification", metrics=True),
    Case("FSDP2, accumulated", {"gradient_accumulation_steps": 2}, fsdp=True),
    Case("FSDP2, LoRA, a trained score head, checkpointed", CHECKPOINTED, lora=True, fsdp=True),
]


@cache
def in_one_process(ranks: Ranks, case: Case, mesh: Mesh) -> Outcome:
    return ranks(1).run(trained, case, mesh.alone)[0]


def compare(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    want, outcomes = in_one_process(ranks, case, mesh), ranks(mesh.size).run(trained, case, mesh)
    assert want.steps[0].keys() > METRICS
    assert case.lora <= any("score" in name for name in want.after)
    assert_rings_learn_alike(outcomes, want, mesh, STEPS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
@pytest.mark.turns
def test_rewards_in_a_ring_are_those_of_one_process(ranks: Ranks, case: Case) -> None:
    compare(ranks, case, Mesh(cp=2))


def test_a_loss_of_rows_that_it_gathers(ranks: Ranks) -> None:
    """Each ring's rows came once for each rank, in the self-check's whole row, too."""
    (want,) = ranks(1).run(trained, CASES[0], Mesh(), True, SpreadRewards)
    outcomes = ranks(2).run(trained, CASES[0], Mesh(cp=2), True, SpreadRewards)
    assert_rings_learn_alike(outcomes, want, Mesh(cp=2), STEPS)


@pytest.mark.parametrize("self_check", [True, False], ids=["by the self-check", "by the numbers"])
@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.turns
def test_a_planted_defect_is_seen(ranks: Ranks, defect: str, self_check: bool) -> None:
    want = in_one_process(ranks, ACCUMULATED, Mesh())
    for got in ranks(2).run(trained_with, defect, ACCUMULATED, Mesh(cp=2), self_check):
        if self_check or isinstance(got, str):
            assert isinstance(got, str), "not refused"
            continue
        apart = {name: abs(got.steps[-1][name] - x) for name, x in want.steps[-1].items()}
        assert max(apart["grad_norm"] / want.steps[-1]["grad_norm"], apart["mean_reward"]) > 100 * LOSS, apart


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("case", [*CASES[:3], CASES[5]], ids=lambda case: case.why)
def test_on_four_ranks_as_well(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    compare(ranks, case, mesh)


def test_a_model_without_a_score_of_rows_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(trained_with, "none", Case("", kind="LlamaForCausalLM"), Mesh(cp=2), True):
        assert isinstance(said, str)
        assert said.startswith("UnsupportedModel: LlamaForCausalLM cannot be trained in a ring exactly: RewardTrainer ")
