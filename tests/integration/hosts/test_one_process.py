"""Options that save memory act in one process without a ring, too: Trainer's and TRL's steps are the same with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration import log
from tests.helpers.jobs import preference_jobs, sft_jobs, trl_runs
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, trainer_of
from tests.helpers.models.tiny_models import tiny

ALONE = Mesh()
OPTIONS = RingConfig(mlp_tokens=3, offload_above=0.0, loss="chunked")
ARGUMENTS: dict[str, Any] = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
SMOOTHED = {**ARGUMENTS, "label_smoothing_factor": 0.1}


def of_trainer(folder: str, attention: str, arguments: dict[str, Any], model: str = "llama") -> Any:
    run = Run(why="", model=model, rows=Rows(shortest=9, pad_to="right"), steps=4, arguments=arguments)
    return trainer_of(run, ALONE, folder, model=tiny(run.model, attention))


def of_sft(folder: str, attention: str) -> Any:
    return sft_jobs.trainer(sft_jobs.Case("", {"packing": True, **ARGUMENTS}, lora=True), folder, attention)


def of_dpo(folder: str, attention: str) -> Any:
    return preference_jobs.trainer(preference_jobs.Case("", ARGUMENTS, lora=True, reference=False), folder, attention)


MAKERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "Trainer": (of_trainer, (ARGUMENTS,)), "labels smoothed": (of_trainer, (SMOOTHED,)),
    "SFTTrainer": (of_sft, ()), "DPOTrainer": (of_dpo, ()), "experts": (of_trainer, (SMOOTHED, "mixtral")),
}  # fmt: skip
CHUNKED = {"experts": RingConfig(loss="chunked", offload_above=0.0)}
"""Options in place of `OPTIONS`: `mlp_tokens` is refused beside an auxiliary loss."""


def trained(maker: str, attention: str, options: RingConfig | None) -> tuple[list[dict[str, float]], list[str]]:
    """Steps and an evaluation in one process: what was logged, and the package's lines."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    make, given = MAKERS[maker]
    with launched(ALONE, **trl_runs.OFFLINE), a_folder(None) as folder, trl_runs.quiet():
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
        return numbers(trainer.state.log_history), [line for line in lines if "no ring active" in line]


@pytest.mark.turns
@pytest.mark.parametrize("maker", MAKERS)
def test_one_process_takes_them(ranks: Ranks, maker: str) -> None:
    ((want, _),) = ranks(1).run(trained, maker, "sdpa", None)
    ((got, lines),) = ranks(1).run(trained, maker, "ring_fp32", CHUNKED.get(maker, OPTIONS))
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert "checkpoints above 0 GiB on the host" in lines[0]
    assert ("MLPs 3 tokens at a time" in lines[0]) == (maker not in CHUNKED)


def test_one_process_keeps_layers(ranks: Ranks) -> None:
    ((_, lines),) = ranks(1).run(trained, "Trainer", "ring_fp32", RingConfig(keep_layers=1))
    assert lines[0] == "no ring active; kernel reference; 1 layer kept"


def test_without_them_one_process_is_left_alone(ranks: Ranks) -> None:
    ((_, lines),) = ranks(1).run(trained, "Trainer", "ring_fp32", None)
    assert lines == ["no ring active; kernel reference"]
