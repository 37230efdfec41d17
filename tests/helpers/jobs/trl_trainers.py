"""TRL's other trainers, each as its guide makes it, for live ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from accelerate import ParallelismConfig
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback

import hf_ring_attn
from hf_ring_attn.integration.hosts import trainer_overrides
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import model, texts, tokenizer
from tests.helpers.jobs.trainer_jobs import a_folder, launched
from tests.helpers.jobs.trl_runs import OFFLINE, quiet
from tests.helpers.models.tiny_models import SIZES, build

ROWS = 8


def lengths(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(completion) % 5) for completion in completions]


def preferences() -> Dataset:
    pieces = texts(ROWS)
    return Dataset.from_list([{"prompt": p[:4], "chosen": p[4:8], "rejected": p[5:9]} for p in pieces])


def comparisons() -> Dataset:
    return Dataset.from_list([{"chosen": p[:8], "rejected": p[:4] + p[5:9]} for p in texts(ROWS)])


def judged() -> Dataset:
    pieces = texts(ROWS)
    return Dataset.from_list(
        [{"prompt": p[:4], "completion": p[4:9], "label": number % 2 == 0} for number, p in enumerate(pieces)]
    )


def prompts() -> Dataset:
    return Dataset.from_list([{"prompt": p[:6]} for p in texts(ROWS)])


def triples() -> Dataset:
    return preferences().add_column("reference", preferences()["chosen"])


def chats() -> Dataset:
    pieces = texts(ROWS)
    turns = [[{"role": "user", "content": p[:4]}, {"role": "assistant", "content": p[4:9]}] for p in pieces]
    return Dataset.from_list([{"messages": turn} for turn in turns])


def ranker(attention: str) -> PreTrainedModel:
    return build("LlamaForSequenceClassification", attention, **{**SIZES, "vocab_size": 259, "num_labels": 1})


def teacher(attention: str) -> Any:
    """Of other opinions than the student."""
    net = model(attention)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.2)
    return net


SAMPLED = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0}
REWARDED: dict[str, Any] = {"reward_funcs": [lengths]}


@dataclass(frozen=True, eq=False)
class Kind:
    """A trainer of TRL by its class's name, and what it needs: args for its config, options, and models to be made."""

    name: str
    rows: Callable[[], Dataset]
    module: str = "trl"
    args: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Callable[[str], Any]] = field(default_factory=dict)
    model: Callable[[str], Any] = model

    def make(self, folder: str, attention: str, **more: Any) -> Any:
        module = importlib.import_module(self.module)
        args = {
            "output_dir": folder, "max_steps": 1, "per_device_train_batch_size": 2, "bf16": False, "use_cpu": True,
            "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "optim": "sgd",
            **self.args, **more,
        }  # fmt: skip
        models = {name: make(attention) for name, make in self.made.items()}
        trainer = getattr(module, f"{self.name}Trainer")(
            model=self.model(attention), args=getattr(module, f"{self.name}Config")(**args),
            train_dataset=self.rows(), processing_class=tokenizer(), **self.options, **models,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        return trainer


KINDS = {
    kind.name: kind
    for kind in (
        Kind("DPO", preferences, made={"ref_model": teacher}),
        Kind("Reward", comparisons, model=ranker),
        Kind("KTO", judged, made={"ref_model": teacher}),
        Kind("GRPO", prompts, args=SAMPLED, options=REWARDED),
        Kind("RLOO", prompts, args=SAMPLED, options=REWARDED),
        Kind("Distillation", prompts, args={"max_completion_length": 4}, made={"teacher_model": teacher}),
        Kind("CPO", preferences, "trl.experimental.cpo", {"max_length": 32}),
        Kind("ORPO", preferences, "trl.experimental.orpo", {"max_length": 32}),
        Kind("TPO", triples, "trl.experimental.tpo"),
        Kind("GKD", chats, "trl.experimental.gkd", {"max_new_tokens": 4}, made={"teacher_model": teacher}),
    )
}


def constructed(name: str, mesh: Mesh, parallelism: dict[str, Any] | None = None) -> str:
    """What constructing a trainer with a ring_fp32 model raises, as "Type: text", or "constructed".

    Args:
        parallelism: of a ParallelismConfig given to the trainer's config, instead of the launcher's environment.
    """
    with launched(mesh if parallelism is None else Mesh(dp=mesh.size), **OFFLINE), a_folder(None) as folder, quiet():
        hf_ring_attn.install()
        try:
            more = {} if parallelism is None else {"parallelism_config": ParallelismConfig(**parallelism)}
            KINDS[name].make(folder, "ring_fp32", **more)
        except Exception as error:  # noqa: BLE001 - the test judges the text, whatever it is
            return f"{type(error).__name__}: {error}"
        return "constructed"


def one_step(name: str, plugin: bool) -> dict[str, float]:
    """The numbers of one step in this process, by ring_fp32, or by sdpa without the plugin."""
    with launched(Mesh(), **OFFLINE), a_folder(None) as folder, quiet():
        if plugin:
            hf_ring_attn.install()
        trainer = KINDS[name].make(folder, "ring_fp32" if plugin else "sdpa")
        trainer.train()
        (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
        return {key: x for key, x in entry.items() if not key.endswith(("time", "runtime")) and isinstance(x, float)}


def unknown(name: str, mesh: Mesh) -> str:
    """What constructing a trainer of TRL raises that the package does not know."""
    known = {one for one in trainer_overrides.EXACT_TRL if not one.endswith(f":{name}Trainer")}
    with mock.patch.object(trainer_overrides, "EXACT_TRL", known):
        return constructed(name, mesh)
