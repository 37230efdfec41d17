"""ORPO, CPO, TPO, GKD, online DPO and A*-PO in a ring are what they are without one: losses, metrics and weights."""

from __future__ import annotations

from functools import cache

import pytest

from hf_ring_attn import RingConfig
from tests.helpers.jobs.comparison import LOSS, Ranks, assert_equal_in_float64, assert_rings_learn_alike
from tests.helpers.jobs.in_float64 import whole_logits_trained
from tests.helpers.jobs.preference_jobs import STEPS
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trl_runs import Outcome
from tests.helpers.jobs.whole_logits_jobs import PLANTED, SAMPLED, Case, one_step, trained, trained_with

CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ORPO = Case("ORPO, accumulated", "ORPO", {"gradient_accumulation_steps": 2})
CASES = [
    ORPO,
    Case("ORPO, LoRA, checkpointed", "ORPO", CHECKPOINTED, lora=True),
    Case("ORPO, experts and their auxiliary loss", "ORPO", {"learning_rate": 0.02}, kind="MixtralForCausalLM"),
    Case("CPO", "CPO", {"learning_rate": 1e-3}),
    Case("SimPO", "CPO", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5}),
    Case("AlphaPO", "CPO", {"loss_type": "alphapo", "alpha": 0.25, "cpo_alpha": 0.0}),
    Case("CPO, hinge, smoothed", "CPO", {"loss_type": "hinge", "learning_rate": 1e-3}),
    Case("CPO, ipo", "CPO", {"loss_type": "ipo", "learning_rate": 1e-2}),
    Case("TPO, LoRA, checkpointed", "TPO", CHECKPOINTED, lora=True),
    Case("TPO without an answer to imitate", "TPO", {"tpo_alpha": 0.0, "loss_type": "tpo-l"}),
    Case("GKD, the batch's answers, accumulated", "GKD", {"lmbda": 0.0, "gradient_accumulation_steps": 2}),
    Case("GKD, some answers generated", "GKD", {"lmbda": 0.5, "max_new_tokens": 7, "learning_rate": 0.02}),
    Case("GKD, a teacher's answers, LoRA", "GKD", {"lmbda": 0.0, "seq_kd": True, "max_new_tokens": 7}, lora=True),
    Case("online DPO", "OnlineDPO", {"max_new_tokens": 9, "learning_rate": 0.02, "missing_eos_penalty": 1.0}),
    Case(
        "online DPO, accumulated, LoRA", "OnlineDPO", {"max_new_tokens": 9, "gradient_accumulation_steps": 2},
        lora=True,
    ),
    Case("A*-PO, accumulated", "A2PO", {"max_completion_length": 9, "gradient_accumulation_steps": 2}),
    Case("FSDP2, ORPO, accumulated", "ORPO", {"gradient_accumulation_steps": 2}, fsdp=True),
    Case("FSDP2, CPO, LoRA, checkpointed", "CPO", {**CHECKPOINTED, "learning_rate": 1e-2}, lora=True, fsdp=True),
    Case("FSDP2, TPO", "TPO", fsdp=True),
]  # fmt: skip
OF_A_PROCESS = ["val/contain_eos_token", "reward", "v_star", "advantage", "implicit_reward"]
"""Numbers that TRL logs of the first process's own rows."""


@cache
def without_ring(ranks: Ranks, case: Case, mesh: Mesh) -> Outcome:
    """In as many processes as there are rings: a loss is a mean over a device's tokens."""
    return ranks(mesh.dp).run(trained, case, mesh.alone)[0]


def compare(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    want = without_ring(ranks, case, mesh)
    outcomes = ranks(mesh.size).run(trained, case, mesh)
    numbers = {"GKD": set[str](), "A2PO": {"reward", "v_star"}}.get(case.name, {"logps/rejected", "rewards/margins"})
    assert {"loss", "grad_norm", *numbers} < want.steps[0].keys()
    assert case.name in SAMPLED or {"eval_loss", *(f"eval_{one}" for one in numbers)} < want.evaluation.keys()
    of_processes = [(step, name) for step in range(1, STEPS + 1) for name in OF_A_PROCESS]
    but = of_processes if mesh.dp > 1 else []
    assert_rings_learn_alike(outcomes, want, mesh, STEPS, moves=1e-4, but=but)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
@pytest.mark.turns
def test_training_in_a_ring_is_training_in_one_process(ranks: Ranks, case: Case) -> None:
    compare(ranks, case, Mesh(cp=2))


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("case", [ORPO, CASES[4], CASES[8], *CASES[10:]], ids=lambda case: case.why)
def test_on_four_ranks_as_well(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    compare(ranks, case, mesh)


@pytest.mark.parametrize("case", [ORPO, CASES[3], CASES[9]], ids=lambda case: case.why)
@pytest.mark.turns
def test_what_float32_leaves_apart_is_rounding(ranks: Ranks, case: Case) -> None:
    (want,) = ranks(1).run(whole_logits_trained, case, Mesh())
    for got in ranks(2).run(whole_logits_trained, case, Mesh(cp=2)):
        assert_equal_in_float64(got, want)


@pytest.mark.parametrize("defect", PLANTED)
@pytest.mark.turns
def test_a_planted_defect_is_seen(ranks: Ranks, defect: str) -> None:
    want = without_ring(ranks, ORPO, Mesh(cp=2))
    for got in ranks(2).run(trained_with, defect, ORPO, Mesh(cp=2)):
        apart = {name: abs(got.steps[-1][name] - x) for name, x in want.steps[-1].items()}
        assert max(apart["grad_norm"] / want.steps[-1]["grad_norm"], apart["logps/chosen"]) > 100 * LOSS, apart


def test_options_for_the_loss_of_a_model_change_nothing(ranks: Ranks) -> None:
    for loss in ("gathered", "sharded", "chunked"):
        assert ranks(2).run(one_step, ORPO, Mesh(cp=2), RingConfig(loss=loss)) == ["trained"] * 2
