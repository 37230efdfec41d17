"""Checkpoints of a ring: resumed at any ring size, with the plugin or without it, and loaded without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import AutoModelForCausalLM

import hf_ring_attn
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, without_ring
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import train
from tests.helpers.models.tiny_models import tiny

SAVED = Run(
    why="saved after two steps", rows=Rows(labelled="answers"),
    arguments={
        "save_strategy": "steps", "save_steps": 2, "optim_args": "momentum=0.9", "gradient_accumulation_steps": 2,
    },
)  # fmt: skip
ADAPTER = replace(SAVED, why="an adapter, saved after two steps", lora=True)

MOVES = [
    (SAVED, Mesh(cp=2), Mesh(cp=2)),
    (SAVED, Mesh(cp=2), Mesh()),  # on one process without the plugin
    (SAVED, Mesh(cp=2), Mesh(cp=4)),
    (SAVED, Mesh(), Mesh(cp=2)),
    (SAVED, Mesh(dp=2, cp=2), Mesh(dp=2)),
    (ADAPTER, Mesh(cp=4), Mesh(cp=2)),
]


@pytest.mark.parametrize(("run", "first", "second"), MOVES, ids=lambda x: getattr(x, "why", str(x)))
@pytest.mark.turns
def test_a_run_resumes_on_another_mesh(ranks: Ranks, tmp_path: Path, run: Run, first: Mesh, second: Mesh) -> None:
    before = ranks(first.size).run(train, run, first, str(tmp_path / "first"))[0]
    checkpoint = tmp_path / "first" / "checkpoint-2"
    after = ranks(second.size).run(train, run, second, str(tmp_path / "second"), resume_from=str(checkpoint))[0]
    want = without_ring(ranks, run, first)
    assert_equal_runs(before, want)
    assert (before.steps, after.steps) == (4, 2)
    assert_equal_runs(after, want)


def test_a_checkpoint_needs_no_plugin(ranks: Ranks, tmp_path: Path) -> None:
    """Not one name of the package in what is saved, also where the ring was asked for by TrainingArguments."""
    asked = {"parallelism_config": ParallelismConfig(cp_size=2, cp_backend="ring")}
    run = replace(SAVED, steps=2, arguments={**SAVED.arguments, **asked})
    mesh = Mesh(cp=2)
    trained = ranks(2).run(train, run, mesh, str(tmp_path), ACCELERATE_USE_PARALLELISM_CONFIG="false")[0]
    checkpoint = tmp_path / "checkpoint-2"
    names = torch.serialization.get_unsafe_globals_in_checkpoint(str(checkpoint / "training_args.bin"))
    assert "transformers.training_args.TrainingArguments" in names
    assert "accelerate.parallelism_config.ParallelismConfig" in names
    assert [name for name in names if "ring" in name] == []
    assert "ring" not in (checkpoint / "config.json").read_text()
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 2

    hf_ring_attn.uninstall()
    try:
        arguments = torch.load(checkpoint / "training_args.bin", weights_only=False)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    finally:
        hf_ring_attn.install()
    assert arguments.parallelism_config.cp_size == 2
    assert model.config._attn_implementation == "sdpa"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained.parameters[name]), name
        assert not torch.equal(parameter, tiny("llama").get_parameter(name)) or "norm" in name
