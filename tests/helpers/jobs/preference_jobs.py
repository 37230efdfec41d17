"""Preference runs for live ranks: DPOTrainer and KTOTrainer in a ring, or without the plugin, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from peft import get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PrinterCallback
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.batch.shard import Sharded
from hf_ring_attn.integration.context import whole_batch
from tests.helpers.jobs import sft_pictures, trl_runs
from tests.helpers.jobs.fsdp2_trainers import fsdp2_from_the_start
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import lora, model, texts, tokenizer
from tests.helpers.jobs.trainer_jobs import a_folder, launched, ordered_metrics
from tests.helpers.jobs.trl_runs import OFFLINE, Outcome, arguments, evaluation, first_error, outcome, quiet

TRAIN_ROWS, EVAL_ROWS, BATCH, STEPS = 16, 6, 2, 3


@dataclass(frozen=True, eq=False)
class Case(trl_runs.Case):
    """One way to learn preferences, and why it is here.

    Args:
        reference: a model beside the policy, of other weights; else DPOTrainer finds its own.
        prompt: this share of a text is the prompt, of ten.
        masks: the first row of each batch has no completion tokens, as a truncated one.
        metrics: have compute_metrics, which gets logits of whole rows. kto: KTOTrainer, else DPOTrainer.
        fsdp: in a ring FSDP2 shards the weights, those of the reference too.
        adapted: the model has an adapter already, of which a copy is the reference.
        images: a model of `tiny_models.VISION`, on rows with pictures; without_images: every so many have none; with
            ``text_only`` no row has.
    """

    reference: bool = True
    prompt: int = 3
    masks: bool = False
    metrics: bool = False
    kto: bool = False
    fsdp: bool = False
    adapted: bool = False
    images: str = ""
    without_images: int = 0
    text_only: bool = False


@dataclass
class WithoutCompletion(DataCollatorForPreference):
    """Takes the completion tokens of each batch's first row away."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().torch_call(examples)
        batch["completion_mask"][0] = 0
        return batch


@dataclass
class WithoutAnswer(DataCollatorForUnpairedPreference):
    """As `WithoutCompletion`, for KTO, also of its second rows."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().torch_call(examples)
        for name in ("completion_mask", "KL_completion_mask"):
            batch[name][0] = 0
        return batch


def preferences(case: Case, count: int, start: int = 0) -> Dataset:
    """Pairs of uneven lengths: the rejected answer is a part of the chosen one, and something else. For KTO: judged."""
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts(count, start)):
        at = max(1, len(text) * case.prompt // 10)
        good, bad = text[at:], text[at : at + 3 + number % 9] + "?" * 4
        if case.kto:
            rows.append({"prompt": text[:at], "completion": bad if number % 3 else good, "label": number % 3 == 0})
        else:
            rows.append({"prompt": text[:at], "chosen": good, "rejected": bad})
    made = Dataset.from_list(rows)
    if case.images and not case.text_only:
        made = sft_pictures.with_pictures(made, sft_pictures.PROMPTS[case.images], case.without_images)
    return made


def policy(attention: str, kind: str, images: str = "") -> PreTrainedModel:
    """The model that learns: one of a class, or one of images."""
    return sft_pictures.model(images, attention) if images else model(attention, kind)


def teacher(attention: str, kind: str, images: str = "") -> PreTrainedModel:
    """A reference of other opinions, not so far away that a step's gradient is the exponent of rounding."""
    net = policy(attention, kind, images)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.05)
    return net


def adapted(net: PreTrainedModel) -> Any:
    """With an adapter that was trained before."""
    torch.manual_seed(5)
    config = lora()
    config.init_lora_weights = False
    return get_peft_model(net, config)


def reference(_path: str, attn_implementation: str, **_: Any) -> Any:
    """The model that a trainer loads for its reference: the policy's first weights, which come from no path here."""
    with torch.random.fork_rng():  # else batches have another order
        return model(attn_implementation)


def trainer(case: Case, folder: str, attention: str, kind: Any = None, **options: Any) -> Any:
    words: Any = sft_pictures.processor(case.images) if case.images else tokenizer()
    rows = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    args = arguments(folder, **{"max_steps": STEPS, "max_length": 64, "beta": 0.1, **rows, **case.args})
    of_dpo, of_kto = (DPOTrainer, DPOConfig, WithoutCompletion), (KTOTrainer, KTOConfig, WithoutAnswer)
    classes: tuple[Any, Any, Any] = of_kto if case.kto else of_dpo
    own, configured, collating = classes
    defaults = {
        "model": policy(attention, case.kind, case.images),
        "ref_model": teacher(attention, case.kind, case.images) if case.reference else None,
        "train_dataset": preferences(case, TRAIN_ROWS), "eval_dataset": preferences(case, EVAL_ROWS, start=4000),
        "processing_class": words, "peft_config": lora() if case.lora else None,
        "data_collator": collating(pad_token_id=0, max_length=64) if case.masks else None,
        "compute_metrics": ordered_metrics if case.metrics else None,
    }  # fmt: skip
    if case.adapted:
        defaults["model"] = adapted(defaults["model"])
    sharding = fsdp2_from_the_start({}) if case.fsdp and attention == "ring_fp32" else nullcontext()
    with sharding, mock.patch(f"{own.__module__}.create_model_from_path", reference):
        made = (kind or own)(args=configured(**args), **{**defaults, **options})
    made.remove_callback(PrinterCallback)
    return made


def save(case: Case, folder: str) -> None:
    """Writes the rows to a folder that ranks share, as trainers need it to compute a reference before training."""
    preferences(case, TRAIN_ROWS).save_to_disk(f"{folder}/train")
    preferences(case, EVAL_ROWS, start=4000).save_to_disk(f"{folder}/evaluate")


def trained(case: Case, mesh: Mesh, saved: str = "", self_check: bool = True, kind: Any = None) -> Outcome:
    """The steps and an evaluation on this rank; without a ring in one process, with ``mesh.dp`` batches at a time.

    KTO without a ring: in ``mesh.dp`` processes, since it mixes the rows of a device's batch.
    """
    at_once = mesh.dp if mesh.cp == 1 and not case.kto else 1
    with launched(mesh if at_once == 1 else Mesh(), **OFFLINE), a_folder(None) as folder, quiet():
        rows = {"per_device_train_batch_size": BATCH * at_once, "per_device_eval_batch_size": BATCH}
        if not case.kto:
            rows["per_device_eval_batch_size"] = BATCH // mesh.dp if mesh.cp > 1 else BATCH
        data: dict[str, Any] = {}
        if saved:
            names = {"train_dataset": "train", "eval_dataset": "evaluate"}
            data = {name: Dataset.load_from_disk(f"{saved}/{part}") for name, part in names.items()}
        dpo = trainer(case.with_args(**rows), folder, "ring_fp32" if mesh.cp > 1 else "sdpa", kind, **data)
        hf_ring_attn.configure(dpo.model, RingConfig(self_check=self_check))
        found = outcome(dpo)
        for net in filter(None, (dpo.model, dpo.ref_model)):
            assert any(isinstance(p, DTensor) for p in net.parameters()) == (case.fsdp and mesh.cp > 1)
        return found


def evaluated(case: Case, mesh: Mesh, rows: int, lengths: tuple[int, ...] = ()) -> dict[str, float]:
    """An evaluation of so many rows, before any training. ``lengths``: bytes of their prompts and completions."""
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet():
        attention = "ring_fp32" if mesh.cp > 1 else "sdpa"
        data = preferences(case, rows, start=4000)
        if lengths:
            pieces = [{"prompt": "p" * n, "completion": "c" * n, "label": n > 1} for n in lengths]
            data = Dataset.from_list(pieces)
        host = trainer(case, folder, attention, eval_dataset=data)
        return evaluation(host)


def rewards_in_half(case: Case) -> list[float]:
    """The greatest reward of each of two steps in bf16, of a model that is its own reference at the first."""
    with launched(Mesh(cp=2), **OFFLINE), a_folder(None) as folder, quiet():
        host = trainer(case.with_args(bf16=True, max_steps=2), folder, "ring_fp32")
        host.train()
        steps = [entry for entry in host.state.log_history if "loss" in entry]
        return [max(abs(entry[f"rewards/{kind}"]) for kind in ("chosen", "rejected")) for entry in steps]


# ---- defects -------------------------------------------------------------------------------------------------------


def rows_times_ranks() -> Any:
    """What each token has is multiplied by the ring size, as a rank's share of a loss is."""
    gather = Sharded.gather
    return mock.patch.object(Sharded, "gather", lambda self, x: gather(self, x) * self.ring.size)


def gradients_of_one_rank() -> Any:
    """The gradient of a gathered row is not summed over ranks, so that their mean divides it by the ring size."""

    def gathered(self: Sharded, x: Tensor) -> Tensor:
        with torch.no_grad():
            whole = gather(self, x.detach())
        if x.requires_grad:
            mine = self.layout.pad(whole.new_zeros(whole.shape), 1)
            mine[:, self.positions] = x - x.detach()
            whole = whole + mine[:, : self.layout.length]
        return whole

    gather = Sharded.gather
    return mock.patch.object(Sharded, "gather", gathered)


def labels_one_token_late() -> Any:
    """Labels are taken to be of the token that they stand at, as if the mask were cut after the shift."""

    def labels(inputs: dict[str, Any], rows: int, length: int) -> Tensor | None:
        if "labels" in inputs:
            inputs["shift_labels"] = inputs["labels"]
        return shifted(inputs, rows, length)

    shifted = whole_batch._labels
    return mock.patch.object(whole_batch, "_labels", labels)


DEFECTS: dict[str, Callable[[], Any]] = {
    defect.__name__: defect for defect in (rows_times_ranks, gradients_of_one_rank, labels_one_token_late)
}


def trained_with(defect: str, case: Case, mesh: Mesh) -> Outcome:
    """A run with a defect, which the self-check might see, so it is off."""
    with DEFECTS[defect]():
        return trained(case, mesh, self_check=False)


# ---- refusals ------------------------------------------------------------------------------------------------------


class OtherPairs(DPOTrainer):
    """Learns from rows that are not the batch's."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        parent: Any = super()
        return parent._compute_loss(model, inputs | {"input_ids": inputs["input_ids"].flip(0)}, return_outputs)


class OtherAnswers(KTOTrainer):
    """As `OtherPairs`, beside the rows of the KL term."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        parent: Any = super()
        return parent._compute_loss(model, inputs | {"input_ids": inputs["input_ids"].flip(0)}, return_outputs)


OTHER_ROWS = (OtherPairs, OtherAnswers)


class Spread:
    """For a trainer: scales its loss by how far the rows of all processes are apart."""

    accelerator: Any

    def compute_loss(self, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        parent: Any = super()
        result: Any = parent.compute_loss(model, inputs, *given, **named)
        loss = result[0] if isinstance(result, tuple) else result
        rows = self.accelerator.gather(inputs["input_ids"].to(loss.dtype).mean(1))
        assert len(rows) == self.accelerator.num_processes * len(inputs["input_ids"])
        loss = loss * (1 + 0.01 * rows.std())
        return (loss, *result[1:]) if isinstance(result, tuple) else loss


class SpreadPairs(Spread, DPOTrainer):
    pass


class SpreadAnswers(Spread, KTOTrainer):
    pass


SPREAD = (SpreadPairs, SpreadAnswers)


class OwnBatches(DPOTrainer):
    """Hands the batch on as it is."""

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> Any:
        return nullcontext, inputs


class PaddingFree(DPOTrainer):
    """As if TRL had it again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.padding_free = True


def one_step(case: Case, mesh: Mesh, ring: RingConfig | None = None, **options: Any) -> str:
    return first_error(trainer, case, mesh, ring, **options)
