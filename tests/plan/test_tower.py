"""A vision tower in forecasts: its sizes, and its time and memory beside measured steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_ring_attn import cli
from hf_ring_attn.bench.results import FILE, read
from hf_ring_attn.integration.model import loading
from hf_ring_attn.plan.hardware import GIB, GPUS
from hf_ring_attn.plan.memory import memory_of
from hf_ring_attn.plan.reading import shape_of
from hf_ring_attn.plan.seconds import seconds_of
from hf_ring_attn.plan.setup import Setup
from hf_ring_attn.plan.shape import ModelShape, TowerShape
from hf_ring_attn.plan.tower import tower_bytes
from tests.plan.filed_steps import RESULTS
from tests.recipes.test_forecasts import GEMMA3_4B

ONE = Setup(
    gpus=1, tokens=32664, gpu=GPUS["h200"], shard="ddp", save_attention=True, kernel="triton", pictures=118
)  # fmt: skip
"""The recipe for pictures on one GPU."""


def measured(folder: str, run: str) -> dict[str, Any]:
    (found,) = (one for one in read(RESULTS / folder / FILE) if one.name == run)
    return found.rows[0]


def gemma3(tmp_path: Path, **changes: Any) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA3_4B, **changes}))
    config = loading.load_config(str(tmp_path))
    return shape_of(config, loading.empty_model(config, "ring_fp32"))


def test_a_tower_is_read(tmp_path: Path) -> None:
    assert gemma3(tmp_path).tower == TowerShape(
        name="model.vision_tower", layers=27, hidden=1152, mlp=4304, active=27 * (4 * 1152**2 + 2 * 1152 * 4304),
        patches=4096, pixels=3 * 896**2,
    )  # fmt: skip


def test_a_step_with_pictures_takes_what_was_measured(tmp_path: Path) -> None:
    """Its attention's speed is of this run's profile, its other times and its memory are not."""
    model, row = gemma3(tmp_path), measured("2026-11-30-recipes-one-gpu", "vlm")
    assert seconds_of(model, ONE).total == pytest.approx(row["seconds_per_step"], rel=0.08)
    assert memory_of(model, ONE).allocated / GIB == pytest.approx(max(row["peak_memory_GiB"]), rel=0.05)


def test_a_tower_that_holds_the_most_memory_is_the_peak(tmp_path: Path) -> None:
    """On two GPUs, each of which ran it over all pictures at the commit of the run."""
    model, row = gemma3(tmp_path), measured("2026-11-30-three-recipes", "vlm")
    two = replace(ONE, gpus=2)
    memory = memory_of(model, two)
    assert model.tower is not None
    held = sum(memory.always.values()) + tower_bytes(model.tower, ONE)
    assert held / GIB == pytest.approx(max(row["peak_memory_GiB"]), rel=0.03) and held > memory.allocated
    assert memory_of(model, replace(two, pictures=236)).moment == "forward of the vision tower"


def test_ranks_of_a_ring_share_pictures(tmp_path: Path) -> None:
    model = gemma3(tmp_path)
    of = {gpus: seconds_of(model, replace(ONE, gpus=gpus, pictures=118)).tower for gpus in (1, 2, 8)}
    assert of[1] == pytest.approx(2 * of[2]) == pytest.approx(118 / 15 * of[8]) and of[8] > 0
    assert seconds_of(model, replace(ONE, pictures=0)).tower == 0
    trained = seconds_of(model, replace(ONE, method="full"))
    assert trained.tower == pytest.approx(4 * of[1])
    assert trained.flops > seconds_of(model, replace(ONE, method="full", pictures=0)).flops


def said(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str, **changes: Any) -> tuple[int, str]:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA3_4B, **changes}))
    code = cli.main(["plan", "--model", str(tmp_path), "--gpus", "2", "--tokens", "32K", *arguments])
    both = capsys.readouterr()
    return code, both.out + both.err


def test_the_command_counts_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(tmp_path, capsys, "--pictures", "118")
    assert code == 0 and "  vision tower  " in text and "vision_tower are counted" not in text
    code, text = said(tmp_path, capsys)
    want = "the weights of model.vision_tower are counted; its activations and its time are, with --pictures N"
    assert code == 0 and want in text and "  vision tower  " not in text


def test_a_tower_of_unknown_sizes_is_refused_with_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "text_config": None, "vision_config": None}
    code, text = said(tmp_path, capsys, "--pictures", "2", **config)
    assert code == 2 and "--pictures needs a vision tower for pictures of one size" in text
