"""Reward models for live ranks: RewardTrainer in a ring, or without the plugin, and what each of them gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from peft import LoraConfig, TaskType
from torch import Tensor
from transformers import PrinterCallback
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import DataCollatorForPreference, RewardTrainer

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.losses import whole_heads
from hf_ring_attn.integration.model import multimodal
from hf_ring_attn.layers import collectives
from tests.helpers.jobs import trl_runs
from tests.helpers.jobs.fsdp2_trainers import fsdp2_from_the_start
from tests.helpers.jobs.preference_jobs import Spread
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import texts, tokenizer
from tests.helpers.jobs.trainer_jobs import a_folder, launched, ordered_metrics
from tests.helpers.jobs.trl_runs import OFFLINE, Outcome, quiet
from tests.helpers.models.tiny_models import SIZES, build

TRAIN_ROWS, EVAL_ROWS, BATCH, STEPS = 16, 6, 2, 3


@dataclass(frozen=True, eq=False)
class Case(trl_runs.Case):
    """One way to train a reward model, and why it is here.

    Args:
        margin: rows have one. left: rows are padded on the left. metrics: have compute_metrics, which gets the scores.
        fsdp: in a ring FSDP2 shards the weights.
    """

    margin: bool = False
    left: bool = False
    kind: str = "LlamaForSequenceClassification"
    metrics: bool = False
    fsdp: bool = False


@dataclass
class PaddedLeft(DataCollatorForPreference):
    """Moves each row's padding to its left."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().torch_call(examples)
        order = batch["attention_mask"].argsort(dim=1, stable=True)
        return batch | {name: batch[name].gather(1, order) for name in ("input_ids", "attention_mask")}


def comparisons(case: Case, count: int, start: int = 0) -> Dataset:
    """Pairs of uneven lengths: the rejected text is a part of the chosen one, and something else."""
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts(count, start)):
        rows.append({"chosen": text, "rejected": text[: 3 + number % 9] + "?" * 4})
        if case.margin:
            rows[-1]["margin"] = 0.25 * (number % 4)
    return Dataset.from_list(rows)


class SpreadRewards(Spread, RewardTrainer):
    pass


def trainer(case: Case, folder: str, attention: str, kind: type[RewardTrainer] = RewardTrainer, **more: Any) -> Any:
    own = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "seed": 3, "learning_rate": 0.01}
    args = trl_runs.arguments(folder, **{**own, **case.args, **more})
    sizes = {**SIZES, "vocab_size": 259, "max_position_embeddings": 256, "num_labels": 1}
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], task_type=TaskType.SEQ_CLS, modules_to_save=["score"]
    )
    with fsdp2_from_the_start({}) if case.fsdp and attention == "ring_fp32" else nullcontext():
        made = kind(
            model=build(case.kind, attention, **sizes), args=RewardConfig(**args), processing_class=tokenizer(),
            train_dataset=comparisons(case, TRAIN_ROWS), eval_dataset=comparisons(case, EVAL_ROWS, start=4000),
            peft_config=lora if case.lora else None, data_collator=PaddedLeft(pad_token_id=0) if case.left else None,
            compute_metrics=ordered_metrics if case.metrics else None,
        )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def trained(case: Case, mesh: Mesh, self_check: bool = True, kind: type[RewardTrainer] = RewardTrainer) -> Outcome:
    """The steps and an evaluation on this rank; without a ring in one process, with ``mesh.dp`` batches at a time."""
    with launched(mesh if mesh.cp > 1 else Mesh(), **OFFLINE), a_folder(None) as folder, quiet():
        rows = {"per_device_train_batch_size": BATCH * (mesh.dp if mesh.cp == 1 else 1)}
        rows["per_device_eval_batch_size"] = BATCH // mesh.dp if mesh.cp > 1 else BATCH
        reward = trainer(case, folder, "ring_fp32" if mesh.cp > 1 else "sdpa", kind, **rows)
        hf_ring_attn.configure(reward.model, RingConfig(self_check=self_check))
        return trl_runs.outcome(reward)


# ---- defects -------------------------------------------------------------------------------------------------------


def tokens_by_ranks() -> Any:
    """Hidden states are gathered in the order of ranks, not in that of the row."""

    def gathered(x: Tensor, ring: Any, layout: Any) -> Tensor:
        places = torch.cat([layout.positions(rank) for rank in range(ring.size)])
        return gather(x, ring, layout)[:, places[places < layout.length]]

    gather = collectives.gather_sequence
    return mock.patch.object(whole_heads, "gather_sequence", gathered)


def gradients_of_one_rank() -> Any:
    """The gradient of gathered hidden states is not summed over ranks, so their mean divides it by the ring size."""

    def gathered(x: Tensor, ring: Any, layout: Any) -> Tensor:
        rows = gather(x.detach(), ring, layout)
        mine = layout.pad(rows.new_zeros(rows.shape), 1)
        mine[:, layout.positions()] = x - x.detach()
        whole: Tensor = rows + mine[:, : layout.length]
        return whole

    gather = collectives.gather_sequence
    return mock.patch.object(whole_heads, "gather_sequence", gathered)


def order_of_ranks() -> Any:
    """Positions are those of a rank's own tokens."""

    def local_inputs(text: Any, named: dict[str, Any], context: Any) -> dict[str, Any]:
        local = real(text, named, context)
        places = local["position_ids"]
        return local | {"position_ids": places.argsort(-1)}

    real = multimodal.local_inputs
    return mock.patch.object(multimodal, "local_inputs", local_inputs)


DEFECTS: dict[str, Callable[[], Any]] = {
    defect.__name__: defect for defect in (tokens_by_ranks, gradients_of_one_rank, order_of_ranks)
}


def trained_with(defect: str, case: Case, mesh: Mesh, self_check: bool) -> Outcome | str:
    """A run with a defect; what the self-check raises, if it sees it."""
    with DEFECTS.get(defect, nullcontext)():
        try:
            return trained(case, mesh, self_check)
        except hf_ring_attn.RingAttentionError as error:
            return f"{type(error).__name__}: {error}"
