"""Images through SFTTrainer, by its own collator and the processors of two families: as in one process.

Steps are small. At 0.1, as for text, gradients grow, and any two orders of float32 sums part.
"""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

from tests.helpers.jobs.comparison import Ranks, assert_equal_in_float64
from tests.helpers.jobs.in_float64 import pictures_learnt
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import Case
from tests.integration.hosts.test_sft_trainer import compare

GEMMA, QWEN = "gemma3 vision", "qwen2.5 vision"
SMALL = {"learning_rate": 0.01}
ASSISTANT = {"assistant_only_loss": Version(transformers.__version__) >= Version("5.18")}
"""TRL takes it for images from that version on."""
TWO_RANKS = [
    Case("Gemma 3, chat, assistant only", {**SMALL, **ASSISTANT}, rows="chat", images=GEMMA),
    Case("Gemma 3, some rows without images", SMALL, rows="chat", images=GEMMA, without_images=2),
    Case("Qwen2.5-VL, metrics of whole rows", SMALL, rows="chat", images=QWEN, metrics=True),
    Case("Qwen2.5-VL, LoRA, completions", SMALL, rows="completion", images=QWEN, lora=True),
    pytest.param(
        Case(
            "Qwen2.5-VL, checkpointing, some rows without images", {**SMALL, "gradient_checkpointing": True},
            rows="chat", images=QWEN, without_images=2,
        ),
        marks=pytest.mark.full,
    ),
    Case("Qwen3-VL", SMALL, rows="chat", images="qwen3 vision"),
    Case("Gemma 3, by whole rows", SMALL, rows="chat", images=GEMMA, without_images=2, loss="gathered"),
]  # fmt: skip
COMPLETIONS = Case(
    "Gemma 3, completions, accumulation", {**SMALL, "gradient_accumulation_steps": 2}, rows="completion", images=GEMMA
)
LARGER = [
    pytest.param(COMPLETIONS, Mesh(cp=4), marks=pytest.mark.full),
    (COMPLETIONS, Mesh(dp=2, cp=2)),
    (Case("Gemma 3, rings without images", SMALL, rows="chat", images=GEMMA, without_images=2), Mesh(dp=2, cp=2)),
    # Without replicas: its loss is each batch's mean, of which replicas' mean is not that of all their rows.
    pytest.param(Case("Qwen2.5-VL, chat", SMALL, rows="chat", images=QWEN), Mesh(cp=4), marks=pytest.mark.full),
]


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.why)
@pytest.mark.turns
def test_images_in_sft_are_those_of_one_process(ranks: Ranks, case: Case) -> None:
    compare(ranks, case, Mesh(cp=2))


@pytest.mark.parametrize(("case", "mesh"), LARGER, ids=lambda x: getattr(x, "why", str(x)))
@pytest.mark.slow
@pytest.mark.turns
def test_on_four_ranks_as_well(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    compare(ranks, case, mesh)


@pytest.mark.turns
def test_a_model_with_linear_attention(ranks: Ranks) -> None:
    """In float64: float32 leaves 1e-4 of a gradient's norm apart."""
    case = Case("Qwen3.5", SMALL, rows="chat", images="qwen3.5 vision", without_images=2)
    (want,) = ranks(1).run(pictures_learnt, case, Mesh())
    for got in ranks(2).run(pictures_learnt, case, Mesh(cp=2)):
        assert_equal_in_float64(got, want)
