"""Images in DPO, KTO, GRPO and RLOO: a ring trains as one process does, on rows with pictures and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs.comparison import Ranks, assert_equal_in_float64
from tests.helpers.jobs.grpo_jobs import Case as Prompts
from tests.helpers.jobs.in_float64 import preferences_trained, reinforced
from tests.helpers.jobs.preference_jobs import Case as Pairs
from tests.helpers.jobs.runs import Mesh
from tests.integration.hosts import test_grpo_trainer, test_preference_trainers
from tests.integration.hosts.test_preference_trainers import CHECKPOINTED, SEQUENTIAL

GEMMA, QWEN, QWEN3, QWEN3_5 = "gemma3 vision", "qwen2.5 vision", "qwen3 vision", "qwen3.5 vision"
SMALL = {"learning_rate": 0.01}
FOLLOWED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "gradient_accumulation_steps": 2}
OLD = {"gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.05}
"""Log-probabilities of two batches' rows, of which each gets its own images."""
LEARNT = [
    Pairs("DPO, Gemma 3, a reference", SMALL, images=GEMMA),
    Pairs("DPO, Qwen2.5-VL, LoRA, checkpointed", CHECKPOINTED, reference=False, lora=True, images=QWEN),
    Pairs("DPO, Qwen3-VL, some rows without images", SMALL, images=QWEN3, without_images=2),
    Pairs("DPO, Qwen2.5-VL on text", SMALL, images=QWEN, text_only=True),
    Pairs("KTO, Gemma 3, a reference", {**SMALL, **SEQUENTIAL}, kto=True, images=GEMMA),
    Pairs(
        "KTO, Qwen2.5-VL, LoRA",
        {**SMALL, **SEQUENTIAL},
        reference=False,
        lora=True,
        kto=True,
        images=QWEN,
        prompt=9,
    ),
    Pairs("DPO, Qwen2.5-VL, a reference that follows", {**SMALL, **FOLLOWED}, images=QWEN),
    Pairs("DPO, Gemma 3, FSDP2", SMALL, images=GEMMA, fsdp=True),
    Pairs(
        "DPO, Qwen2.5-VL, FSDP2, LoRA",
        CHECKPOINTED,
        reference=False,
        lora=True,
        images=QWEN,
        fsdp=True,
        without_images=2,
    ),
]
REINFORCED = [
    Prompts("GRPO, Gemma 3", {**SMALL, "gradient_accumulation_steps": 2}, fixed=False, chat=True, images=GEMMA),
    Prompts(
        "GRPO, Qwen2.5-VL, old rows, a reference, LoRA", {"num_iterations": 2, "beta": 0.05}, fixed=False, chat=True,
        lora=True, images=QWEN,
    ),
    Prompts("GRPO, Qwen2.5-VL, old rows of two batches", {**SMALL, **OLD}, fixed=False, chat=True, images=QWEN),
    Prompts("GRPO, Qwen3-VL", SMALL, fixed=False, chat=True, images=QWEN3),
    Prompts("GRPO, Gemma 3 on text", SMALL, fixed=False, chat=True, images=GEMMA, text_only=True),
    Prompts("GRPO, Gemma 3, FSDP2", SMALL, fixed=False, chat=True, images=GEMMA, fsdp=True),
    Prompts("RLOO, Qwen2.5-VL", {**SMALL, "beta": 0.05}, fixed=False, chat=True, rloo=True, images=QWEN),
]  # fmt: skip


@pytest.mark.parametrize("case", LEARNT, ids=lambda case: case.why)
@pytest.mark.turns
def test_preferences_about_images(ranks: Ranks, case: Pairs, tmp_path: Path) -> None:
    test_preference_trainers.compare(ranks, case, Mesh(cp=2), tmp_path)


@pytest.mark.parametrize("case", REINFORCED, ids=lambda case: case.why)
@pytest.mark.turns
def test_completions_about_images(ranks: Ranks, case: Prompts) -> None:
    test_grpo_trainer.compare(ranks, case, Mesh(cp=2))


IN_FLOAT64 = {"learning_rate": 0.001}
"""A step at which float32 leaves 1e-4 of a gradient's norm apart, by the rounding of linear attention."""


@pytest.mark.parametrize("on_text", [False, True], ids=["images", "text"])
@pytest.mark.turns
def test_models_of_images_with_linear_attention(ranks: Ranks, on_text: bool) -> None:
    pairs = Pairs("DPO", IN_FLOAT64, images=QWEN3_5, text_only=on_text)
    asked = Prompts("GRPO", IN_FLOAT64, fixed=False, chat=True, images=QWEN3_5, text_only=on_text)
    jobs: list[tuple[Any, Any]] = [(preferences_trained, pairs), (reinforced, asked)]
    for job, case in jobs:
        (want,) = ranks(1).run(job, case, Mesh())
        for got in ranks(2).run(job, case, Mesh(cp=2)):
            assert_equal_in_float64(got, want, 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("case", [*LEARNT[:5], *REINFORCED[:3]], ids=lambda case: case.why)
def test_on_four_ranks_as_well(ranks: Ranks, case: Pairs | Prompts, mesh: Mesh, tmp_path: Path) -> None:
    if isinstance(case, Pairs):
        test_preference_trainers.compare(ranks, case, mesh, tmp_path)
    else:
        test_grpo_trainer.compare(ranks, case, mesh)
