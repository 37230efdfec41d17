"""Every recipe, run as its run.sh does at toy size: a ring of two has the losses of one process without a ring."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from hf_ring_attn.integration.hosts.parallelism_config import turn_into_ring
from tests.helpers.programs import CPU_2RANKS, Program, launched_by, older_names, start
from tests.recipes.programs_of_recipes import NAMES, RECIPES
from tests.recipes.programs_of_recipes import program as module_of

LOSS = 1e-5
"""Relative bound: the order of float32 sums differs."""
COMPILED = 1e-4
"""Relative bound: compiled layers may fuse sums."""
NORM = {"qlora-32b": 2e-2, "qlora-70b": 2e-2}
"""Bounds of gradient norms; QLoRA's are of gradients in bf16."""


def run(folder: Path, name: str, *more: str, ranks: int = 1) -> Program:
    folder.mkdir(exist_ok=True)
    environment = launched_by(CPU_2RANKS) if ranks > 1 else {}
    config = str(RECIPES / name / "config.yaml")
    return start(folder, RECIPES / "train.py", config, "--toy", "toy", *more, ranks=ranks, environment=environment)


def steps(folder: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((folder / "toy/output/recipe.json").read_text())["steps"]
    return found


@pytest.mark.slow
@pytest.mark.turns
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.qlora) if name.startswith("qlora") else name for name in NAMES]
)
def test_a_recipe_in_a_ring_of_two_trains_as_one_process(name: str, tmp_path: Path) -> None:
    ring = run(tmp_path / "ring", name, ranks=2)
    alone = run(tmp_path / "alone", name, "--set", "attention=sdpa", "--set", "ring={}")
    text = ring.output()
    alone.output()
    got, want = steps(tmp_path / "ring"), steps(tmp_path / "alone")
    assert "ring of 2" in text and "step 3 of 3: loss" in text
    assert not older_names(text), text
    assert len(want) == 3 and want[2]["loss"] != pytest.approx(want[0]["loss"], rel=1e-3)
    assert [step["loss"] for step in got] == pytest.approx([step["loss"] for step in want], rel=LOSS), text
    norms = [step["grad_norm"] for step in want]
    assert [step["grad_norm"] for step in got] == pytest.approx(norms, rel=NORM.get(name, 1e-4)), text
    saved = {path.name for path in (tmp_path / "ring/toy/output").iterdir()}
    assert saved & {"adapter_model.safetensors", "model.safetensors"} and "checkpoint-2" in saved


@pytest.mark.slow
@pytest.mark.turns
@pytest.mark.parametrize("name", ["lora-128k", "packed-chat", "vlm"])
def test_compiled_layers_train_alike(name: str, tmp_path: Path) -> None:
    compiled = run(tmp_path / "compiled", name, "--set", "compile=layers", ranks=2)
    plain = run(tmp_path / "plain", name, ranks=2)
    text = compiled.output()
    assert re.search(r"^[1-9]\d* layers are compiled$", text, re.MULTILINE), text
    assert "compiled" not in plain.output()
    for key in ("loss", "grad_norm"):
        want = [step[key] for step in steps(tmp_path / "plain")]
        assert [step[key] for step in steps(tmp_path / "compiled")] == pytest.approx(want, rel=COMPILED), text


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_saved_goes_on_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    """In a ring, from the checkpoints of one process."""
    run(tmp_path, "packed-chat").output()
    want = steps(tmp_path)
    output = tmp_path / "toy/output"
    (output / "checkpoint-3/trainer_state.json").unlink()  # it is written last
    (output / "recipe.json").unlink()
    text = run(tmp_path, "packed-chat", "--resume", ranks=2).output()
    assert "checkpoint-3 is incomplete" in text and not older_names(text), text
    assert [step["step"] for step in steps(tmp_path)] == [1, 2, 3], "those of the first session, too"
    assert steps(tmp_path)[:2] == want[:2]
    assert steps(tmp_path)[2]["loss"] == pytest.approx(want[2]["loss"], rel=LOSS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_killed_in_its_first_checkpoint_starts_again(ranks: int, tmp_path: Path) -> None:
    """Schedulers always pass --resume to a run that they start again."""
    run(tmp_path, "packed-chat").output()
    want, output = steps(tmp_path), tmp_path / "toy/output"
    for name in ("checkpoint-2", "checkpoint-3"):
        (output / name / "trainer_state.json").unlink()
    (output / "recipe.json").unlink()
    text = run(tmp_path, "packed-chat", "--resume", ranks=ranks).output()
    assert re.findall(r"^.*checkpoint-2 is incomplete.* starts from its first step$", text, re.MULTILINE), text
    assert text.count("is incomplete") == 1, "one rank prints it"
    got = steps(tmp_path)
    assert [step["step"] for step in got] == [1, 2, 3], text
    assert [step["loss"] for step in got] == pytest.approx([step["loss"] for step in want], rel=LOSS)


def test_machines_with_other_checkpoints_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, here = module_of("train"), tmp_path / "checkpoint-2"
    here.mkdir()
    (here / "trainer_state.json").write_text("{}")
    assert train.checkpoint_in(tmp_path) == here and train.checkpoint_in(tmp_path / "none") is None
    monkeypatch.setattr(train, "gather_object", lambda mine: [*mine, "none"])
    with pytest.raises(train.BadRecipe, match="rank 0: checkpoint-2, rank 1: none"):
        train.checkpoint_in(tmp_path)


@pytest.mark.slow
@pytest.mark.turns
def test_a_context_extension_learns_alike_at_ring_sizes_one_and_two(tmp_path: Path) -> None:
    """Also `evaluate`: losses by position and numbers found, over a ring."""
    started = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        environment = launched_by(CPU_2RANKS) if ranks > 1 else {}
        learn = RECIPES / "extend-context/learn.py"
        started.append(start(folder, learn, "--output", ".", ranks=ranks, environment=environment))
    found: list[dict[str, Any]] = []
    for ranks, program in enumerate(started, 1):
        text = program.output()
        found.append(json.loads((tmp_path / str(ranks) / "results.json").read_text()))
        assert "| positions | loss |" in text
    one, two = found
    assert list(one) == list(two) == ["base", "YaRN, not trained", "extended"]
    for name in one:
        for measure in ("loss", "needles"):
            losses = [row["loss"] for row in one[name][measure]]
            assert [row["loss"] for row in two[name][measure]] == pytest.approx(losses, rel=1e-3), (name, measure)
    far = {name: one[name]["loss"][-1] for name in one}
    assert far["base"]["from"] == 128, "twice the base's 64 tokens"
    assert far["extended"]["loss"] < far["YaRN, not trained"]["loss"] - 0.05
    again = tmp_path / "again"
    again.mkdir()
    start(again, learn, "--from", "../2", "--output", ".").output()
    found_again = json.loads((again / "results.json").read_text())
    assert list(found_again) == ["extended"]
    losses = [row["loss"] for row in two["extended"]["loss"]]
    assert [row["loss"] for row in found_again["extended"]["loss"]] == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_its_files(name: str) -> None:
    folder = RECIPES / name
    assert subprocess.run(["bash", "-n", folder / "run.sh"], capture_output=True, text=True).stderr == ""
    script, readme = (folder / "run.sh").read_text(), (folder / "README.md").read_text()
    assert name in script and f"recipes/{name}/run.sh" in readme
    assert any(config.stem in script for config in (RECIPES / "accelerate").glob("gpu_*.yaml")) or name == "multi-node"
    assert f"[{name}]({name})" in (RECIPES / "README.md").read_text()


@pytest.mark.parametrize("script", ["launch.sh", "multi-node/slurm.sbatch"])
def test_a_script_has_no_syntax_error(script: str) -> None:
    assert subprocess.run(["bash", "-n", RECIPES / script], capture_output=True, text=True).stderr == ""
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", RECIPES / script], check=True)


def launched(tmp_path: Path, *arguments: str, recipes: Path = RECIPES, **told: str) -> subprocess.CompletedProcess[str]:
    """launch.sh on a machine without GPUs, where `accelerate` prints its arguments."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "accelerate").write_text('#!/bin/sh\necho "$@"\n')
    for program in ("nvidia-smi", "accelerate"):
        (tmp_path / program).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("GPUS", "TEXTS")}
    environment |= {**told, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(recipes / "launch.sh"), "lora-128k", "gpu_8_ddp", "--length", "8", "--", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("told", "is_"), [({}, "not set"), ({"GPUS": "two"}, "two"), ({"GPUS": "0"}, "0")], ids=str)
def test_without_a_number_of_gpus_it_says_what_to_set(told: dict[str, str], is_: str, tmp_path: Path) -> None:
    done = launched(tmp_path, "--resume", recipes=RECIPES, **told)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"GPUS is {is_}, and nvidia-smi lists no GPU. Set GPUS to the number of GPUs, or try --toy on a CPU.\n"
    )


def test_a_toy_is_a_toy_wherever_it_is_asked_for(tmp_path: Path) -> None:
    done = launched(tmp_path, "--set", "training.max_steps=3", "--toy")
    assert done.returncode == 0 and "cpu_2ranks.yaml" in done.stdout, done.stderr


def test_texts_that_are_not_read_are_told(tmp_path: Path) -> None:
    done = launched(tmp_path, "--toy", TEXTS="books/")
    assert done.returncode == 0 and done.stderr == "--toy trains on texts of its own: TEXTS is not read.\n"
    for folder in ("recipes", "data"):
        (tmp_path / folder).mkdir()
    shutil.copy(RECIPES / "launch.sh", tmp_path / "recipes")
    (tmp_path / "data/lora-128k.parquet").touch()
    done = launched(tmp_path, recipes=tmp_path / "recipes", GPUS="2", TEXTS="books/")
    assert done.returncode == 0
    assert done.stderr == "data/lora-128k.parquet exists: TEXTS is not read again. Remove it for other texts.\n"


def test_several_machines_are_replicas_of_rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of multi-node's run.sh on the second of three machines, as accelerate reads it."""
    for program in ("python", "accelerate"):  # python would prepare the data
        (tmp_path / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$TOLD"\n')
        (tmp_path / program).chmod(0o755)
    told = {"NODES": "3", "NODE_RANK": "1", "HEAD": "192.0.2.7", "GPUS": "4", "TOLD": str(tmp_path / "told")}
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = str(RECIPES / "multi-node/run.sh")
    subprocess.run(["bash", script, "--resume"], env={**os.environ, **told, "PATH": path}, check=True)
    flags = (tmp_path / "told").read_text().split("\n")[1:-1]
    assert flags[-3:] == ["recipes/train.py", "recipes/multi-node/config.yaml", "--resume"]
    monkeypatch.chdir(RECIPES.parent)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(flags))
    assert (args.main_process_ip, args.machine_rank, args.num_machines) == ("192.0.2.7", 1, 3)
    assert (args.rdzv_backend, args.mixed_precision) == ("c10d", "bf16")
    for key, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(key, value)
    parallel = ParallelismConfig()
    assert turn_into_ring(parallel)
    assert parallel._get_mesh() == (("dp_replicate", "cp"), (3, 4))


@pytest.mark.parametrize("config", ["gpu_8_fsdp2", "gpu_8_ddp"])
def test_launch_sh_makes_one_ring_of_all_gpus(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("python", "accelerate"):
        (tmp_path / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$TOLD-$(basename "$0")"\n')
        (tmp_path / program).chmod(0o755)
    told = {
        "GPUS": "2",
        "TOLD": str(tmp_path / "told"),
        "TEXTS": "a.txt b.txt",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    command = [
        "bash",
        RECIPES / "launch.sh",
        "lora-128k",
        config,
        "--length",
        "8",
        "--",
        "--set",
        "training.max_steps=3",
    ]
    subprocess.run([str(word) for word in command], env={**os.environ, **told}, check=True)
    prepared = (tmp_path / "told-python").read_text().split()
    assert prepared == ["recipes/prepare.py", "a.txt", "b.txt", "--length", "8", "--output", "data/lora-128k.parquet"]
    flags = (tmp_path / "told-accelerate").read_text().split("\n")[1:-1]
    assert flags[-4:] == ["recipes/train.py", "recipes/lora-128k/config.yaml", "--set", "training.max_steps=3"]
    monkeypatch.chdir(RECIPES.parent)
    parsed = launch_command_parser().parse_args(["--main_process_port", "0", *flags])
    args, _, _ = _validate_launch_command(parsed)
    for key, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(key, value)
    assert (ParallelismConfig().cp_size, args.num_processes) == (2, 2)
