"""DistillationTrainer in a ring is that of one process for each ring, without the plugin, or refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.helpers.jobs.comparison import Ranks, assert_equal_in_float64, assert_rings_learn_alike
from tests.helpers.jobs.distillation_jobs import STEPS, Case, OwnLoss, one_step, trained, trained_by_own_loader
from tests.helpers.jobs.in_float64 import distilled
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trl_runs import Outcome

TWICE = {"gradient_accumulation_steps": 2}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
FIRST = Case("generated and accumulated", TWICE)
CASES = [
    Case("reverse KL, at a temperature", {"beta": 1.0, "temperature": 0.7}),
    Case("forward KL, LoRA, checkpointed", {"beta": 0.0, "learning_rate": 1.0, **CHECKPOINTED}, lora=True),
    Case("prompts longer than a rank's share", {"pad_to_multiple_of": 8}, prompt=60),
    Case("conversations", chat=True),
    Case("a stream of prompts", TWICE, stream=True),
    Case("logged completions", {**TWICE, "log_completions": True}),
    Case("evaluated between steps", {**TWICE, "eval_strategy": "steps", "eval_steps": 1}),
    Case("scaled logits", kind="GraniteForCausalLM"),
    Case("LoRA under FSDP2", {**TWICE, "learning_rate": 1.0}, lora=True, fsdp=True),
    Case("Gemma 3 with images", {"learning_rate": 0.05}, chat=True, images="gemma3 vision"),
    Case("Qwen2.5-VL with images", {"learning_rate": 0.05}, chat=True, images="qwen2.5 vision"),
    Case("Qwen3-VL on text", {"learning_rate": 0.05}, chat=True, images="qwen3 vision", text_only=True),
]


@cache
def without_ring(ranks: Ranks, case: Case, mesh: Mesh) -> Outcome:
    return ranks(mesh.alone.size).run(trained, case, mesh.alone)[0]


def compare(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    want = without_ring(ranks, case, mesh)
    assert want.steps[0].keys() >= {"loss", "grad_norm", "entropy", "num_tokens", "completions/mean_length"}
    assert want.evaluation["eval_loss"] > 0 and len(want.steps) == STEPS
    assert_rings_learn_alike(ranks(mesh.size).run(trained, case, mesh), want, mesh, STEPS)


def test_distillation_in_a_ring_is_that_of_one_process(ranks: Ranks) -> None:
    compare(ranks, FIRST, Mesh(cp=2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
@pytest.mark.turns
def test_each_kind_of_it_too(ranks: Ranks, case: Case) -> None:
    compare(ranks, case, Mesh(cp=2))


@pytest.mark.turns
def test_what_float32_leaves_apart_is_rounding(ranks: Ranks) -> None:
    (want,) = ranks(1).run(distilled, FIRST, Mesh())
    for got in ranks(2).run(distilled, FIRST, Mesh(cp=2)):
        assert_equal_in_float64(got, want)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("case", [FIRST, *CASES[:2], *CASES[4:6], *CASES[8:10]], ids=lambda case: case.why)
def test_on_four_ranks_as_well(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    compare(ranks, case, mesh)


@pytest.mark.parametrize("mesh", [Mesh(cp=2), pytest.param(Mesh(dp=2, cp=2), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.turns
def test_a_loader_of_ones_own_counts_rings(ranks: Ranks, stream: bool, mesh: Mesh) -> None:
    case = Case("", TWICE, stream=stream)
    want = ranks(mesh.alone.size).run(trained_by_own_loader, case, mesh.alone)[0]
    assert_rings_learn_alike(ranks(mesh.size).run(trained_by_own_loader, case, mesh), want, mesh, STEPS)


REFUSED: list[tuple[str, Case, dict[str, Any], str]] = [
    (
        "a loss that sees a rank's tokens", Case(""), {"kind": OwnLoss},
        "UnknownTrainer: OwnLoss counts or shards its batches in OwnLoss._compute_loss",
    ),
    ("a teacher of another attention", Case("", attention="sdpa"), {}, "ModelIsNoRing: "),
]  # fmt: skip


@pytest.mark.parametrize(("why", "case", "options", "text"), REFUSED, ids=[why for why, *_ in REFUSED])
def test_what_would_differ_is_refused(ranks: Ranks, why: str, case: Case, options: dict[str, Any], text: str) -> None:
    for said in ranks(2).run(one_step, case, Mesh(cp=2), **options):
        assert said.startswith(text), said
