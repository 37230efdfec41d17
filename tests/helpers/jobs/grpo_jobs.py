"""Reinforcement runs for live ranks: GRPOTrainer and RLOOTrainer in a ring, or without the plugin."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils import gather, gather_object
from datasets import Dataset
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PrinterCallback
from trl.models import prepare_fsdp
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

import hf_ring_attn
from hf_ring_attn import RingConfig
from tests.helpers.jobs import sft_pictures, trl_runs
from tests.helpers.jobs.fsdp2_trainers import under_fsdp2
from tests.helpers.jobs.preference_jobs import gradients_of_one_rank, policy, rows_times_ranks, teacher
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import lora, texts, tokenizer
from tests.helpers.jobs.trainer_jobs import a_folder, launched
from tests.helpers.jobs.trl_runs import OFFLINE, Outcome, arguments, evaluation, first_error, numbers, outcome, quiet
from tests.helpers.models.tiny_models import SIZES, build

GRPO, RLOO = GRPOTrainer.__module__, RLOOTrainer.__module__
TRAIN_ROWS, EVAL_ROWS, BATCH, STEPS = 24, 4, 4, 3


@dataclass(frozen=True, eq=False)
class Case(trl_runs.Case):
    """One way to reinforce, and why it is here.

    Args:
        fixed: completions are pieces of a text, of uneven lengths; else the model generates them.
        rloo: by RLOOTrainer. stream: prompts come from an IterableDataset.
        prompt: bytes of the longest. chat: prompts are conversations. judge: a model gives the reward, one with the
            attention of the trained model, or of this name.
        fsdp: in a ring FSDP2 shards the weights.
        images: a model of `tiny_models.VISION`, asked about pictures; without_images: every so many prompts have none;
            with ``text_only`` no prompt has.
    """

    fixed: bool = True
    rloo: bool = False
    stream: bool = False
    prompt: int = 20
    chat: bool = False
    judge: bool | str = False
    fsdp: bool = False
    images: str = ""
    without_images: int = 0
    text_only: bool = False


def prompts(case: Case, count: int, start: int = 0) -> Any:
    """Of uneven lengths, the longest of ``case.prompt`` bytes, with a column for the reward."""
    pieces = [text[: 1 + number * 7 % case.prompt] for number, text in enumerate(texts(count, start))]
    turns: list[Any] = [[{"role": "user", "content": piece}] for piece in pieces] if case.chat else pieces
    rows = Dataset.from_list([{"prompt": turn, "liked": number % 5} for number, turn in enumerate(turns)])
    if case.images and not case.text_only:
        rows = sft_pictures.with_pictures(rows, "", case.without_images)
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


def judged(case: Case, attention: str) -> dict[str, Any]:
    """A reward model."""
    if not case.judge:
        return {}
    sizes = {**SIZES, "vocab_size": 259, "num_labels": 1, "pad_token_id": 0, "max_position_embeddings": 256}
    own = case.judge if isinstance(case.judge, str) else attention
    judge = build("LlamaForSequenceClassification", own, **sizes)
    judge.config._name_or_path = "judge"
    return {"reward_funcs": [judge, letters], "reward_processing_classes": [tokenizer(), None]}


# ---- a run -----------------------------------------------------------------------------------------------------------


def reference(images: str, _path: str, attn_implementation: str, **_: Any) -> Any:
    """The model that a trainer loads for its reference: the policy's weights come from no path here."""
    return teacher(attn_implementation, "LlamaForCausalLM", images)


def reader(images: str) -> Any:
    """A tokenizer, or the processor of a model of images."""
    if not images:
        return tokenizer()
    words: Any = sft_pictures.processor(images)
    words.tokenizer.padding_side = "left"  # as Qwen's own is: TRL pads prompts there, and their types of tokens not
    return words


def trainer(case: Case, folder: str, attention: str, kind: Any = None, **options: Any) -> Any:
    rows = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "num_generations": 2}
    args = arguments(folder, **{"max_steps": STEPS, "max_completion_length": 12, **rows, **case.args})
    net = policy(attention, case.kind, case.images)
    words = reader(case.images)
    made_by: Any = RLOOTrainer if case.rloo else GRPOTrainer
    config_of: Any = RLOOConfig if case.rloo else GRPOConfig
    if case.fixed:
        made_by = FixedRLOO if case.rloo else made_by
        options = {**({} if case.rloo else {"rollout_func": of_text}), **options}
    with mock.patch(f"{RLOO if case.rloo else GRPO}.create_model_from_path", partial(reference, case.images)):
        made = (kind or made_by)(
            model=net, args=config_of(**args), processing_class=words,
            train_dataset=prompts(case, TRAIN_ROWS), eval_dataset=prompts(case, EVAL_ROWS, start=4000),
            **{
                "reward_funcs": [letters, digits, later], "peft_config": lora() if case.lora else None,
                **judged(case, attention), **options,
            },
        )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def trained(case: Case, mesh: Mesh, self_check: bool = True, kind: Any = None) -> Outcome:
    """The steps and an evaluation on this rank; ``mesh.alone`` runs as many replicas without the plugin."""
    return reinforced(partial(trainer, kind=kind), table, case, mesh, self_check)


def reinforced(make: Any, table: Callable[[Any], dict[str, float]], case: Any, mesh: Mesh, self_check: bool) -> Outcome:
    """`trained`, for a trainer that ``make`` makes, with the numbers of its ``table`` of completions."""
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet():
        grpo = make(case, folder, "ring_fp32" if mesh.cp > 1 else "sdpa")
        hf_ring_attn.configure(grpo.model, RingConfig(self_check=self_check))
        if case.fsdp and mesh.cp > 1:
            under_fsdp2(grpo, {})
            if getattr(grpo, "ref_model", None) is not None:
                grpo.ref_model = prepare_fsdp(grpo.ref_model, grpo.accelerator)
        return outcome(grpo, lambda host: {**evaluation(host), **table(host)})


def compiled_graphs(case: Case, mesh: Mesh) -> tuple[Outcome, int]:
    """`trained` with torch_compile, and the number of graphs that it compiled."""
    torch._dynamo.reset()
    counters.clear()
    found = trained(case.with_args(torch_compile=True, torch_compile_backend="eager"), mesh)
    return found, counters["stats"]["unique_graphs"]


def table(grpo: Any) -> dict[str, float]:
    """The numbers of the last generation's table of completions, and its number of entries of each column."""
    logs = grpo._logs
    columns = {**logs["rewards"], "advantages": logs["advantages"], **logs["extra"]}
    found = {f"table/{name}/{at}": x for name, column in columns.items() for at, x in enumerate(column)}
    found |= {f"table/{name}": float(len(logs[name])) for name in ("prompt", "completion", "advantages")}
    return {name: -1.0 if x != x else float(x) for name, x in found.items()}


# ---- defects -------------------------------------------------------------------------------------------------------


def prompts_for_each_rank() -> Any:
    """The sampler takes prompts for every rank of a ring."""
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
    return first_error(trainer, case, mesh, ring, **options)


class OtherTokens(GRPOTrainer):
    """Learns from rows that are not the batch's."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        parent: Any = super()
        return parent._compute_loss(model, {**inputs, "prompt_ids": inputs["prompt_ids"].flip(0)})


class AlsoLogits(GRPOTrainer):
    """Adds a term of the logits of completions, which it computes without their prompts."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        parent: Any = super()
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return parent._compute_loss(model, inputs) + 0.1 * (logits.square().mean(-1) * mask).mean()


class OwnRewards(GRPOTrainer):
    """Scales rewards by a number of all of them."""

    def _calculate_rewards(self, *args: Any) -> Any:
        parent: Any = super()
        rewards = parent._calculate_rewards(*args)
        return rewards / (1 + gather(rewards).sum() / self.accelerator.num_processes / rewards.numel())


class OwnAdvantages(GRPOTrainer):
    """Clips advantages by their norm over all rows, adds noise, and logs."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        parent: Any = super()
        output = parent._generate_and_score_completions(inputs)
        advantages = output["advantages"]
        everyone = self.accelerator.gather(advantages)
        noise = 0.1 * torch.randn(advantages.shape)
        output["advantages"] = advantages.clamp(-1, 1) / everyone.norm() + noise.to(advantages)
        self._metrics["train"]["rows"].append(float(len(gather_object(advantages.tolist()))))
        return output


class OwnRandomness(GRPOTrainer):
    """Draws from a generator that nobody seeded, and has no super()."""

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        drawn = random.Random(dist.get_rank() if dist.is_initialized() else 0)
        lengths = [len(x) % 5 + drawn.random() for x in completion_ids_list]
        rewards = torch.tensor([[float(x)] * len(self.reward_funcs) for x in lengths])
        return gather(rewards)


OVERRIDES: dict[str, Any] = {kind.__name__: kind for kind in (OwnRewards, OwnAdvantages, OwnRandomness)}


def overridden(name: str, mesh: Mesh) -> list[dict[str, float]]:
    """The steps of a trainer with an override, and an evaluation."""
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet():
        case = Case("", {"gradient_accumulation_steps": 2}, fixed=False)
        grpo = trainer(case, folder, "ring_fp32" if mesh.cp > 1 else "sdpa", OVERRIDES[name])
        grpo.train()
        found = [numbers(entry) for entry in grpo.state.log_history if "loss" in entry]
        return [*found, evaluation(grpo)]


# ---- the first inner step --------------------------------------------------------------------------------------------


class Ratios(GRPOTrainer):
    """Notes the ratio of each token's probability to that when it was generated."""

    def get_off_policy_mask(self, advantages: Tensor, mask: Tensor, **given: Any) -> Tensor:  # type: ignore[override]
        apart = (given["per_token_logps"] - given["sampling_per_token_logps"]).detach() * mask
        self.__dict__.setdefault("ratios", []).append(apart.exp())
        return torch.ones_like(advantages)


def ratios(case: Case, mesh: Mesh) -> list[Tensor]:
    """[B, C] of each step."""
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet():
        grpo = trainer(case.with_args(off_policy_mask_threshold=1e9), folder, "ring_fp32", kind=Ratios)
        grpo.train()
        found: list[Tensor] = grpo.ratios
        return found
