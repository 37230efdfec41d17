"""merge.py: merged logits are the adapter's to rounding; a wrong merge is refused, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.recipes.programs_of_recipes import program

merge, toy = program("merge"), program("toy")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output folder of a run: an adapter, and the settings that name its model."""
    toy.write_model(tmp_path / "model")
    auto: Any = AutoModelForCausalLM
    model = get_peft_model(auto.from_pretrained(tmp_path / "model"), LoraConfig(r=4, target_modules="all-linear"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(str(tmp_path / "run"))
    settings = {
        "model": str(tmp_path / "model"), "revision": None, "dtype": "float32", "config": {},
        "lora": {"r": 4}, "training": {"max_length": 64},
    }  # fmt: skip
    (tmp_path / "run/recipe.json").write_text(json.dumps({"settings": settings, "steps": []}))
    return tmp_path / "run"


def merged(run: Path) -> Path:
    with mock.patch.object(sys, "argv", ["merge.py", str(run), str(run.parent / "merged"), "--tokens", "100"]):
        merge.main()
    return run.parent / "merged"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_model_has_the_adapters_logits(dtype: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = json.loads((run / "recipe.json").read_text())
    saved["settings"]["dtype"] = dtype
    (run / "recipe.json").write_text(json.dumps(saved))
    folder = merged(run)
    text = capsys.readouterr().out
    assert f"vllm serve {folder}" in text and not list(run.parent.glob("*.part"))
    auto: Any = AutoModelForCausalLM
    tokens = torch.arange(3, 90)[None]
    want = PeftModel.from_pretrained(auto.from_pretrained(run.parent / "model", dtype=dtype), run)(tokens).logits
    got = auto.from_pretrained(folder, dtype=dtype)(tokens).logits
    torch.testing.assert_close(got, want, rtol=0, atol={"float32": 1e-6, "bfloat16": 3e-2}[dtype])


def test_a_wrong_merge_is_refused_and_nothing_is_saved(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect: the adapter counts for 0.9 of itself in the merged weights."""

    def merge_less(self: Any, **options: Any) -> Any:
        for part in self.modules():
            if hasattr(part, "lora_A"):
                part.scaling = {name: 0.9 * scale for name, scale in part.scaling.items()}
        return self.base_model.merge_and_unload(**options)

    monkeypatch.setattr(PeftModel, "merge_and_unload", merge_less, raising=False)
    with pytest.raises(SystemExit, match="differ from the adapter's by more than rounding"):
        merged(run)
    assert {path.name for path in run.parent.iterdir()} == {"model", "run"}


def test_what_is_no_run_of_the_recipe_is_refused_with_what_to_do(tmp_path: Path) -> None:
    adapter, empty = tmp_path / "adapter", tmp_path / "empty"
    adapter.mkdir()
    empty.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    advice = {
        adapter: f'AutoPeftModelForCausalLM.from_pretrained("{adapter}"',
        empty: "which train.py writes",
        tmp_path / "none": "there is no such folder",
    }
    for folder, text in advice.items():
        with pytest.raises(SystemExit, match=re.escape(text)):
            merge.settings_of(folder)


def test_a_full_fine_tuning_has_nothing_to_merge(run: Path) -> None:
    saved = json.loads((run / "recipe.json").read_text())
    saved["settings"]["lora"] = None
    (run / "recipe.json").write_text(json.dumps(saved))
    with pytest.raises(SystemExit, match="there is nothing to merge"):
        merged(run)
