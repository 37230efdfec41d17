"""On-policy distillation for live ranks: DistillationTrainer in a ring, or without the plugin, and what it gives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from datasets import IterableDataset
from transformers import PrinterCallback
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.utils import RepeatSampler, repeat_iterable_dataset

from hf_ring_attn import RingConfig
from tests.helpers.jobs import grpo_jobs
from tests.helpers.jobs.preference_jobs import policy, teacher
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import Outcome, lora

BATCH, STEPS = 4, 3


@dataclass(frozen=True, eq=False)
class Case:
    """One way to distill; fields as in `grpo_jobs.Case`.

    Args:
        args: for DistillationConfig. attention: the teacher's, if it is another than the student's.
    """

    why: str
    args: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    kind: str = "LlamaForCausalLM"
    stream: bool = False
    prompt: int = 20
    chat: bool = False
    fsdp: bool = False
    images: str = ""
    without_images: int = 0
    text_only: bool = False
    attention: str = ""

    def with_args(self, **more: Any) -> Case:
        return dataclasses.replace(self, args={**self.args, **more})


def trainer(case: Case, folder: str, attention: str, kind: Any = DistillationTrainer, **options: Any) -> Any:
    args: dict[str, Any] = {
        "output_dir": folder, "max_steps": STEPS, "use_cpu": True, "report_to": "none", "logging_steps": 1,
        "bf16": False, "learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 100.0,
        "seed": 5, "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "save_strategy": "no",
        "max_completion_length": 12, "disable_tqdm": True, "gradient_checkpointing": False,
        "dataloader_pin_memory": False, **case.args,
    }  # fmt: skip
    given: Any = case
    made = kind(
        model=policy(attention, case.kind, case.images),
        teacher_model=teacher(case.attention or attention, case.kind, case.images),
        args=DistillationConfig(**args),
        processing_class=grpo_jobs.reader(case.images),
        train_dataset=grpo_jobs.prompts(given, 24),
        eval_dataset=grpo_jobs.prompts(dataclasses.replace(given, stream=False), 6, start=4000),
        **{"peft_config": lora() if case.lora else None, **options},
    )
    made.remove_callback(PrinterCallback)
    return made


def trained(case: Case, mesh: Mesh, self_check: bool = True) -> Outcome:
    return grpo_jobs.outcome(trainer, table, case, mesh, self_check)


def table(host: Any) -> dict[str, float]:
    return {f"table/{name}": float(len(column)) for name, column in host._logs.items()}


def one_step(case: Case, mesh: Mesh, ring: RingConfig | None = None, **options: Any) -> str:
    return grpo_jobs.first_step(trainer, case, mesh, ring, **options)


class OwnLoader(DistillationTrainer):
    """Has copies of the methods that size its batches of prompts by the number of processes."""

    def get_train_dataloader(self) -> Any:
        dataset: Any = self.train_dataset
        steps = self.args.gradient_accumulation_steps
        if isinstance(dataset, IterableDataset):
            size = self.args.per_device_train_batch_size * self.accelerator.num_processes * steps
            dataset = repeat_iterable_dataset(
                dataset.shuffle(seed=self.args.seed), mini_repeat_count=1, batch_size=size, repeat_count=steps
            )
        return self._get_dataloader(
            dataset=dataset, description="Training", batch_size=self._train_batch_size * steps,
            sampler_fn=self._get_train_sampler, is_training=True,
        )  # fmt: skip

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        steps = self.args.gradient_accumulation_steps
        rows: Any = dataset or self.train_dataset
        return RepeatSampler(
            data_source=rows, mini_repeat_count=1, repeat_count=steps,
            batch_size=self.args.per_device_train_batch_size * self.accelerator.num_processes * steps,
            shuffle=True, seed=self.args.seed,
        )  # fmt: skip


def trained_by_own_loader(case: Case, mesh: Mesh) -> Outcome:
    return grpo_jobs.outcome(partial(trainer, kind=OwnLoader), table, case, mesh, True)


class OwnLoss(DistillationTrainer):
    """Computes a loss of its own of what it takes for whole completions."""

    def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        parent: Any = super()
        loss, *sums = parent._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        return loss / inputs["completion_mask"].sum(), *sums
