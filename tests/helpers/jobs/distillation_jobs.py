"""On-policy distillation for live ranks: DistillationTrainer in a ring, or without the plugin, and what it gives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from transformers import PrinterCallback
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.context.mesh import ring_group
from tests.helpers.jobs import grpo_jobs, sft_pictures
from tests.helpers.jobs.grpo_jobs import trained_parameters
from tests.helpers.jobs.kinds_jobs import under_fsdp2
from tests.helpers.jobs.preference_jobs import numbers, policy, teacher
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import OFFLINE, Outcome, lora, quiet, tokenizer
from tests.helpers.jobs.trainer_jobs import a_folder, launched

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
    words: Any = tokenizer()
    if case.images:
        words = sft_pictures.processor(case.images)
        words.tokenizer.padding_side = "left"
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
        processing_class=words,
        train_dataset=grpo_jobs.prompts(given, 24),
        eval_dataset=grpo_jobs.prompts(dataclasses.replace(given, stream=False), 6, start=4000),
        **{"peft_config": lora() if case.lora else None, **options},
    )
    made.remove_callback(PrinterCallback)
    return made


def trained(case: Case, mesh: Mesh, self_check: bool = True) -> Outcome:
    """The steps and an evaluation on this rank; ``mesh.alone`` runs as many replicas without the plugin."""
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet():
        host = trainer(case, folder, "ring_fp32" if mesh.cp > 1 else "sdpa")
        hf_ring_attn.configure(host.model, RingConfig(self_check=self_check))
        if case.fsdp and mesh.cp > 1:
            under_fsdp2(host, {})
        before = trained_parameters(host)
        host.train()
        steps = [numbers(entry) for entry in host.state.log_history if "loss" in entry]
        evaluation = numbers(host.evaluate())
        evaluation |= {f"table/{name}": float(len(column)) for name, column in host._logs.items()}
        group = ring_group(host.accelerator)
        return Outcome(1 if group is None else group.size(), steps, evaluation, before, trained_parameters(host))


def one_step(case: Case, mesh: Mesh, ring: RingConfig | None = None, **options: Any) -> str:
    """What a trainer's construction and its first step raise, as "Type: text", or "trained"."""
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet():
        try:
            attention = "ring_fp32" if mesh.cp > 1 else "sdpa"
            host = trainer(case.with_args(max_steps=1), folder, attention, **options)
            hf_ring_attn.configure(host.model, ring or RingConfig())
            host.train()
        except Exception as error:  # noqa: BLE001 - the test judges the text, whatever it is
            return f"{type(error).__name__}: {error}"
        return "trained"


class OwnLoss(DistillationTrainer):
    """Computes a loss of its own of what it takes for whole completions."""

    def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        parent: Any = super()
        loss, *sums = parent._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        return loss / inputs["completion_mask"].sum(), *sums
