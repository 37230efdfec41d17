"""Programs that never import the plugin, started by their command lines on two ranks, give what one process gives."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hf_ring_attn.autoload import switch
from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.preference_jobs import Case, preferences, teacher
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import model, rows, tokenizer
from tests.helpers.jobs.trainer_jobs import launched
from tests.helpers.jobs.trl_runs import OFFLINE, quiet
from tests.helpers.jobs.trl_trainers import ranker
from tests.helpers.patience import patient

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = str(REPOSITORY / "recipes/accelerate/cpu_2ranks.yaml")
STEPS = 3
GLOO_AT_EXIT = "terminate called without an active exception"
"""A race of gloo's threads with the end of a process whose work is done, in one run of some thirty: run it again."""

STRANGER = """
import sys
import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

model, data, output, *attention = sys.argv[1:]
read = AutoTokenizer.from_pretrained(model)

def collate(rows):
    batch = read([row["text"] for row in rows], return_tensors="pt", padding=True, padding_side="right")
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

arguments = TrainingArguments(
    output, max_steps=3, per_device_train_batch_size=2, optim="sgd", learning_rate=0.1, logging_steps=1, save_steps=3,
    report_to="none", use_cpu=True, remove_unused_columns=False, disable_tqdm=True,
)
named = {"attn_implementation": attention[0]} if attention else {}
net = AutoModelForCausalLM.from_pretrained(model, **named)
trainer = Trainer(net, arguments, data_collator=collate, train_dataset=load_from_disk(data))
trainer.train()
trainer.end()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with their tokenizer, rows of text in the forms that programs read, and a stranger's script."""
    folder = tmp_path_factory.mktemp("files")
    nets = {"model": model("sdpa"), "judge": ranker("sdpa"), "teacher": teacher("sdpa", "LlamaForCausalLM")}
    for name, net in nets.items():
        net.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    data, case = rows("text", 24), Case("")
    data.save_to_disk(folder / "arrow")
    for name, form in {
        "jsonl": data,
        "prompts": data.map(lambda row: {"prompt": row["text"][:20]}, remove_columns="text"),
        "pairs": preferences(case, 24),
        "judged": preferences(replace(case, kto=True), 24),
        "compared": preferences(case, 24).remove_columns("prompt"),
    }.items():
        (folder / name).mkdir()
        form.to_json(folder / name / "train.jsonl")
    (folder / "stranger.py").write_text(STRANGER)
    return folder


SHARED = {
    "max_steps": STEPS, "save_steps": STEPS, "logging_steps": 1, "optim": "sgd", "dtype": "float32", "bf16": False,
    "use_cpu": True, "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
OF_TRL: dict[str, dict[str, Any]] = {
    "sft": {"dataset_name": "jsonl", "packing": True, "max_length": 64, "learning_rate": 0.1},
    "grpo": {
        "dataset_name": "prompts", "num_generations": 2, "max_completion_length": 12, "per_device_train_batch_size": 4,
        "learning_rate": 0.3, "beta": 0.1, "reward_funcs": "tests.helpers.jobs.trl_trainers.lengths",
        "gradient_accumulation_steps": 2,
    },
    "distillation": {
        "dataset_name": "prompts", "teacher_model_name_or_path": "teacher", "max_completion_length": 12,
        "learning_rate": 0.3, "gradient_accumulation_steps": 2,
    },
    "dpo": {"dataset_name": "pairs", "learning_rate": 0.1, "gradient_accumulation_steps": 2},
    "kto": {
        "dataset_name": "judged", "learning_rate": 0.5, "train_sampling_strategy": "sequential", "use_peft": True,
        "lora_target_modules": "all-linear", "ddp_find_unused_parameters": False,
    },
    "reward": {"dataset_name": "compared", "learning_rate": 0.01, "model_name_or_path": "judge"},
}  # fmt: skip
"""Options of TRL's commands. GRPO's and DPO's references come from the model's path, and GRPO's rewards from a module;
KTO's reference is the model without its adapter."""


def for_trl(command: str, files: Path, attention: str, output: Path) -> list[str]:
    flags = {"model_name_or_path": "model", "per_device_train_batch_size": 2, **SHARED, **OF_TRL[command]}
    named = ("model_name_or_path", "dataset_name", "teacher_model_name_or_path")
    places = {name: files / flags[name] for name in named if name in flags}
    flags |= {**places, "attn_implementation": attention, "output_dir": output}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def without_the_plugin(program: str, arguments: Sequence[str], cache: str) -> None:
    """Runs a script or a module in this process, as python would."""
    command = mock.patch.object(sys, "argv", [program, *arguments])
    with launched(Mesh(), **OFFLINE), quiet(), command, mock.patch("datasets.config.HF_DATASETS_CACHE", Path(cache)):
        (runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")


def alone(ranks: Ranks, program: str, arguments: Sequence[str], place: Path) -> None:
    ranks(1).run(without_the_plugin, program, arguments, str(place / "cache"))
    ranks(1).close()  # the program has destroyed the process group, as it should at its end


def shell(command: Sequence[str], place: Path, **variables: str) -> None:
    """Runs a command of this environment in a shell's way; its output is what a failure shows."""
    bins = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HOME": str(place), "HF_DATASETS_OFFLINE": "1"}
    environment = {**os.environ, **OFFLINE, **settings, "PATH": bins, "PYTHONPATH": paths, **variables}
    for _ in range(2):
        ran = subprocess.run(
            command, env=environment, cwd=place, capture_output=True, text=True, timeout=patient(110), check=False
        )
        if ran.returncode == 0 or GLOO_AT_EXIT not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ring of 2" in ran.stderr, "no ring was active"


def logged(output: Path) -> list[tuple[float, float]]:
    state = json.loads((output / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    return [(entry["loss"], entry["grad_norm"]) for entry in state["log_history"] if "loss" in entry]


def assert_same(got: Path, want: Path) -> None:
    assert len(logged(want)) == STEPS
    for mine, theirs in zip(logged(got), logged(want), strict=True):
        assert mine == pytest.approx(theirs, rel=LOSS, abs=1e-7)  # the sum of advantages is 0


@pytest.mark.slow
@pytest.mark.turns
@pytest.mark.parametrize("name", OF_TRL)
def test_trl_by_its_own_command(ranks: Ranks, files: Path, tmp_path: Path, name: str) -> None:
    """TRL's command launches its script anew with accelerate: the plugin has to come along."""
    command = [sys.executable, "-m", "hf_ring_attn.run", "trl", name, "--accelerate_config", RECIPE]
    command += ["--main_process_port", "0", *for_trl(name, files, "ring_fp32", tmp_path / "ring")]
    shell(command, tmp_path)
    alone(ranks, f"trl.scripts.{name}", for_trl(name, files, "sdpa", tmp_path / "alone"), tmp_path)
    assert_same(tmp_path / "ring", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.turns
@pytest.mark.parametrize("named", ["by the program", "--attention", "config.json", "autoload"])
def test_a_strangers_script_under_torchrun(ranks: Ranks, files: Path, tmp_path: Path, named: str) -> None:
    """It never imports the plugin; three of the ways are for scripts without an option for the attention."""
    script, read = str(files / "stranger.py"), [str(files / "model"), str(files / "arrow")]
    ring = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}
    command, attention = ["-m", "hf_ring_attn.run"], []
    if named == "--attention":
        command += ["--attention", "ring_fp32"]
    elif named == "config.json":
        read = [str(shutil.copytree(files / "model", tmp_path / "model")), read[1]]
        config = tmp_path / "model/config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "attn_implementation": "ring_fp32"}))
    else:
        attention = ["ring_fp32"]
    if named == "autoload":
        command = []
        ring["PYTHONPATH"] = os.pathsep.join([str(site_with_autoload(tmp_path)), str(REPOSITORY)])
    launch = ["torchrun", "--standalone", "--nproc-per-node", "2", *command]
    shell([*launch, script, *read, str(tmp_path / "ring"), *attention], tmp_path, **ring)
    alone(ranks, script, [str(files / "model"), read[1], str(tmp_path / "alone"), "sdpa"], tmp_path)
    assert_same(tmp_path / "ring", tmp_path / "alone")


def site_with_autoload(place: Path) -> Path:
    """A folder of installed packages in which `hf-ring-attn autoload` is enabled."""
    info = place / "site/hf_ring_attn-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: hf-ring-attn\nVersion: 9\n")
    (info / "RECORD").write_text("hf_ring_attn-9.dist-info/RECORD,,\n")
    switch.enable(switch.find(PathDistribution(info)))
    return info.parent
