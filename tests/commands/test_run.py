"""python -m hf_ring_attn.run: a program sees what python would show it, and launchers pass the plugin on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import hf_ring_attn
from hf_ring_attn import run
from hf_ring_attn.integration import log
from hf_ring_attn.integration.hosts.launchers import RUN
from tests.helpers.models.tiny_models import tiny

TELL = """
import json, sys
from transformers import AttentionInterface
print(json.dumps({
    "argv": sys.argv, "folder": sys.path[0], "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(),
    "plugin": "ring_fp32" in AttentionInterface._global_mapping,
}))
"""
LOADS = """
import json
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
models = [
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)), LlamaForCausalLM(LlamaConfig(**sizes)),
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes), attn_implementation="eager"),
]
models[0].save_pretrained("saved")
for given in ({}, {"attn_implementation": None}, {"attn_implementation": "sdpa"}):
    models.append(AutoModelForCausalLM.from_pretrained("saved", **given))
models[-2].set_attn_implementation("eager")
print(json.dumps([model.config._attn_implementation for model in models]))
"""
COMMAND = """
import json, sys
def main():
    print(json.dumps({"argv": sys.argv, "folder": sys.path[0]}))
    return 7
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with programs of every form, as ``python -m`` finds it."""
    files = {
        "train.py": TELL,
        "loads.py": LOADS,
        "folder/__main__.py": TELL,
        "package/__init__.py": "",
        "package/train.py": TELL,
        "package/lacks.py": "import no_such_dependency",
        "runnable/__init__.py": "",
        "runnable/__main__.py": TELL,
        "broken/__init__.py": "import no_such_dependency",
        "broken/train.py": TELL,
        "fails.py": "raise ZeroDivisionError('mine')",
        "shout": "raise AssertionError('a command comes before a file without a suffix')",
        "site/shouting.py": COMMAND,
        "site/shouting-1.0.dist-info/METADATA": "Name: shouting\nVersion: 1.0\n",
        "site/shouting-1.0.dist-info/entry_points.txt": "[console_scripts]\nshout = shouting:main\n",
        "bin/shout": "#!/bin/sh\n",
        "no_suffix": TELL,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "bin/shout").chmod(0o755)
    modules = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site"), *sys.path])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("package", "runnable", "broken", "shouting"):
            del sys.modules[name]
    hf_ring_attn.uninstall()  # the launchers' patches too
    hf_ring_attn.install()


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return answer


PROGRAMS = {
    "a script": (["train.py", "--epochs", "3"], "train.py", ""),
    "a script elsewhere": (["package/train.py", "--epochs", "3"], "package/train.py", "package"),
    "a folder": (["./folder", "--epochs", "3"], "./folder", "folder"),
    "a script without a suffix": (["no_suffix", "--epochs", "3"], "no_suffix", ""),
    "a module": (["-m", "package.train", "--epochs", "3"], "{place}/package/train.py", ""),
    "a module without -m": (["package.train", "--epochs", "3"], "{place}/package/train.py", ""),
    "a package": (["-m", "runnable", "--epochs", "3"], "{place}/runnable/__main__.py", ""),
}


@pytest.mark.parametrize("form", PROGRAMS)
def test_a_program_sees_what_python_shows_it(place: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    arguments, called, folder = PROGRAMS[form]
    assert run.main(arguments) == 0
    seen = told(capsys)
    assert seen.pop("folder") in (folder and f"./{folder}", str(place / folder))
    assert seen == {
        "argv": [called.format(place=place), "--epochs", "3"], "name": "__main__", "main": True, "plugin": True,
    }  # fmt: skip


def test_a_console_command_runs_through_its_entry_point(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["shout", "-m", "x"])
    assert ended.value.code == 7
    assert told(capsys) == {"argv": [str(place / "bin/shout"), "-m", "x"], "folder": str(place / "bin")}


@pytest.mark.parametrize("option", [["--attention", "ring_fp32"], ["--attention=ring_fp32"]], ids=" ".join)
@pytest.mark.usefixtures("place")
def test_models_of_a_program_without_an_option_get_the_attention(
    option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The attention that a program names itself stays, and a line says so."""
    monkeypatch.setattr(log, "_said", set())
    assert run.main([*option, "loads.py"]) == 0
    ours = "ring_fp32"
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == [ours, ours, "eager", ours, "eager", "sdpa"]
    for name in ("eager", "sdpa"):
        assert f'--attention ring_fp32: LlamaForCausalLM keeps attn_implementation="{name}"' in caplog.text
    hf_ring_attn.uninstall()
    hf_ring_attn.install()
    assert tiny("llama", None).config._attn_implementation == "sdpa"


def test_a_models_config_may_name_the_attention(tmp_path: Path) -> None:
    """For programs without an option, started with the plugin: config.json is read by every loader."""
    tiny("llama", "eager").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attn_implementation": "ring_fp32"}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config._attn_implementation == "ring_fp32"
    again = tmp_path / "again"
    model.save_pretrained(again)
    assert "ring_fp32" not in (again / "config.json").read_text(), "what is saved loads without the plugin"


ERRORS = {
    (): "no program is named. Give a script, a module or a console command",
    ("-m",): "no program is named",
    ("--attention", "ring_fp32"): "no program is named",
    ("--attention",): "--attention got '', and only ring_fp32 is possible. Name it before the program",
    ("--attention", "sdpa", "train.py"): "--attention got 'sdpa', and only ring_fp32 is possible",
    ("--attention=train.py",): "--attention got 'train.py', and only ring_fp32 is possible",
    ("trian.py",): "cannot run 'trian.py': there is no such file (looked in {place}). It must be a script (train.py)",
    ("sub/train",): "cannot run 'sub/train': there is no such file",
    ("whisper", "x"): "cannot run 'whisper': it is no file, no console command and no module that python finds",
    ("-m", "shout"): "cannot run 'shout': it is no file, no console command and no module",
    ("-m", "package.none.x"): "cannot run 'package.none.x'",
    ("-m", ".relative"): "cannot run '.relative'",
    ("-m", "package"): "cannot run 'package': the package has no __main__, so python cannot run it",
}


@pytest.mark.parametrize("arguments", ERRORS, ids=" ".join)
def test_what_cannot_be_run_is_told_in_words(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run.main(arguments) == 2
    assert capsys.readouterr().err.startswith("hf_ring_attn.run: " + ERRORS[arguments].format(place=place))


def test_help_shows_the_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    assert "python -m hf_ring_attn.run PROGRAM ARGUMENTS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["fails.py"], ZeroDivisionError("mine")),
        (["-m", "package.lacks"], ModuleNotFoundError("No module named 'no_such_dependency'")),
        (["-m", "broken.train"], ModuleNotFoundError("No module named 'no_such_dependency'")),
    ],
    ids=str,
)
@pytest.mark.usefixtures("place")
def test_a_programs_own_errors_are_its_own(arguments: list[str], error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        run.main(arguments)


# ---- launchers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def started(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that launchers would start; none is."""
    import accelerate.commands.launch as accelerate_launch
    import torch.distributed.run as torch_run

    commands: list[list[str]] = []

    class Process:
        returncode = 0

        def __init__(self, command: list[str], **_: Any) -> None:
            if command[0] == sys.executable:  # accelerate looks for GPUs too
                commands.append(command)

        def wait(self) -> None: ...

    def elastic_launch(config: Any, entrypoint: Any) -> Any:
        return lambda *arguments: commands.append([entrypoint, *arguments])

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(torch_run, "elastic_launch", elastic_launch)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(accelerate_launch, "default_config_file", str(place / "none.yaml"))
    return commands


LAUNCHES = {
    "accelerate": (["accelerate", "launch", "--cpu", "train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
    "accelerate, of a module": (["accelerate", "launch", "--cpu", "-m", "package.train"], ["-m", "package.train"]),
    "accelerate, of many": (
        ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "train.py", "-x"],
        ["train.py", "-x"],
    ),
    "accelerate, through us already": (["accelerate", "launch", "--cpu", "-m", RUN, "train.py"], ["train.py"]),
    "torchrun": (["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
    "with the attention": (
        ["--attention=ring_fp32", "torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"],
        ["--attention", "ring_fp32", "train.py", "--lr", "1"],
    ),
    "torchrun, of a module": (["torchrun", "-m", "package.train"], ["-m", "package.train"]),
}


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_a_launcher_starts_its_program_with_the_plugin(started: list[list[str]], launcher: str) -> None:
    arguments, program = LAUNCHES[launcher]
    with pytest.raises(SystemExit) as ended:
        run.main(arguments)
    assert not ended.value.code
    assert [[word for word in command if word != "-u"] for command in started] == [
        [sys.executable, "-m", RUN, *program]
    ]


def test_trl_starts_its_script_with_the_plugin(started: list[list[str]]) -> None:
    of_the_script = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o", "--use_cpu"]
    with pytest.raises(SystemExit) as ended:
        run.main(["trl", "sft", *of_the_script, "--cpu"])
    assert not ended.value.code
    ((python, flag, ours, script, *arguments),) = started
    assert [python, flag, ours] == [sys.executable, "-m", RUN]
    assert script.endswith("trl/scripts/sft.py")
    assert arguments == of_the_script


def test_a_rank_of_a_launcher_launches_nothing(
    started: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torchrun -m hf_ring_attn.run trl sft``: the ranks exist already."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        run.main(["accelerate", "launch", "train.py", "--lr", "1"])
    assert told(capsys)["argv"] == ["train.py", "--lr", "1"]
    assert run.main(["accelerate", "launch", "--num_processes", "2", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "this process is a rank of a launcher already, so train.py runs in it" in error
    assert "options for another launcher: num_processes. Give them to the outer launcher" in error
    assert started == []


def test_a_program_without_python_is_refused(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["accelerate", "launch", "--cpu", "--no_python", "shout"]) == 2
    assert "--no_python, so it would start shout without python" in capsys.readouterr().err
    assert started == []
