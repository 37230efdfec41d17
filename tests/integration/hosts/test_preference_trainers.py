"""DPO and KTO in a ring are what they are in one process without the plugin; what would not be is refused in words."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from trl.experimental.bema_for_ref_model import DPOTrainer as BemaDPOTrainer

from tests.helpers.jobs.comparison import LOSS, Ranks, assert_equal_in_float64, assert_rings_learn_alike
from tests.helpers.jobs.in_float64 import preferences_trained
from tests.helpers.jobs.preference_jobs import (
    DEFECTS,
    OTHER_ROWS,
    SPREAD,
    STEPS,
    Case,
    OwnBatches,
    PaddingFree,
    evaluated,
    one_step,
    rewards_in_half,
    save,
    trained,
    trained_with,
)
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trl_runs import Outcome

EVERY_LOSS = [
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
METRICS = {
    "entropy", "num_tokens", "logits/chosen", "logits/rejected", "mean_token_accuracy", "rewards/chosen",
    "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
}  # fmt: skip

OF_KTO = {
    "kl", "entropy", "num_tokens", "logits/chosen", "logits/rejected", "rewards/chosen", "rewards/rejected",
    "rewards/margins", "logps/chosen", "logps/rejected",
}  # fmt: skip

PRECOMPUTED = {"precompute_ref_log_probs": True}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ACCUMULATED = Case("sigmoid, accumulated, and a reference model", {"gradient_accumulation_steps": 2})
CASES = [
    ACCUMULATED,
    Case("every loss at once", {"loss_type": EVERY_LOSS, "label_smoothing": 0.1, "learning_rate": 3e-3}),
    Case("LD-DPO's cumulative masks", {"ld_alpha": 0.4}),
    Case("WPO's weights of rows", {"use_weighting": True, "learning_rate": 0.5}),
    Case("prompts longer than a rank's share", prompt=9),
    Case("a row without completion tokens", {"loss_type": ["sigmoid_norm", "ipo"], "learning_rate": 0.02}, masks=True),
    Case("LoRA, whose adapter is off for the reference", reference=False, lora=True),
    Case("LoRA, checkpointed", CHECKPOINTED, reference=False, lora=True),
    Case("an adapter, of which a copy is the reference", CHECKPOINTED, reference=False, adapted=True),
    Case("a reference that is computed before", PRECOMPUTED),
    Case("the policy itself is the reference, computed before", PRECOMPUTED, reference=False),
    Case("an f-divergence", {"f_divergence_type": "js_divergence"}),
    Case("a reference that follows the policy", {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    Case("experts and their auxiliary loss", {"router_aux_loss_coef": 0.5}, kind="MixtralForCausalLM"),
    Case("metrics of logits in whole rows", metrics=True),
    Case("without padding, which TRL 1.16 turns off", {"padding_free": True}),
]

ALPHA = Case(
    "an alpha-divergence, whose exponents of rewards enlarge rounding",
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.0, "optim": "adamw_torch",
     "learning_rate": 0.01},
)  # fmt: skip
"""In float32 its weights are up to 2.5e-4 apart, so it is compared in float64 only."""

SEQUENTIAL = {"train_sampling_strategy": "sequential"}
WITH_KL = Case("KTO, accumulated, and a reference model", {**SEQUENTIAL, "gradient_accumulation_steps": 2}, kto=True)
CASES_OF_KTO = [
    WITH_KL,
    Case("KTO without a KL term", {"loss_type": "apo_zero_unpaired", "undesirable_weight": 0.7}, kto=True),
    Case("KTO, prompts longer than a rank's share", SEQUENTIAL, prompt=9, kto=True),
    Case("KTO, a row without completion tokens", {**SEQUENTIAL, "learning_rate": 0.02}, masks=True, kto=True),
    Case("KTO, LoRA, checkpointed", {**SEQUENTIAL, **CHECKPOINTED}, reference=False, lora=True, kto=True),
    Case("KTO, a reference that is computed before", {**SEQUENTIAL, **PRECOMPUTED}, kto=True),
    Case(
        "KTO, experts and their auxiliary loss", {**SEQUENTIAL, "router_aux_loss_coef": 0.5, "learning_rate": 0.02},
        kind="MixtralForCausalLM", kto=True,
    ),
]  # fmt: skip


UNDER_FSDP2 = [
    Case("FSDP2, accumulated, and a reference model", {"gradient_accumulation_steps": 2}, fsdp=True),
    Case("FSDP2, LoRA, checkpointed, whose adapter is off", CHECKPOINTED, reference=False, lora=True, fsdp=True),
    Case("FSDP2, a reference that is computed before", PRECOMPUTED, fsdp=True),
    Case("FSDP2, the policy is the reference, computed before", PRECOMPUTED, reference=False, fsdp=True),
    Case("FSDP2, LoRA, computed before", PRECOMPUTED, reference=False, lora=True, fsdp=True),
    Case("FSDP2, an adapter and its copy", reference=False, adapted=True, fsdp=True),
    Case("FSDP2, a reference that follows", {"sync_ref_model": True, "ref_model_sync_steps": 1}, fsdp=True),
    Case("FSDP2, KTO and a reference model", {**SEQUENTIAL, "gradient_accumulation_steps": 2}, kto=True, fsdp=True),
    Case(
        "FSDP2, KTO, LoRA, checkpointed", {**SEQUENTIAL, **CHECKPOINTED}, reference=False, lora=True, kto=True,
        fsdp=True,
    ),
    Case("FSDP2, KTO, computed before", {**SEQUENTIAL, **PRECOMPUTED}, kto=True, fsdp=True),
]  # fmt: skip


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "a batch that is not sharded",
        {"kind": OwnBatches},
        "InputsNotHandedOn: OwnBatches._prepare_context_parallel_inputs of OwnBatches changed the batch",
    ),
    (
        "rows without padding",
        {"kind": PaddingFree},
        "UnsupportedOption: PaddingFree with padding_free=True is not possible with ring_fp32: TRL 1.16 had none",
    ),
]


@cache
def in_one_process(ranks: Ranks, case: Case, mesh: Mesh) -> Outcome:
    return ranks(mesh.dp if case.kto else 1).run(trained, case, mesh.alone)[0]


def compare(ranks: Ranks, case: Case, mesh: Mesh, folder: Path) -> None:
    want = in_one_process(ranks, case, mesh)
    saved = str(folder) if "precompute_ref_log_probs" in case.args else ""
    if saved:
        save(case, saved)
    outcomes = ranks(mesh.size).run(trained, case, mesh, saved)
    assert {name for step in want.steps for name in step} > (OF_KTO if case.kto else METRICS)
    # In the first step the policy is still its reference, and rounding decides which reward is greater.
    but = [] if case.reference else [(1, "rewards/accuracies")]
    assert_rings_learn_alike(outcomes, want, mesh, STEPS, but=but)


@pytest.mark.parametrize("case", [*CASES, *CASES_OF_KTO, *UNDER_FSDP2], ids=lambda case: case.why)
@pytest.mark.turns
def test_training_in_a_ring_is_training_in_one_process(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    compare(ranks, case, Mesh(cp=2), tmp_path)


def test_the_trainer_that_tells_callbacks_its_reference_is_one_too(ranks: Ranks) -> None:
    """TRL has it for BEMA's callback. It was refused by its module, though its loss is DPOTrainer's."""
    case = Case("", {"gradient_accumulation_steps": 2})
    (want,) = ranks(1).run(trained, case, Mesh(), "", True, BemaDPOTrainer)
    assert_rings_learn_alike(ranks(2).run(trained, case, Mesh(cp=2), "", True, BemaDPOTrainer), want, Mesh(cp=2), STEPS)


@pytest.mark.parametrize("case", [CASES[5], ALPHA, CASES_OF_KTO[3]], ids=lambda case: case.why)
@pytest.mark.turns
def test_what_float32_leaves_apart_is_rounding(ranks: Ranks, case: Case) -> None:
    (want,) = ranks(1).run(preferences_trained, case, Mesh())
    for got in ranks(2).run(preferences_trained, case, Mesh(cp=2)):
        assert_equal_in_float64(got, want)


@pytest.mark.parametrize("case", [ACCUMULATED, WITH_KL], ids=lambda case: case.why)
@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.turns
def test_a_planted_defect_is_seen(ranks: Ranks, defect: str, case: Case) -> None:
    want = in_one_process(ranks, case, Mesh())
    for got in ranks(2).run(trained_with, defect, case, Mesh(cp=2)):
        apart = {name: abs(got.steps[-1][name] - x) for name, x in want.steps[-1].items()}
        assert max(apart["grad_norm"] / want.steps[-1]["grad_norm"], apart["logps/chosen"]) > 100 * LOSS, apart


@pytest.mark.parametrize(("why", "options", "text"), REFUSED, ids=[why for why, *_ in REFUSED])
def test_what_would_differ_is_refused(ranks: Ranks, why: str, options: dict[str, Any], text: str) -> None:
    for said in ranks(2).run(one_step, Case(why), Mesh(cp=2), **options):
        assert said.startswith(text), said


@pytest.mark.turns(4)
@pytest.mark.parametrize("kinds", [OTHER_ROWS, SPREAD], ids=["other rows", "rows gathered"])
@pytest.mark.parametrize("case", [Case("DPO"), Case("KTO", SEQUENTIAL, kto=True)], ids=lambda case: case.why)
def test_a_loss_of_a_programs_own(ranks: Ranks, case: Case, kinds: tuple[Any, Any]) -> None:
    """Of other rows than the batch's; and of numbers that it gathers, of which each ring's came once for each rank."""
    (want,) = ranks(1).run(preferences_trained, case, Mesh(), kinds[case.kto])
    for got in ranks(2).run(preferences_trained, case, Mesh(cp=2), kinds[case.kto]):
        assert_equal_in_float64(got, want)


@pytest.mark.parametrize("kto", [False, True], ids=["DPO", "KTO"])
@pytest.mark.turns
def test_a_reference_is_not_rounded_under_fsdp2(ranks: Ranks, kto: bool) -> None:
    """In 16 bits a policy starts as its reference: with the reference's log-probabilities in bf16 a reward is 0.04."""
    for first, second in ranks(2).run(
        rewards_in_half, Case("", SEQUENTIAL if kto else {}, reference=False, kto=kto, fsdp=True)
    ):
        assert first == 0 and second != 0


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize(
    "case",
    [ACCUMULATED, CASES[2], CASES[6], CASES[9], WITH_KL, CASES_OF_KTO[4], *UNDER_FSDP2[:3], UNDER_FSDP2[7]],
    ids=lambda case: case.why,
)
def test_on_four_ranks_as_well(ranks: Ranks, case: Case, mesh: Mesh, tmp_path: Path) -> None:
    compare(ranks, case, mesh, tmp_path)


def test_an_evaluation_of_kto_whose_kl_rows_are_those_of_the_batch(ranks: Ranks) -> None:
    """Rows cut to a few tokens: those of the KL term, with another row's completion, are then the same."""
    case = Case("", {"max_length": 6}, kto=True)
    (want,) = ranks(1).run(evaluated, case, Mesh(), 6)
    for got in ranks(2).run(evaluated, case, Mesh(cp=2), 6):
        assert got == pytest.approx(want, rel=LOSS, abs=LOSS)


@pytest.mark.parametrize("long", [18, 20])
def test_an_evaluation_of_kto_whose_kl_rows_are_as_long_as_a_ranks_share(ranks: Ranks, long: int) -> None:
    """They got the positions of the batch's tokens, and were refused (`OtherInputs`)."""
    (want,) = ranks(1).run(evaluated, Case("", kto=True), Mesh(), 2, (long, 1))
    for got in ranks(2).run(evaluated, Case("", kto=True), Mesh(cp=2), 2, (long, 1)):
        assert got == pytest.approx(want, rel=LOSS, abs=LOSS)
