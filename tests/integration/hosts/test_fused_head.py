"""TRL's fused head reads the weight of lm_head, and does not call it: what would train it wrong is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.head_jobs import sharded_step


def test_a_trained_head_that_fsdp2_shards_is_refused_before_the_first_step(ranks: Ranks, tmp_path: Path) -> None:
    """Its gradient was that of each rank's own tokens: relative error 1.0 on two ranks."""
    for said in ranks(2).run(sharded_step, ["lm_head"], str(tmp_path)):
        assert re.match(r"HeadReadPastFsdp: the output embedding of \w+ .*DDP.*full logits", said), said


@pytest.mark.parametrize("whole", [None, ["input_layernorm"]], ids=str)
def test_a_frozen_head_is_not_and_the_adapter_is_saved(ranks: Ranks, tmp_path: Path, whole: list[str] | None) -> None:
    for said in ranks(2).run(sharded_step, whole, str(tmp_path)):
        assert said == "adapter_config.json adapter_model.safetensors"
