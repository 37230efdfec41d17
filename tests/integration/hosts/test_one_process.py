"""Options that save memory act without a ring, too, in one process and in each of several: steps stay the same.

On several processes Trainer ignored them without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from accelerate import DistributedType, ParallelismConfig
from transformers import Trainer

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration import log
from hf_ring_attn.integration.hosts import trainer_facts
from tests.helpers.jobs import preference_jobs, sft_jobs, trl_runs
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.fsdp2_trainers import under_fsdp2
from tests.helpers.jobs.plain_jobs import told
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, trainer_of
from tests.helpers.models.tiny_models import tiny

ALONE, SEVERAL = Mesh(), Mesh(dp=2)
OPTIONS = RingConfig(mlp_tokens=3, offload_above=0.0, loss="chunked")
ARGUMENTS: dict[str, Any] = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
SMOOTHED = {**ARGUMENTS, "label_smoothing_factor": 0.1}


def of_trainer(
    folder: str, attention: str, arguments: dict[str, Any], model: str = "llama", kind: type[Trainer] = Trainer,
    loss_function: bool = False,
) -> Any:  # fmt: skip
    rows = Rows(shortest=9, pad_to="right")
    run = Run(why="", model=model, rows=rows, steps=4, arguments=arguments, loss_function=loss_function)
    return trainer_of(run, ALONE, folder, model=tiny(run.model, attention), kind=kind)


def of_loss(folder: str, attention: str) -> Any:
    """With a compute_loss_func, which gets outputs of whole rows: an AttributeError, in one process too."""
    return of_trainer(folder, attention, ARGUMENTS, loss_function=True)


def under_fsdp(folder: str, attention: str) -> Any:
    trainer = of_trainer(folder, attention, ARGUMENTS)
    under_fsdp2(trainer, {})
    return trainer


def of_sft(folder: str, attention: str) -> Any:
    return sft_jobs.trainer(sft_jobs.Case("", {"packing": True, **ARGUMENTS}, lora=True), folder, attention)


def of_dpo(folder: str, attention: str) -> Any:
    return preference_jobs.trainer(preference_jobs.Case("", ARGUMENTS, lora=True, reference=False), folder, attention)


MAKERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "Trainer": (of_trainer, (ARGUMENTS,)), "labels smoothed": (of_trainer, (SMOOTHED,)),
    "SFTTrainer": (of_sft, ()), "DPOTrainer": (of_dpo, ()), "experts": (of_trainer, (SMOOTHED, "mixtral")),
    "FSDP2": (under_fsdp, ()), "own loss": (of_loss, ()),
}  # fmt: skip
OTHERS = {
    "experts": RingConfig(loss="chunked", offload_above=0.0),
    "own loss": RingConfig(mlp_tokens=3, offload_above=0.0),
}
"""Options in place of `OPTIONS`: `mlp_tokens` is refused beside an auxiliary loss, "chunked" for outputs."""


def trained(
    maker: str, attention: str, options: RingConfig | None, mesh: Mesh = ALONE
) -> tuple[list[dict[str, float]], list[str]]:
    """Steps and an evaluation without a ring: what was logged, and the package's lines of no ring."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    make, given = MAKERS[maker]
    with launched(mesh, **trl_runs.OFFLINE), a_folder(None) as folder, trl_runs.quiet():
        if attention == "ring_fp32":
            hf_ring_attn.install()
        log.logger.addHandler(handler)
        log._said.clear()
        try:
            trainer = make(folder, attention, *given)
            if options is not None:
                hf_ring_attn.configure(trainer.model, options)
            trainer.train()
            trainer.evaluate()
        finally:
            log.logger.removeHandler(handler)
        return numbers(trainer.state.log_history), [line for line in lines if "ring" in line]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("maker", "mesh"),
    [
        *((maker, ALONE) for maker in MAKERS if maker != "FSDP2"),
        *((maker, SEVERAL) for maker in MAKERS if maker != "experts"),
    ],
    ids=str,
)
def test_processes_without_a_ring_take_them(ranks: Ranks, maker: str, mesh: Mesh) -> None:
    (want, _), *_ = ranks(mesh.size).run(trained, maker, "sdpa", None, mesh)
    (got, lines), *_ = ranks(mesh.size).run(trained, maker, "ring_fp32", OTHERS.get(maker, OPTIONS), mesh)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    said = "\n".join(lines)
    assert "checkpoints above 0 GiB on the host" in said
    assert ("MLPs 3 tokens at a time" in said) == (maker != "experts")
    assert ("trains on 2 processes without a ring" in said) == (mesh is SEVERAL)


def test_one_process_keeps_layers(ranks: Ranks) -> None:
    ((_, lines),) = ranks(1).run(trained, "Trainer", "ring_fp32", RingConfig(keep_layers=1))
    assert lines[0] == "no ring active; kernel reference; 1 layer kept"


def test_without_them_one_process_is_left_alone(ranks: Ranks) -> None:
    ((_, lines),) = ranks(1).run(trained, "Trainer", "ring_fp32", None)
    assert lines == ["no ring active; kernel reference"]


class CountsItself(Trainer):
    """Its override counts tokens, so that no ring trains it."""

    def get_batch_samples(self, *given: Any, **named: Any) -> Any:
        return super().get_batch_samples(*given, **named)


def by_an_unknown_trainer() -> list[str]:
    with launched(SEVERAL), a_folder(None) as folder:
        hf_ring_attn.install()
        trainer = of_trainer(folder, "ring_fp32", {}, kind=CountsItself)
        hf_ring_attn.configure(trainer.model, RingConfig(mlp_tokens=3, keep_layers=1))
        return told(trainer.train)


def test_options_without_an_effect_are_said(ranks: Ranks) -> None:
    (first, *others), of_other_rank = ranks(2).run(by_an_unknown_trainer)
    assert first.startswith("these options have no effect here: keep_layers=1, mlp_tokens=3. This run has no ring")
    assert "CountsItself is not known to be exact with them" in first
    assert len(others) == 1 and "trains on 2 processes without a ring" in others[0]
    assert of_other_rank == []


@pytest.mark.parametrize(
    ("accelerator", "why"),
    [
        ({"distributed_type": DistributedType.DEEPSPEED}, "DeepSpeed is not tested with them"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "each process computes a part"),
        ({}, None),
    ],
    ids=str,
)
def test_what_is_left_alone(accelerator: dict[str, Any], why: str | None, tmp_path: Path) -> None:
    trainer = of_trainer(str(tmp_path), "ring_fp32", {})
    config = {"distributed_type": DistributedType.MULTI_CPU, "parallelism_config": None, "state": None, **accelerator}
    with mock.patch.object(trainer_facts, "world_size", return_value=2):
        trainer.accelerator = SimpleNamespace(**config)
        found = trainer_facts._left_alone(trainer)
    assert found == why or (why is not None and why in str(found))
