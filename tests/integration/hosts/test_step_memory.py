"""A training step of a trainer makes no tensor of a rank's tokens times the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from hf_ring_attn.config import Loss
from tests.helpers.jobs import evaluation_jobs
from tests.helpers.jobs.comparison import Ranks

STEPS: list[Any] = [
    ("Trainer", {}),
    ("Trainer", {"lora": True}),
    ("Trainer", {"fsdp2": True}),
    ("Trainer", {"arguments": {"label_smoothing_factor": 0.1}}),
    ("Trainer", {"arguments": {"gradient_accumulation_steps": 2}}),
    ("Trainer", {"model": "gemma2"}),
    ("SFTTrainer", {}),
    ("SFTTrainer", {"lora": True}),
    ("SFTTrainer", {"args": {"loss_type": "nll"}}),
    ("SFTTrainer", {"args": {"loss_type": "dft"}}),
]


@pytest.mark.parametrize(("host", "options"), STEPS, ids=str)
@pytest.mark.turns
def test_a_training_step_makes_no_logits_of_all_tokens(ranks: Ranks, host: str, options: dict[str, Any]) -> None:
    for largest, logits in ranks(2).run(evaluation_jobs.most_values_of_a_step, host, "auto", options):
        assert largest < logits


@pytest.mark.parametrize(("host", "loss", "short"), [("Trainer", "sharded", True), ("SFTTrainer", "auto", False)])
def test_such_logits_would_be_seen(ranks: Ranks, host: str, loss: Loss, short: bool) -> None:
    for largest, logits in ranks(2).run(evaluation_jobs.most_values_of_a_step, host, loss, {}, short):
        assert largest >= logits
