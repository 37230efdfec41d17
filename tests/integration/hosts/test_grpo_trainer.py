"""GRPOTrainer and RLOOTrainer in a ring are those of one process for each ring, without the plugin, or refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from peft import LoHaConfig
from trl.experimental.gmpo import GMPOTrainer

from tests.helpers.jobs.comparison import LOSS, Ranks, assert_equal_in_float64, assert_rings_learn_alike
from tests.helpers.jobs.grpo_jobs import (
    DEFECTS,
    OVERRIDES,
    STEPS,
    AlsoLogits,
    Case,
    OtherTokens,
    compiled_graphs,
    one_step,
    overridden,
    ratios,
    trained,
    trained_with,
)
from tests.helpers.jobs.in_float64 import reinforced
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trl_runs import Outcome

METRICS = {
    "entropy", "num_tokens", "reward", "reward_std", "frac_reward_zero_std", "rewards/letters/mean", "letters/most",
    "completions/mean_length", "completions/min_terminated_length", "completions/clipped_ratio",
}  # fmt: skip
TWICE = {"gradient_accumulation_steps": 2}
OFF_POLICY = {**TWICE, "num_iterations": 2, "epsilon": 0.02, "beta": 0.05}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
RLOO = {"learning_rate": 0.003, "epsilon": 0.1, "beta": 0.05}

FIRST = Case("GRPO, generated and accumulated", {**TWICE, "learning_rate": 0.3}, fixed=False)
GROUPS = Case(
    "groups of two replicas, old rows, a reference",
    {**OFF_POLICY, "num_generations": 8, "top_entropy_quantile": 0.5, "entropy_coef": 0.1, "learning_rate": 0.3},
)
CASES = [
    Case("grpo", {**OFF_POLICY, "loss_type": "grpo", "learning_rate": 0.3}),
    Case("bnpo", {**OFF_POLICY, "loss_type": "bnpo"}),
    Case("dr_grpo", {**OFF_POLICY, "loss_type": "dr_grpo", "learning_rate": 0.3}),
    Case("dapo", {**OFF_POLICY, "loss_type": "dapo", "learning_rate": 0.3}),
    Case("cispo", {**OFF_POLICY, "loss_type": "cispo", "epsilon_high": 1.5, "learning_rate": 0.3}),
    Case("sapo", {**OFF_POLICY, "loss_type": "sapo", "learning_rate": 0.3}),
    Case("vespo", {**OFF_POLICY, "loss_type": "vespo", "learning_rate": 0.3}),
    Case("luspo", {**OFF_POLICY, "loss_type": "luspo", "learning_rate": 0.01, "importance_sampling_level": "sequence"}),
    Case(
        "GSPO's ratios of sequences",
        {**OFF_POLICY, "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.001},
    ),
    Case("four steps a generation", {**TWICE, "steps_per_generation": 4, "epsilon": 0.02}, fixed=False),
    Case("a batch of generations", {**TWICE, "generation_batch_size": 12}, fixed=False),
    Case("LoRA, whose adapter is off for the reference", {"beta": 0.1, "num_iterations": 2}, lora=True),
    Case("LoRA, checkpointed, generated", {**CHECKPOINTED, "beta": 0.1, "learning_rate": 0.5}, lora=True, fixed=False),
    Case("an entropy bonus that adapts", {**TWICE, "top_entropy_quantile": 0.5, "use_adaptive_entropy": True}),
    Case(
        "rows without completion tokens, and rows off policy",
        {"mask_truncated_completions": True, "off_policy_mask_threshold": 1e-3, "num_iterations": 3},
    ),
    Case("experts and their auxiliary loss", {"router_aux_loss_coef": 0.5}, kind="MixtralForCausalLM"),
    Case("a stream of prompts", TWICE, stream=True),
    Case("conversations", fixed=False, chat=True),
    Case("a reward model", judge=True),
    Case("a reward model of another attention", judge="sdpa"),
    Case(
        "prompts longer than a rank's share, a head in float32",
        {
            "scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum", "pad_to_multiple_of": 8,
            "cast_lm_head_to_fp32": True,
        },
        prompt=60,
    ),
    Case(
        "a reference that follows the policy",
        {
            **OFF_POLICY, "sync_ref_model": True, "ref_model_sync_steps": 1, "use_bias_correction_kl": True,
            "delta": 1.5,
        },
    ),
    Case("evaluated between steps", {**TWICE, "eval_strategy": "steps", "eval_steps": 1}, fixed=False),
    Case("FSDP2 and a reference", {**OFF_POLICY, "beta": 0.1}, fixed=False, fsdp=True),
    Case("FSDP2, LoRA", {**TWICE, "num_iterations": 2, "beta": 0.1}, lora=True, fsdp=True),
    Case("RLOO under FSDP2", RLOO, rloo=True, fixed=False, fsdp=True),
    Case("RLOO", {**RLOO, "num_iterations": 2}, rloo=True),
    Case(
        "RLOO, generated", {**RLOO, **TWICE, "steps_per_generation": 4, "normalize_advantages": True},
        rloo=True, fixed=False,
    ),
    Case("RLOO, a batch of generations", {**RLOO, "generation_batch_size": 8}, rloo=True, fixed=False),
    Case("RLOO, a reward model of another attention", RLOO, rloo=True, judge="eager"),
    Case("RLOO with LoRA", {**RLOO, "learning_rate": 0.01}, rloo=True, lora=True),
]  # fmt: skip
RLOO_GROUPS = Case("RLOO, groups of two replicas", {**RLOO, **TWICE, "num_generations": 8}, rloo=True)
ON_FOUR = [FIRST, GROUPS, *(case for case in CASES if case.stream or case.lora or case.fsdp), RLOO_GROUPS]


@cache
def without_ring(ranks: Ranks, case: Case, mesh: Mesh) -> Outcome:
    return ranks(mesh.alone.size).run(trained, case, mesh.alone)[0]


def compare(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    want = without_ring(ranks, case, mesh)
    assert case.judge or want.steps[0].keys() > METRICS
    assert_rings_learn_alike(ranks(mesh.size).run(trained, case, mesh), want, mesh, STEPS)


def test_grpo_in_a_ring_is_grpo_in_one_process(ranks: Ranks) -> None:
    compare(ranks, FIRST, Mesh(cp=2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
@pytest.mark.turns
def test_each_kind_of_it_too(ranks: Ranks, case: Case) -> None:
    compare(ranks, case, Mesh(cp=2))


@pytest.mark.parametrize("case", [case for case in CASES if case.why in ("RLOO", "grpo")], ids=lambda case: case.why)
@pytest.mark.turns
def test_what_float32_leaves_apart_is_rounding(ranks: Ranks, case: Case) -> None:
    (want,) = ranks(1).run(reinforced, case, Mesh())
    for got in ranks(2).run(reinforced, case, Mesh(cp=2)):
        assert_equal_in_float64(got, want)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("case", ON_FOUR, ids=lambda case: case.why)
def test_on_four_ranks_as_well(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    if mesh.dp == 1 and "num_generations" in case.args:
        case = case.with_args(num_generations=4)
    compare(ranks, case, mesh)


def test_gmpo_too(ranks: Ranks) -> None:
    """It was refused, as a trainer of TRL's that is not GRPOTrainer itself."""
    case = Case("", {**OFF_POLICY, "top_entropy_quantile": 0.5, "learning_rate": 0.3})
    want = ranks(1).run(trained, case, Mesh(), True, GMPOTrainer)[0]
    assert_rings_learn_alike(ranks(2).run(trained, case, Mesh(cp=2), True, GMPOTrainer), want, Mesh(cp=2), STEPS)


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_that_sees_rows_is_exact(ranks: Ranks, name: str) -> None:
    """It was refused."""
    want = ranks(1).run(overridden, name, Mesh())[0]
    for got in ranks(2).run(overridden, name, Mesh(cp=2)):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.turns
def test_the_ratio_of_the_first_inner_step_is_one(ranks: Ranks) -> None:
    case = Case("", {"num_iterations": 2}, fixed=False)
    for first, second, third in ranks(2).run(ratios, case, Mesh(cp=2)):
        assert (first == 1).all()
        assert (third == 1).all()
        assert (second != 1).any(), "the policy did not change"


SEEN = {"own_random_numbers": "RanksDiffer"}
"""The refusal that a defect ends in; others train to the end."""


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.turns
def test_a_planted_defect_is_seen(ranks: Ranks, defect: str) -> None:
    case = Case("planted", {**TWICE, "steps_per_generation": 4, "beta": 0.1}, fixed=False)
    want = without_ring(ranks, case, Mesh())
    for got in ranks(2).run(trained_with, defect, case, Mesh(cp=2)):
        if isinstance(got, str):
            assert got.startswith(SEEN[defect]), got
            continue
        assert defect not in SEEN
        apart = max(
            abs(mine[name] - x) / max(1, abs(x))
            for mine, theirs in zip(got.steps, want.steps, strict=True) for name, x in theirs.items()
        )  # fmt: skip
        assert apart > 100 * LOSS


REFUSED: list[tuple[str, Case, dict[str, Any], str]] = [
    (
        "continuous batches", Case("", {"use_transformers_continuous_batching": True}, rloo=True), {},
        "UnsupportedOption: FixedRLOO with use_transformers_continuous_batching is not possible",
    ),
    (
        "weights that each rank would drop by its own seed", Case("", lora=True),
        {"peft_config": LoHaConfig(r=4, rank_dropout=0.5, target_modules=["q_proj"])},
        "RanksDiffer: the ranks of one ring must hold the same random numbers by which a PEFT adapter drops weights",
    ),
    (
        "a group of a rank's rows twice", Case("", {"num_generations": 8}), {},
        "PartialGroups: 4 completions (per_device_train_batch_size 4 x 1 rings x steps_per_generation 1) are no whole",
    ),
    (
        "a group of an evaluation's rows twice, before the first step",
        Case("", {"num_generations_eval": 8, "eval_strategy": "steps", "eval_steps": 9}), {},
        "PartialGroups: 4 completions (per_device_eval_batch_size 4 x 1 rings) are no whole groups of 8",
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", [OtherTokens, AlsoLogits])
def test_a_loss_of_other_rows_than_the_batchs(ranks: Ranks, kind: Any) -> None:
    """`AlsoLogits` was refused: its call was taken for one of log-probabilities, by the self-check alone."""
    case = Case("", {"learning_rate": 0.001})
    (want,) = ranks(1).run(reinforced, case, Mesh(), kind)
    for got in ranks(2).run(reinforced, case, Mesh(cp=2), kind):
        assert_equal_in_float64(got, want)


@pytest.mark.parametrize(("why", "case", "options", "text"), REFUSED, ids=[why for why, *_ in REFUSED])
def test_what_would_differ_is_refused(ranks: Ranks, why: str, case: Case, options: dict[str, Any], text: str) -> None:
    for said in ranks(2).run(one_step, case, Mesh(cp=2), **options):
        assert said.startswith(text), said


COMPILED = [
    Case("GRPO", {"max_steps": 1}),
    pytest.param(Case("RLOO", {**RLOO, "max_steps": 1}, rloo=True), marks=pytest.mark.full),
    pytest.param(Case("LoRA", {"max_steps": 1}, lora=True), marks=pytest.mark.full),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.why)
def test_a_compiled_model_is_compiled_in_a_ring_too(ranks: Ranks, case: Case) -> None:
    """What stood in for the model's calls kept the compiler from all that they called: no graph was made."""
    want, graphs = ranks(1).run(compiled_graphs, case, Mesh())[0]
    found = ranks(2).run(compiled_graphs, case, Mesh(cp=2))
    assert graphs and all(each for _, each in found)
    assert_rings_learn_alike([outcome for outcome, _ in found], want, Mesh(cp=2), 1)
