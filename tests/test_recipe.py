"""recipes/long_context_lora, tiny, run as its users run it: a ring of two has the losses of one process without one."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from test_examples import ACCELERATE, REPOSITORY, output, start

RECIPE = REPOSITORY / "recipes" / "long_context_lora"
TRAIN = [
    *(str(RECIPE / "train.py"), "--shape", "tiny", "--dtype", "float32"),
    *("--tokens", "301", "--steps", "3", "--learning-rate", "1e-2"),
]
LOSS = 1e-5
"""Relative bound: the order of float32 sums differs."""


@pytest.mark.slow
def test_a_ring_of_two_trains_as_one_process(tmp_path: Path) -> None:
    runs = {
        "alone": [*TRAIN, "--implementation", "sdpa", "--loss", "full"],
        "trainer": [*ACCELERATE, *TRAIN, "--trainer", "trainer"],
        "sft": [*ACCELERATE, *TRAIN, "--trainer", "sft"],
    }
    for name in runs:
        (tmp_path / name).mkdir()
    started = {name: start(tmp_path / name, *words, "--output", "results.json") for name, words in runs.items()}
    found: dict[str, Any] = {}
    for name, program in started.items():
        output(program, tmp_path / name)
        found[name] = json.loads((tmp_path / name / "results.json").read_text())
    alone = found["alone"]
    assert alone["ranks"] == 1 and len(alone["losses"]) == 3
    assert alone["losses"][2] != pytest.approx(alone["losses"][0], rel=1e-3)
    for ring in (found["trainer"], found["sft"]):
        assert ring["ranks"] == 2
        assert ring["losses"] == pytest.approx(alone["losses"], rel=LOSS)
        assert ring["grad_norms"] == pytest.approx(alone["grad_norms"], rel=LOSS)
        assert ring["tokens_per_second"] > 0


def test_the_work_of_a_step_is_counted_by_the_formula() -> None:
    measure = runpy.run_path(str(RECIPE / "measure.py"))
    config = LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, vocab_size=259, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    trained = 64 * 64
    frozen = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192) + 64 * 259 - trained
    assert measure["flops_per_step"](model, config, 100) == 4 * 100 * frozen + 6 * 100 * trained + 6 * 100**2 * 64 * 2
