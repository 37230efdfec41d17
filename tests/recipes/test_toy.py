"""The tiny model that recipes/toy.py writes for those who try the guides without the Hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.patience import patient
from tests.helpers.programs import REPOSITORY


def toy(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "recipes/toy.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=False)


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_tiny_model_is_written_with_its_tokenizer(kind: str, tmp_path: Path) -> None:
    done = toy(str(tmp_path / "tiny"), *([] if kind == "llama" else [kind]))
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", attn_implementation="ring_fp32")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "tiny")("héllo", return_tensors="pt")
    assert model.config.model_type == kind and tokens.input_ids.shape == (1, 6)
    assert model(**tokens, labels=tokens.input_ids).loss.isfinite()


@pytest.mark.turns
@pytest.mark.parametrize("arguments", [(), ("--help",)], ids=str)
def test_without_a_folder_it_says_how_it_is_called(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = toy(*arguments)
    assert done.returncode == 1 and done.stderr == "usage: python recipes/toy.py FOLDER [MODEL_TYPE]\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.turns
def test_an_unknown_kind_of_model_is_named(tmp_path: Path) -> None:
    done = toy(str(tmp_path / "tiny"), "qwen9")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "MODEL_TYPE qwen9 is no causal language model of transformers." in done.stderr
    assert not (tmp_path / "tiny").exists()
