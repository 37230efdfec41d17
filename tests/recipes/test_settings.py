"""Settings of recipes: every wrong key is refused by its name, and so are keys that contradict each other."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from tests.recipes.programs_of_recipes import NAMES, RECIPES, program

settings = program("settings")
GOOD: dict[str, Any] = {"model": "a", "data": {"train": "a.parquet"}, "training": {"max_length": 8}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"modle": "a"}, "modle: there is no such key; the nearest is model"),
    ({"training.max_lenght": 8}, "training.max_lenght: there is no such key; the nearest is training.max_length"),
    ({"lora": {"rank": 8}}, "lora.rank: there is no such key"),
    ({"ring.save_atention": True}, "ring.save_atention: there is no such key; the nearest is ring.save_attention"),
    ({"data.test": "b"}, "data.test: there is no such key"),
    ({"lora": {}, "quantization": {"load_in_4bits": True}}, "the nearest is quantization.load_in_4bit"),
    ({"model": None}, "model: it is missing"),
    ({"data": {}}, "data.train: it is missing"),
    ({"training": {}}, "training.max_length: the number of tokens in a row is missing"),
    ({"training": 3}, "training: 3 is no table"),
    ({"dtype": "bf16"}, "dtype: 'bf16' is none of bfloat16"),
    ({"compile": True}, "compile: True is none of layers, null"),
    ({"compile": ["layers"]}, "compile: ['layers'] is none of layers, null"),
    ({"compile": "layers", "training.torch_compile": True}, "compile, with training.torch_compile: one of them"),
    ({"compile": "layers", "ring.offload_above": 0}, "compile, with ring.offload_above"),
    ({"training.packing": True}, "training.packing: leave it out; prepare.py packs"),
    ({"training.fsdp": "full_shard"}, "training.fsdp: leave it out; the launch config"),
    ({"training.model_init_kwargs": {}}, "training.model_init_kwargs: leave it out"),
    ({"quantization": {"load_in_4bit": True}}, "quantization, without lora"),
    ({"attention": "sdpa", "ring.pad": True}, "ring.pad, with attention sdpa"),
    ({"ring.save_attention": True, "training.gradient_checkpointing": False}, "ring.save_attention, with training.g"),
    ({"ring.save_attention": True, "training.activation_checkpointing": False}, "with training.activation_checkp"),
    (
        {"ring.save_attention": True, "training.gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "ring.save_attention, with training.gradient_checkpointing_kwargs.use_reentrant",
    ),
    (
        {"training.gradient_checkpointing": True, "training.activation_checkpointing": True},
        "training.activation_checkpointing, with training.gradient_checkpointing: two names",
    ),
    ({"training.bf16": True, "training.fp16": True, "dtype": "float32"}, "training.bf16, with training.fp16"),
    ({"training.fp16": True}, "training.fp16, with dtype bfloat16"),
    ({"training.num_train_epochs": 1, "training.max_steps": 3}, "only max_steps would count"),
    ({"training.eval_strategy": "steps"}, "training.eval_strategy, without data.eval"),
    ({"data.eval": "b.parquet"}, "data.eval, without training.eval_strategy"),
]

MISTYPED: list[tuple[dict[str, Any], str]] = [
    ({"training.max_steps": "abc"}, "training.max_steps: 'abc', and it must be a whole number"),
    ({"training.max_steps": 2.5}, "training.max_steps: 2.5, and it must be a whole number"),
    ({"training.max_steps": True}, "training.max_steps: True, and it must be a whole number"),
    ({"training.max_steps": 0}, "training.max_steps: 0, and it must be at least 1, or -1 to count epochs"),
    ({"training.max_length": 0}, "training.max_length: 0, and it must be at least 1"),
    ({"training.max_length": "8"}, "training.max_length: '8', and it must be a whole number or null"),
    ({"training.learning_rate": "fast"}, "training.learning_rate: 'fast', and it must be a number"),
    ({"training.learning_rate": float("nan")}, "training.learning_rate: nan, and it must be a number"),
    ({"training.save_strategy": "sometimes"}, "'sometimes', and it must be one of no, steps, epoch, best"),
    ({"training.optim": "adamx"}, "training.optim: 'adamx', and it must be one of adamw_torch, "),
    ({"training.bf16": "yes"}, "training.bf16: 'yes', and it must be true or false or null"),
    ({"training.activation_checkpointing": 3}, "training.activation_checkpointing: 3, and it must be true or false"),
    ({"ring.mlp_tokens": -1}, "ring.mlp_tokens=-1 is not possible: it must be a positive number of tokens"),
    ({"ring.offload_above": "all"}, "ring.offload_above: 'all', and it must be a number or null"),
    ({"ring.loss": "whole"}, "ring.loss: 'whole', and it must be one of auto, chunked, sharded, gathered"),
    ({"lora.r": 0}, "lora.r: 0, and it must be at least 1"),
    ({"lora.bias": "some"}, "lora.bias: 'some', and it must be one of none, all, lora_only"),
    ({"lora.target_modules": 3}, "lora.target_modules: 3, and it must be a list or text or null"),
    ({"lora.task_type": "TALK"}, "lora.task_type: 'TALK', and it must be one of"),
    ({"lora.layers_pattern": "layers"}, "lora: When `layers_pattern` is specified, `layers_to_transform` must"),
    ({"lora": {}, "quantization": {"load_in_4bit": "yes"}}, "quantization.load_in_4bit: 'yes', and it must be true"),
    ({"revision": 1234}, "revision: 1234, and it must be text or null"),
    ({"data.train": ["a"]}, "data.train: ['a'], and it must be text"),
]
RIGHT: list[dict[str, Any]] = [
    {"training.max_steps": -1, "training.num_train_epochs": 2},
    {"training.learning_rate": 1, "training.lr_scheduler_type": "cosine", "training.optim": "paged_adamw_8bit"},
    {"lora": {"target_modules": "all-linear", "init_lora_weights": "pissa_niter_16", "task_type": None}},
    {"lora": {"target_modules": ["q_proj"], "init_lora_weights": False}, "revision": "main"},
    {"ring.mlp_tokens": 16, "ring.offload_above": 0, "ring.heads_per_gather": None},
]


def put(changes: dict[str, Any]) -> dict[str, Any]:
    """Good settings with changes; dots stand between levels."""
    made = {key: dict(value) if isinstance(value, dict) else value for key, value in GOOD.items()}
    for name, value in changes.items():
        section, _, key = name.partition(".")
        if key:
            made.setdefault(section, {})[key] = value
        else:
            made[section] = value
    return made


@pytest.mark.parametrize(("changes", "told"), WRONG, ids=[told[:40] for _, told in WRONG])
def test_a_wrong_key_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(settings.BadRecipe) as raised:
        settings.checked(put(changes))
    assert told in str(raised.value)
    assert len(str(raised.value).split("\n")) == 2, "one fault, and what is at fault"


@pytest.mark.parametrize(("changes", "told"), MISTYPED, ids=[told[:40] for _, told in MISTYPED])
def test_a_wrong_value_is_refused_by_its_key(changes: dict[str, Any], told: str) -> None:
    test_a_wrong_key_is_refused_by_name(changes, told)


@pytest.mark.parametrize("changes", RIGHT, ids=str)
def test_values_of_every_type_that_an_argument_has_are_taken(changes: dict[str, Any]) -> None:
    made, given = settings.checked(put(changes)), put(changes)
    assert {section: made[section] for section in given} == given


def test_no_without_quotes_is_a_strategy_and_no_flag() -> None:
    made = settings.checked(put({"training.save_strategy": False, "training.bf16": False}))["training"]
    assert (made["save_strategy"], made["bf16"]) == ("no", False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("model.foo=1", "--set model.foo=1: model is 'a', no table"),
        ("training.max_length.a.b=1", "--set training.max_length.a.b=1: max_length is 8, no table"),
        ("training.max_steps=[", "--set training.max_steps=[: while parsing"),
        ("training.max_steps", "--set training.max_steps: write KEY=VALUE"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(change: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(GOOD))
    with pytest.raises(settings.BadRecipe) as raised:
        settings.read(path, [change])
    assert told in str(raised.value)


@pytest.mark.parametrize("toy", [[], ["--toy", "toy"]], ids=["whole", "toy"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("training.max_steps=abc", "training.max_steps: 'abc', and it must be a whole number"),
        ("training.warmup_steps=-3", "warmup_steps"),  # in transformers' own words, which differ by version
    ],
)
def test_train_refuses_a_wrong_value_before_it_makes_anything(
    change: str, told: str, toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(RECIPES / "lora-128k/config.yaml")
    monkeypatch.setattr("sys.argv", ["train.py", config, *toy, "--set", change])
    with pytest.raises(SystemExit) as raised:
        program("train").main()
    assert told in str(raised.value) and list(tmp_path.iterdir()) == []


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(put({"modle": 1, "lora": {"rank": 8}, "training.packing": True})))
    with pytest.raises(settings.BadRecipe) as raised:
        settings.read(path)
    assert [line.split(":")[0].strip() for line in str(raised.value).split("\n")[1:]] == [
        "modle", "lora.rank", "training.packing",
    ]  # fmt: skip
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("text", ["model: a\nmodel: b\n", "model: [", "3\n"])
def test_a_file_that_is_no_table_of_single_keys_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(settings.BadRecipe, match=r"model stands twice|while parsing|no table"):
        settings.read(path)


def test_numbers_are_numbers_and_set_changes_them(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({**GOOD, "lora": {"r": 8}}))
    made = settings.read(path, ["training.learning_rate=1e-4", "lora.r=4", "ring.mlp_tokens=16", "dtype=float32"])
    assert made["training"] == {"max_length": 8, "learning_rate": 1e-4}
    assert (made["lora"], made["ring"], made["dtype"]) == ({"r": 4}, {"mlp_tokens": 16}, "float32")
    with pytest.raises(settings.BadRecipe, match=r"training\.max_step: there is no such key"):
        settings.read(path, ["training.max_step=3"])


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_can_be_read(name: str) -> None:
    read = settings.read(RECIPES / name / "config.yaml")
    assert read["data"]["train"] == f"data/{name}.parquet", "what launch.sh makes"
    assert f"--length {read['training']['max_length']}" in (RECIPES / name / "run.sh").read_text()
    assert re.search(f"--(tokenizer|processor) {re.escape(read['model'])} ", (RECIPES / name / "run.sh").read_text())


NEW, OLD = "activation_checkpointing", "gradient_checkpointing"


@pytest.mark.parametrize("written", [NEW, OLD])
@pytest.mark.parametrize("known", [NEW, OLD])
def test_checkpointing_has_the_name_that_transformers_knows(
    written: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "CHECKPOINTING", known)
    how = {"use_reentrant": False}
    training = {"max_length": 8, written: True, f"{written}_kwargs": how}
    made = settings.checked({**GOOD, "training": training})["training"]
    assert made == {"max_length": 8, known: True, f"{known}_kwargs": how}


def test_the_name_is_the_newest_one_that_transformers_has() -> None:
    assert (NEW if hasattr(TrainingArguments, NEW) else OLD) == settings.CHECKPOINTING


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_gives_no_warning_of_an_older_name(name: str, tmp_path: Path) -> None:
    read = settings.read(RECIPES / name / "config.yaml", [f"training.output_dir={tmp_path}"])
    read["training"].pop("optim", None)  # paged_adamw_8bit needs bitsandbytes
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        made = program("train").arguments(read, ["input_ids"], None)
    assert getattr(made, settings.CHECKPOINTING) is True
    assert getattr(made, f"{settings.CHECKPOINTING}_kwargs") == {"use_reentrant": False}
