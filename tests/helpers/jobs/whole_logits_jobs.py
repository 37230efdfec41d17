"""Runs of TRL's trainers that need logits of whole rows, for live ranks: in a ring, or without the plugin."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.batch import whole_outputs
from tests.helpers.jobs import preference_jobs, sft_jobs, trl_runs
from tests.helpers.jobs.fsdp2_trainers import fsdp2_from_the_start
from tests.helpers.jobs.preference_jobs import BATCH, EVAL_ROWS, STEPS, TRAIN_ROWS, preferences
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import lora, model, texts, tokenizer
from tests.helpers.jobs.trainer_jobs import a_folder, launched
from tests.helpers.jobs.trl_runs import OFFLINE, Outcome, quiet
from tests.helpers.models.tiny_models import SIZES, build


@dataclass(frozen=True, eq=False)
class Case:
    """One way to learn preferences, and why it is here.

    Args:
        name: of the trainer. args: for its config. kind: the class of the model. fsdp: in a ring FSDP2 shards it.
    """

    why: str
    name: str
    args: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    kind: str = "LlamaForCausalLM"
    fsdp: bool = False


SAMPLED = {"OnlineDPO", "A2PO"}
"""Trainers that generate what they learn from, and reward it."""


def rows(case: Case, count: int, start: int = 0) -> Dataset:
    """Pairs of uneven lengths; for TPO with an answer to imitate. For GKD conversations."""
    if case.name == "GKD":
        return sft_jobs.rows("chat", count, start).filter(lambda row: len(row["messages"]) % 2 == 0)
    if case.name in SAMPLED:
        return Dataset.from_list([{"prompt": text[:20]} for text in texts(count, start)])
    made = preferences(preference_jobs.Case(""), count, start)
    if case.name == "TPO":
        made = made.add_column("reference", [text[-9:] for text in texts(count, start)])
    return made


def vowels(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(sum(text.count(letter) for letter in "aeiou") - 0.1 * len(text)) for text in completions]


def trainer(case: Case, folder: str, attention: str) -> Any:
    folder_of_case = {"OnlineDPO": "online_dpo"}.get(case.name, case.name.lower())
    module = importlib.import_module(f"trl.experimental.{folder_of_case}")
    more: dict[str, Any] = {}
    if case.name == "GKD":
        torch.manual_seed(1)
        more["teacher_model"] = build(
            case.kind, attention,
            **{**SIZES, "vocab_size": 259, "num_hidden_layers": 1, "eos_token_id": 0},
        )  # fmt: skip
    if case.name in SAMPLED:
        more["reward_funcs"] = [vowels]
    own = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "seed": 0}
    if case.name != "A2PO":  # whose config has no such argument
        own["max_length"] = 64
        more["peft_config"] = lora() if case.lora else None
    args = trl_runs.arguments(folder, **{"max_steps": STEPS, **own, **case.args})
    sharding = fsdp2_from_the_start({}) if case.fsdp and attention == "ring_fp32" else nullcontext()
    with sharding:
        made = getattr(module, f"{case.name}Trainer")(
            model=model(attention, case.kind), args=getattr(module, f"{case.name}Config")(**args),
            train_dataset=rows(case, TRAIN_ROWS), eval_dataset=rows(case, EVAL_ROWS, start=4000),
            processing_class=tokenizer(), **more,
        )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def trained(case: Case, mesh: Mesh, self_check: bool = True, defect: Callable[[], Any] = nullcontext) -> Outcome:
    """The steps and an evaluation on this rank."""
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet(), defect():
        host = trainer(case, folder, "ring_fp32" if mesh.cp > 1 else "sdpa")
        hf_ring_attn.configure(host.model, RingConfig(self_check=self_check))
        found = trl_runs.outcome(host, (lambda _: {}) if case.name == "OnlineDPO" else trl_runs.evaluation)
        assert any(isinstance(p, DTensor) for p in host.model.parameters()) == (case.fsdp and mesh.cp > 1)
        return found


def with_rows(change: Callable[[Tensor, int], Tensor]) -> Any:
    """Plants a defect: whole rows of a ring of a size are changed."""
    gathered = whole_outputs.gathered
    return mock.patch.object(
        whole_outputs, "gathered", lambda x, sharded: change(gathered(x, sharded), sharded.ring.size)
    )


def with_gradients_of_one_rank(whole: Tensor, size: int) -> Tensor:
    """The gradient of whole rows is not multiplied by the ring's size, so that the mean over ranks divides it."""
    return whole + (whole - whole.detach()) * (1 / size - 1)


PLANTED = {
    "rows_times_ranks": partial(with_rows, lambda whole, size: whole * size),
    "gradients_of_one_rank": partial(with_rows, with_gradients_of_one_rank),
    "rows_of_other_places": partial(with_rows, lambda whole, size: whole.roll(1, 1)),
}  # fmt: skip


def trained_with(defect: str, case: Case, mesh: Mesh) -> Outcome:
    """A run with a defect, which the self-check might see, so it is off."""
    return trained(case, mesh, self_check=False, defect=PLANTED[defect])


def one_step(case: Case, mesh: Mesh, ring: RingConfig | None = None) -> str:
    return trl_runs.first_error(trainer, case, mesh, ring)
