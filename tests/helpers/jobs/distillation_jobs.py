"""On-policy distillation for live ranks: DistillationTrainer in a ring, or without the plugin, and what it gives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import IterableDataset
from transformers import PrinterCallback
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.utils import RepeatSampler, repeat_iterable_dataset

from hf_ring_attn import RingConfig
from tests.helpers.jobs import grpo_jobs, trl_runs
from tests.helpers.jobs.preference_jobs import policy, teacher
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import lora
from tests.helpers.jobs.trl_runs import Outcome

BATCH, STEPS = 4, 3


@dataclass(frozen=True, eq=False)
class Case(trl_runs.Case):
    """One way to distill; fields as in `grpo_jobs.Case`.

    Args:
        attention: the teacher's, if it is another than the student's.
    """

    stream: bool = False
    prompt: int = 20
    chat: bool = False
    fsdp: bool = False
    images: str = ""
    without_images: int = 0
    text_only: bool = False
    attention: str = ""


def trainer(case: Case, folder: str, attention: str, kind: Any = DistillationTrainer, **options: Any) -> Any:
    rows = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    args = trl_runs.arguments(folder, **{"max_steps": STEPS, "max_completion_length": 12, **rows, **case.args})
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
    return grpo_jobs.reinforced(trainer, table, case, mesh, self_check)


def table(host: Any) -> dict[str, float]:
    return {f"table/{name}": float(len(column)) for name, column in host._logs.items()}


def one_step(case: Case, mesh: Mesh, ring: RingConfig | None = None, **options: Any) -> str:
    return trl_runs.first_error(trainer, case, mesh, ring, **options)


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
    return grpo_jobs.reinforced(partial(trainer, kind=OwnLoader), table, case, mesh, True)


class OwnLoss(DistillationTrainer):
    """Computes a loss of its own of what it takes for whole completions."""

    def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        parent: Any = super()
        loss, *sums = parent._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        return loss / inputs["completion_mask"].sum(), *sums
