"""TRL's GRPOTrainer and RLOOTrainer in a ring: each ring samples, rewards and scores rows once.

Prompts, completions, rewards and metrics are those of a process for each ring (`rings_as_processes`). Completions are
generated in whole rows, with the random numbers of the ring's first rank, whose result all its ranks take. Then models
compute sharded rows (`whole_row_calls`), so the trainers' own losses run as they were written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ... import errors
from ..context import ring_random
from ..context.mesh import ring_of_process
from ..log import say, warn
from ..patching.changes import Original, Patch, around
from ..patching.modules import Replaced
from . import (
    accelerate,
    prediction,
    ring_overrides,
    trainer,
    trainer_facts,
    trainer_overrides,
    vllm_generation,
    whole_row_steps,
)
from . import rings_as_processes as rings
from .first_rank_tools import environments_of_first_rank, tools_of_first_rank

# ---- refusals --------------------------------------------------------------------------------------------------------


def start(host: Any) -> None:
    """Counts a new trainer's generation batch by rings, and refuses what cannot be exact.

    Raises:
        UnsupportedOption, PartialGroups.
    """
    args = host.args
    replicas = host.accelerator.num_processes // host.accelerator.parallelism_config.cp_size
    # TRL's config counted processes; its sampler takes as many prompts from the data at a time.
    args.generation_batch_size = args.per_device_train_batch_size * replicas * args.steps_per_generation
    if args.generation_batch_size % args.num_generations:
        counted = f"per_device_train_batch_size {args.per_device_train_batch_size} x {replicas} rings x "
        counted += f"steps_per_generation {args.steps_per_generation}"
        raise errors.PartialGroups(args.generation_batch_size, counted, args.num_generations)
    generations, rows = args.num_generations_eval or args.num_generations, args.per_device_eval_batch_size * replicas
    if args.eval_strategy != "no" and rows % generations:  # TRL's config counted processes here, too
        counted = f"per_device_eval_batch_size {args.per_device_eval_batch_size} x {replicas} rings"
        raise errors.PartialGroups(rows, counted, generations)
    _refuse(host)
    accelerate.give_whole_rows(host.accelerator, host.reward_funcs)
    if args.use_vllm:
        warn(VLLM, everywhere=False)
    say(
        f"{type(host).__name__} generates {args.generation_batch_size} completions at a time: {replicas} x "
        f"{args.per_device_train_batch_size} (a ring has one batch) x steps_per_generation={args.steps_per_generation}"
    )


def _refuse(host: Any) -> None:
    """Refuses what is not tested in a ring. Some attributes are set after the start, so each step checks again."""
    trainer_facts.refuse_step(host)
    trainer_overrides.refuse_unknown(host, _COUNT_PROCESSES)
    if not getattr(host, "ring_fp32_exact", False):
        ring_overrides.wrap_overrides(host, _SEE_ROWS)
    if host.args.use_transformers_continuous_batching:
        named = f"{type(host).__name__} with use_transformers_continuous_batching"
        raise errors.UnsupportedOption(named, _UNTRIED)


_COUNT_PROCESSES = ("_generate", "_get_per_token_logps_and_entropies", "prediction_step")
"""Methods whose override might gather from every rank, or compute whole rows."""
_SEE_ROWS = ("_generate_and_score_completions", "_calculate_rewards")
"""Methods that see rows of a process, and gather from others."""
VLLM = "vLLM itself was never run with ring_fp32: tests have a stand-in for its server and its colocated engines"
_UNTRIED = "its rows were never tested in a ring; generate text with transformers' generate, or in a rollout_func"

# ---- rows ------------------------------------------------------------------------------------------------------------


@trainer_facts.in_rings
def _log_probs(original: Original, self: Any, model: nn.Module, *given: Any, **named: Any) -> Any:
    calls: Any = nullcontext()
    if trainer_overrides.SHARDS_CALLS not in vars(self):
        if torch.is_grad_enabled():
            trainer.warn_of_whole_rows(self)
        else:  # of the batches that TRL cuts
            calls = whole_row_steps.sharded_calls(self, model, inside=False)
    with calls:
        return original(self, model, *given, **named)


# ---- a step ----------------------------------------------------------------------------------------------------------


def _prepare_inputs(host: Any, model: nn.Module, inputs: Any) -> Any:
    whole = host._prepare_inputs(inputs)
    return functools.partial(_step, host, model, whole), whole


@contextmanager
def _step(host: Any, model: nn.Module, whole: Any) -> Iterator[None]:
    calls = whole_row_steps.sharded_calls(host, model, inside=False)
    with calls, trainer_facts.inputs_handed_on(host, whole), rings.rings_as_processes(host):
        yield


@trainer_facts.in_rings
def _score(original: Original, self: Any, inputs: Any) -> Any:
    _refuse(self)
    with rings.rings_as_processes(self), environments_of_first_rank(self, ring_of_process()):
        replicas = self.accelerator.num_processes
        rows, generations = len(inputs) * replicas, self.num_generations_eval
        if not self.model.training and rows % generations:
            counted = f"{len(inputs)} rows of an evaluation x {replicas} rings"
            raise errors.PartialGroups(rows, counted, generations)
        return original(self, inputs)


@around
def generate(original: Original, self: Any, prompts: list[Any]) -> Any:
    """Patches `_generate`: all ranks of a ring take its first rank's completions."""
    ring = ring_of_process()
    # All ranks generate, since FSDP2 gathers weights from all; a rollout_func may give each something else.
    with ring_random.as_first_rank(ring), tools_of_first_rank(self, ring, prompts):
        return ring.of_first(original(self, prompts), "sent its completions")


@around
def _rewards(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    # A reward may cost money, or be random: a ring asks for it once. Models may be sharded over all ranks.
    functions = self.reward_funcs
    if ring_of_process().rank > 0:
        functions = [one if isinstance(one, nn.Module) else _no_reward for one in functions]
    with Replaced(self, "reward_funcs", functions):
        return original(self, *args, **kwargs)


def _no_reward(prompts: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(prompts)


def _predict(original: Callable[..., Any], host: Any, *given: Any) -> Any:
    with rings.rings_as_processes(host):
        return original(host, *given)


IMAGES = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""Inputs that these trainers hand on beside rows."""
_LOG_PROBS = (
    "(self, model, input_ids, attention_mask, logits_to_keep, batch_size=, compute_entropy=, compute_aux_loss=, "
    f"{', '.join(f'{name}=' for name in IMAGES)})"
)


def _patches(kind: str) -> list[Patch]:
    module = kind.partition(":")[0]
    return [
        trainer_overrides.patch_prepare(kind, trainer_facts.has_ring, _prepare_inputs),
        Patch(f"{kind}._generate_and_score_completions", "(self, inputs)", _score),
        Patch(f"{kind}._generate", "(self, prompts)", generate),
        Patch(f"{kind}._calculate_rewards", "(self, inputs, prompts, completions, completion_ids_list)", _rewards),
        Patch(f"{kind}._get_per_token_logps_and_entropies", _LOG_PROBS, _log_probs),
        prediction.patch_prediction(kind, _predict),
        Patch(f"{module}:gather", "(tensor)", rings.gather),
        Patch(f"{module}:gather_object", "(object)", rings.gather_object),
        Patch(f"{module}:set_seed", "(seed, device_specific=, deterministic=)", rings.set_seed),
        Patch(f"{module}:shuffle_sequence_dict", "(seq_dict)", rings.shuffle),
        *vllm_generation.PATCHES,
    ]


GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
RLOO = "trl.trainer.rloo_trainer:RLOOTrainer"
PATCHES = {kind: _patches(kind) for kind in (GRPO, RLOO)}
