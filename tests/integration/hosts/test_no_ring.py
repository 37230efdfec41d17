"""A ring_fp32 model and no ring: refused in one process of a job that asked for more, and said on several ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.integration import log
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import tokens, told
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import launched
from tests.helpers.models.tiny_models import tiny

LOOKUP = {"PARALLELISM_CONFIG_CP_SIZE": "2"}
MULTI_CPU = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Set by ``accelerate launch`` for `distributed_type: MULTI_CPU` with two processes. It starts one."""


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "PARALLELISM_CONFIG_", "MASTER_")) or name in ("WORLD_SIZE", "RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def rows() -> list[dict[str, list[int]]]:
    return [{"input_ids": list(range(8)), "labels": list(range(8))} for _ in range(2)]


def trainer(folder: Path, model: Any, **given: Any) -> None:
    args = TrainingArguments(output_dir=str(folder), report_to="none", max_steps=1, use_cpu=True, **given)
    Trainer(model=model, args=args, train_dataset=rows())


def trainer_with_its_model_made_later(folder: Path, model: Any) -> None:
    args = TrainingArguments(output_dir=str(folder), report_to="none", max_steps=1, use_cpu=True)
    Trainer(model_init=lambda: model, args=args, train_dataset=rows()).train()


def sft_trainer(folder: Path, model: Any) -> None:
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from tests.helpers.jobs import sft_jobs

    tokenizer: PreTrainedTokenizerFast = sft_jobs.tokenizer()
    args = SFTConfig(output_dir=str(folder), report_to="none", max_steps=1, use_cpu=True)
    SFTTrainer(model=model, args=args, train_dataset=sft_jobs.rows("text", 2), processing_class=tokenizer)


def prepared_loop(_: Path, model: Any) -> None:
    Accelerator().prepare(model)


def prepared_model(_: Path, model: Any) -> None:
    Accelerator().prepare_model(model)


HOSTS = [trainer, trainer_with_its_model_made_later, sft_trainer, prepared_loop, prepared_model]


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
@pytest.mark.parametrize(
    ("environment", "got"),
    [(LOOKUP, "PARALLELISM_CONFIG_CP_SIZE is 2"), (MULTI_CPU, "accelerate launch was given several processes")],
    ids=["no launcher", "MULTI_CPU"],
)
def test_one_process_of_a_job_that_asked_for_more_is_refused(
    host: Any, environment: dict[str, str], got: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.OneProcess, match=got) as refusal:
        host(tmp_path, tiny("llama", "ring_fp32"))
    assert "distributed_type: MULTI_GPU" in str(refusal.value)
    assert len(str(refusal.value).split()) <= 60


def test_a_config_of_two_in_one_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.MeshMismatch, match="needs 2 processes, got 1"):
        trainer(tmp_path, tiny("llama", "ring_fp32"), parallelism_config=ParallelismConfig(cp_size=2))


@pytest.mark.parametrize("environment", [{}, {**MULTI_CPU, "WORLD_SIZE": "1"}, {"MASTER_PORT": "1"}])
def test_one_process_that_was_asked_for_trains(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    prepared_loop(tmp_path, tiny("llama", "ring_fp32"))


def test_other_models_are_no_concern_of_a_ring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    prepared_loop(tmp_path, tiny("llama", "sdpa"))


# ---- on several ranks ------------------------------------------------------------------------------------------------


def forwards(ring: bool, training: bool, shares: bool, frozen: bool) -> list[str]:
    """What is said of three forwards of a prepared model."""
    with launched(Mesh(cp=2)):
        if not ring:
            del os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"]
        accelerator = Accelerator()
        model: Any = tiny("llama", "ring_fp32").train(training).requires_grad_(not frozen)
        model = accelerator.prepare_model(model) if not frozen else model

        def run() -> None:
            for _ in range(3):
                batch = tokens(24)
                if not shares:
                    model(**batch)
                    continue
                with hf_ring_attn.shard(batch) as sharded:
                    model(**sharded.inputs)

        return told(run)


@pytest.mark.parametrize("ring", [True, False], ids=["a ring", "no ring"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_a_model_that_trains_without_a_ring_is_told_once(ranks: Ranks, ring: bool, training: bool) -> None:
    for rank, texts in enumerate(ranks(2).run(forwards, ring, training, False, False)):
        if not training or rank:
            assert texts == []
            continue
        (text,) = texts
        if ring:
            assert "in a ring of 2, but its batch is not sharded" in text
            assert "accelerator.maybe_context_parallel" in text
            assert "hf_ring_attn.shard(batch)" in text
        else:
            assert "trains on 2 processes without a ring" in text
            assert "plain data parallelism" in text
            assert "the option alone has no effect" in text


def backward_in_evaluation() -> list[str]:
    """from_pretrained leaves a model in evaluation, and loops forget model.train()."""
    with launched(Mesh(cp=2)):
        model: Any = Accelerator().prepare_model(tiny("llama", "ring_fp32").train(False))
        return told(lambda: model(**tokens(24)).loss.backward())


def test_a_loop_that_never_calls_train_is_told(ranks: Ranks) -> None:
    first, other = ranks(2).run(backward_in_evaluation)
    assert other == []
    assert len(first) == 1 and "in a ring of 2, but its batch is not sharded" in first[0]
    assert "accelerator.gather returns each row 2 times" in first[0]


def test_a_model_that_trains_in_its_ring_is_told_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(forwards, True, True, True, False) == [[], []]


def test_a_frozen_model_is_told_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(forwards, False, True, False, True) == [[], []]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_loop_without_a_process_group_is_told(processes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes trains by itself, and the line at start said only that no ring is active."""
    model: Any = tiny("llama", "ring_fp32").train()
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("LOCAL_RANK", "0")
    texts = told(lambda: [model(**tokens(24)).loss.backward() for _ in range(2)])
    assert len(texts) == (processes == "2")
    for text in texts:
        assert text.startswith("a launcher started 2 processes (WORLD_SIZE=2), but this one has no process group")


@pytest.mark.parametrize("launched_processes", ["1", "2"])
def test_a_process_of_a_launcher_without_a_group_is_told(
    launched_processes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, shard() before init_process_group made no ring, and said only that."""
    monkeypatch.setenv("WORLD_SIZE", launched_processes)
    monkeypatch.setenv("LOCAL_RANK", "0")
    texts = told(lambda: [hf_ring_attn.shard(tokens(24)) for _ in range(2)])
    assert len(texts) == (launched_processes == "2")
    for text in texts:
        assert text.startswith("a launcher started 2 processes (WORLD_SIZE=2), but this one has no process group")


def test_one_process_is_told_nothing() -> None:
    assert told(lambda: tiny("llama", "ring_fp32").train()(**tokens(24))) == []
    assert not torch.distributed.is_initialized()


def another_model_on_the_cpu() -> str:
    with launched(Mesh(cp=2)), tempfile.TemporaryDirectory() as folder:
        try:
            trainer(Path(folder), tiny("llama", "sdpa"))
        except errors.TorchContextParallelRefused as error:
            return str(error)
    return ""


def test_another_model_on_the_cpu_is_told_how_to_get_a_ring(ranks: Ranks) -> None:
    for text in ranks(2).run(another_model_on_the_cpu):
        assert "LlamaForCausalLM has attn_implementation=sdpa" in text
        assert "MULTI_CPU" in text
        assert 'load the model with attn_implementation="ring_fp32"' in text


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropped_out(p: float, training: bool) -> list[str]:
    model: Any = tiny("llama", "ring_fp32")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=p)).train(training)
    lines: list[str] = []

    def run() -> None:
        for _ in range(2):
            with hf_ring_attn.shard(tokens(24)) as sharded:
                model(**sharded.inputs)

    log._said.clear()
    with mock.patch.object(log.logger, "info", lines.append):
        run()
    return [line for line in lines if "dropout" in line]


def test_dropout_outside_attention_is_said_once(ranks: Ranks) -> None:
    (line,), others = ranks(2).run(dropped_out, 0.05, True)
    assert "LlamaForCausalLM" not in line
    assert "dropout in 2 modules (base_model.model.model.layers.0.self_attn.q_proj.lora_dropout.default" in line
    assert "set it to 0" in line
    assert others == []


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.05, False)])
def test_no_dropout_is_not_said(ranks: Ranks, p: float, training: bool) -> None:
    assert ranks(2).run(dropped_out, p, training) == [[], []]
