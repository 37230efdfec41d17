"""Reinforcement runs for live ranks: GRPOTrainer and RLOOTrainer in a ring, or without the plugin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.context.mesh import ring_group
from hf_ring_attn.integration.hosts.rings_as_processes import RingsAsProcesses
from tests.helpers.jobs.dpo_jobs import gradients_of_one_rank, numbers, rows_times_ranks, teacher
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import OFFLINE, Outcome, config, lora, model, quiet, texts, tokenizer
from tests.helpers.jobs.trainer_jobs import a_folder, launched

TRAIN_ROWS, EVAL_ROWS, BATCH, STEPS = 24, 2, 4, 3


@dataclass(frozen=True, eq=False)
class Case:
    """One way to reinforce, and why it is here.

    Args:
        args: for GRPOConfig or RLOOConfig.
        fixed: completions are pieces of a text, of uneven lengths; else the model generates them.
        reference: beta > 0 has another model's weights for its reference.
        rloo: by RLOOTrainer. kind: the class of the model. stream: prompts come from an IterableDataset.
        truncates: some completions do not end, and mask_truncated_completions leaves rows without completion tokens.
    """

    why: str
    args: dict[str, Any] = field(default_factory=dict)
    fixed: bool = True
    reference: bool = False
    lora: bool = False
    rloo: bool = False
    kind: str = "LlamaForCausalLM"
    stream: bool = False
    prompt: int = 20
    chat: bool = False

    def with_args(self, **more: Any) -> Case:
        return dataclasses.replace(self, args={**self.args, **more})


def prompts(case: Case, count: int, start: int = 0) -> Any:
    """Of uneven lengths, the longest of ``case.prompt`` bytes, with a column for the reward."""
    pieces = [text[: 1 + number * 7 % case.prompt] for number, text in enumerate(texts(count, start))]
    turns: list[Any] = [[{"role": "user", "content": piece}] for piece in pieces] if case.chat else pieces
    rows = Dataset.from_list([{"prompt": turn, "liked": number % 5} for number, turn in enumerate(turns)])
    return rows.to_iterable_dataset() if case.stream else rows


# ---- what a program gives the trainer --------------------------------------------------------------------------------


def letters(completions: list[Any], liked: list[int], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    """A reward that differs within a group."""
    found = [len(set(str(text))) / 10 + len(text) % (2 + like) for text, like in zip(completions, liked, strict=True)]
    log_metric("letters/most", max(found))
    log_extra("letters", found)
    return found


def digits(completions: list[Any], **_: Any) -> list[float | None]:
    """Has no opinion of long completions."""
    return [None if len(text) > 20 else float(sum(map(ord, str(text))) % 3) for text in completions]


async def later(completions: list[Any], **_: Any) -> list[float]:
    """A reward that is awaited."""
    return [float(len(text) % 4) for text in completions]


def completions(count: int, first: int, step: int) -> list[list[int]]:
    """Token ids of uneven lengths, of which two of three end: row ``first + i`` of generation ``step``."""
    words: Any = tokenizer()
    rows = []
    for number in range(first, first + count):
        text = texts(200, 1000)[(number * 7 + step * 31) % 200]
        ids = words(text[: 1 + (number * 5 + step) % 23])["input_ids"]
        rows.append(ids if number % 3 == 0 else [*ids, words.eos_token_id])
    return rows


def of_text(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A rollout_func: takes the place of generation, and numbers rows over all processes."""
    first = trainer.accelerator.process_index * len(prompts)
    ids = completions(len(prompts), first, trainer.state.global_step)
    words: Any = tokenizer()
    given = [words.apply_chat_template(p, tokenize=False) if isinstance(p, list) else p for p in prompts]
    return {"prompt_ids": words(given)["input_ids"], "completion_ids": ids, "logprobs": None}


class FixedRLOO(RLOOTrainer):
    """RLOOTrainer has no rollout_func."""

    ring_fp32_exact = True

    def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> Any:
        first = self.accelerator.process_index * len(prompt_ids)
        return completions(len(prompt_ids), first, self.state.global_step)


# ---- a run -----------------------------------------------------------------------------------------------------------


def trainer(case: Case, folder: str, attention: str, kind: Any = None, **options: Any) -> Any:
    given = vars(config(folder, max_steps=STEPS))
    shared = ("output_dir", "max_steps", "per_device_train_batch_size", "lr_scheduler_type", "optim",
              "logging_steps", "bf16", "use_cpu", "report_to", "seed", "save_strategy", "disable_tqdm",
              "gradient_checkpointing", "dataloader_pin_memory", "per_device_eval_batch_size")  # fmt: skip
    args: dict[str, Any] = {name: given[name] for name in shared}
    args |= {"learning_rate": 0.1, "max_grad_norm": 100.0, "num_generations": 2, "max_completion_length": 12,
             "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, **case.args}  # fmt: skip
    net = model(attention, case.kind)
    if case.reference:
        teacher(attention, case.kind).save_pretrained(f"{folder}/reference")
        net.config._name_or_path = f"{folder}/reference"
    made_by, config_of = (RLOOTrainer, RLOOConfig) if case.rloo else (GRPOTrainer, GRPOConfig)
    if case.fixed:
        made_by = FixedRLOO if case.rloo else made_by
        options = {**({} if case.rloo else {"rollout_func": of_text}), **options}
    rewards = options.pop("reward_funcs", [letters, digits, later])
    made = (kind or made_by)(
        model=net, args=config_of(**args), reward_funcs=rewards, processing_class=tokenizer(),
        train_dataset=prompts(case, TRAIN_ROWS), eval_dataset=prompts(case, EVAL_ROWS, start=4000),
        peft_config=lora() if case.lora else None, **options,
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def trained(case: Case, mesh: Mesh, self_check: bool = True) -> Outcome:
    """The steps and an evaluation on this rank; without a ring in one process, with ``mesh.dp`` batches at a time."""
    with launched(mesh if mesh.cp > 1 else Mesh(), **OFFLINE), a_folder(None) as folder, quiet():
        times = mesh.dp if mesh.cp == 1 else 1
        rows = {f"per_device_{part}_batch_size": BATCH * times for part in ("train", "eval")}
        rows["per_device_eval_batch_size"] = BATCH if mesh.cp == 1 else BATCH // mesh.dp
        grpo = trainer(case.with_args(**rows), folder, "ring_fp32" if mesh.cp > 1 else "sdpa")
        hf_ring_attn.configure(grpo.model, RingConfig(self_check=self_check))
        before = trained_parameters(grpo)
        grpo.train()
        steps = [numbers(entry) for entry in grpo.state.log_history if "loss" in entry]
        evaluation = {**numbers(grpo.evaluate()), **table(grpo)}
        group = ring_group(grpo.accelerator)
        return Outcome(1 if group is None else group.size(), steps, evaluation, before, trained_parameters(grpo))


def table(grpo: Any) -> dict[str, float]:
    """The numbers of the last generation's table of completions, and its number of entries of each column."""
    logs = grpo._logs
    columns = {**logs["rewards"], "advantages": logs["advantages"], **logs["extra"]}
    found = {f"table/{name}/{at}": x for name, column in columns.items() for at, x in enumerate(column)}
    found |= {f"table/{name}": float(len(logs[name])) for name in ("prompt", "completion", "advantages")}
    return {name: -1.0 if x != x else float(x) for name, x in found.items()}


def trained_parameters(grpo: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in grpo.model.named_parameters() if p.requires_grad}


# ---- defects -------------------------------------------------------------------------------------------------------


def prompts_for_each_rank() -> Any:
    """The sampler takes prompts for every rank of a ring."""

    def count(self: Any) -> int:
        return self.__dict__["_accelerator"].num_processes

    return mock.patch("hf_ring_attn.integration.hosts.trainer_start.STARTS", {})


def rewards_of_each_rank() -> Any:
    """The rewards of a ring are gathered from each of its ranks, as if they were of other rows."""
    everyone = lambda gathered, _size: gathered  # noqa: E731  a line of a defect
    return mock.patch("hf_ring_attn.integration.hosts.rings_as_processes.once_per_ring", everyone)


def own_random_numbers() -> Any:
    """Ranks shuffle and generate by their own random numbers."""
    return mock.patch("hf_ring_attn.integration.context.ring_random._HOST", ())


DEFECTS: dict[str, Callable[[], Any]] = {
    defect.__name__: defect
    for defect in (
        rows_times_ranks, gradients_of_one_rank, prompts_for_each_rank, rewards_of_each_rank, own_random_numbers,
    )
}  # fmt: skip


def trained_with(defect: str, case: Case, mesh: Mesh) -> Outcome | str:
    """A run with a defect, which the self-check might see, so it is off; or the refusal that a defect ends in."""
    with DEFECTS[defect]():
        try:
            return trained(case, mesh, self_check=False)
        except Exception as error:  # noqa: BLE001 - the test judges the text, whatever it is
            return f"{type(error).__name__}: {error}"


# ---- refusals ------------------------------------------------------------------------------------------------------


def one_step(case: Case, mesh: Mesh, ring: RingConfig | None = None, **options: Any) -> str:
    """What a trainer's construction and its first step raise, as "Type: text", or "trained"."""
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet():
        try:
            grpo = trainer(case.with_args(max_steps=1), folder, "ring_fp32" if mesh.cp > 1 else "sdpa", **options)
            hf_ring_attn.configure(grpo.model, ring or RingConfig())
            grpo.train()
        except Exception as error:  # noqa: BLE001 - the test judges the text, whatever it is
            return f"{type(error).__name__}: {error}"
        return "trained"
