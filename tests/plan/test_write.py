"""``plan --write``: whose files it leaves alone, what it says, and the program that it writes."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from hf_ring_attn import cli
from hf_ring_attn.plan.program import program
from hf_ring_attn.plan.setup import METHODS, Setup
from tests.plan.shapes import LLAMA_8B

FITS, TOO_LONG = ["--gpus", "2", "--tokens", "8K"], ["--gpus", "2", "--tokens", "512M"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 2}))
    return path


def test_what_was_written_and_what_to_replace_is_said(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    folder = config.parent / "new/run"
    assert cli.main(["plan", "--model", str(config), *FITS, "--write", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"written: {folder / 'ring.yaml'}, {folder / 'train.py'}\nreplace DATA and MODEL in train.py" in said
    assert "--write FOLDER writes" not in said and {x.name for x in folder.iterdir()} == {"ring.yaml", "train.py"}
    assert cli.main(["plan", "--model", str(config), *FITS, "--write", str(folder)]) == 0, "the same once more"


@pytest.mark.parametrize("name", ["ring.yaml", "train.py"])
def test_a_file_with_other_content_is_overwritten_only_if_asked(
    capsys: pytest.CaptureFixture[str], config: Path, name: str
) -> None:
    line = ["plan", "--model", str(config), *FITS, "--write", str(config.parent)]
    (config.parent / name).write_text("mine")
    assert cli.main(line) == 2
    said = capsys.readouterr()
    assert said.out == "" and f"has {name} with other content, so nothing was written" in said.err
    assert {x.name: x.read_text() for x in config.parent.iterdir() if x != config} == {name: "mine"}
    assert cli.main([*line, "--overwrite"]) == 0 and (config.parent / name).read_text() != "mine"


@pytest.mark.parametrize(("place", "why"), [("config.json", "it is a file"), ("config.json/run", "Not a directory")])
def test_a_folder_that_cannot_be_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], config: Path, place: str, why: str
) -> None:
    folder = config.parent / place
    assert cli.main(["plan", "--model", str(config), *FITS, "--write", str(folder)]) == 2
    assert f"plan cannot write to {folder} ({why})" in capsys.readouterr().err


def test_what_does_not_fit_is_neither_started_nor_written(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    folder = config.parent / "run"
    assert cli.main(["plan", "--model", str(config), *TOO_LONG, "--write", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "does not fit" in said and "nothing was written" in said and "start it" not in said
    assert not folder.exists()
    assert cli.main(["plan", "--model", str(config), *TOO_LONG]) == 1
    assert "start it" not in capsys.readouterr().out


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModelForImageTextToText"])
@pytest.mark.parametrize("method", METHODS)
def test_the_program_uses_all_that_it_imports(method: str, auto: str) -> None:
    text = program(Setup(gpus=1, tokens=256, method=method), "some/model", auto)
    imports = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name for x in imports for alias in x.names}
    used = {x.id for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Name)}
    assert names <= used and {auto, "SFTTrainer", "set_seed"} <= names
    assert f"learning_rate={0.00001 if method == 'full' else 0.0001:g}" in text and "trainer.save_model()" in text
    assert f"packing={auto == 'AutoModelForCausalLM'}," in text, "TRL packs no images"


def test_the_program_loads_the_folder_of_a_config_file_that_has_weights(config: Path) -> None:
    setup = Setup(gpus=1, tokens=256)
    assert 'MODEL = "MODEL"  # replace it: the plan was made from config.json' in program(setup, str(config))
    (config.parent / "model.safetensors").touch()
    in_full = json.dumps(str(config.parent.resolve()))
    assert f"MODEL = {in_full}  # the folder" in program(setup, str(config))
    assert f"MODEL = {in_full}\n" in program(setup, str(config.parent))
    assert 'MODEL = "some/model"\n' in program(setup, "some/model")
