"""Loaders of which one ring gets more batches or rows than another (`even_batches=False`).

In training it would wait for the others. That follows from the sampler that all ranks have, so each rank knows it
before the first step, without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from transformers import Trainer

from ... import errors
from ..context.model_record import latest_record
from ..log import warn
from ..patching.modules import Replaced
from .program_methods import is_own, owner_of, set_on

Counts = tuple[int, int]
"""The fewest and the most batches that a ring gets."""


def unequal_counts(loader: Any) -> Counts | None:
    """The numbers of batches of a prepared loader if rings get unequal ones; None if not, or if it is not known."""
    shard = _shard_of(loader)
    if shard is None or shard.num_processes == 1 or shard.even_batches or shard.drop_last:
        return None
    given, rings = shard.batch_sampler, shard.num_processes
    try:
        total = len(given)
        if not shard.split_batches:
            fewest, left = divmod(total, rings)
            return (fewest, fewest + 1) if left else None
        left = len(given.sampler) % given.batch_size
    except (TypeError, AttributeError):  # a sampler without a length
        return None
    return (total - 1, total) if 0 < left <= given.batch_size // rings * (rings - 1) else None


def _shard_of(loader: Any) -> BatchSamplerShard | None:
    """accelerate's sampler of a process's batches, also below one that skips those of a resumed run."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def refuse_training(trainer: Any) -> None:
    """Refuses a Trainer in rings before its first step, unless it stops before a ring lacks a batch.

    Where rings meet at a step's last batch only, a step may have a batch less in some of them: it is averaged as in
    processes without a ring.

    Raises:
        UnevenBatches: on every rank.
    """
    counts, args = unequal_counts(trainer.callback_handler.train_dataloader), trainer.args
    if counts is None:
        return
    fewest, most = (_steps(args, count) for count in counts)  # Trainer counts epochs in a process's own batches
    in_step = args.gradient_accumulation_steps
    at_once = 1 if meets_each_batch(trainer) else in_step
    first, last = (math.ceil(count / at_once) for count in counts)  # meetings of an epoch
    if fewest != most or (first != last and most * in_step > first * at_once):
        raise errors.UnevenBatches(*counts)


def _steps(args: Any, batches: int) -> int:
    """The steps of a Trainer whose process gets so many batches an epoch."""
    if args.max_steps > 0:
        return int(args.max_steps)
    steps: int = math.ceil(args.num_train_epochs * max(1, math.ceil(batches / args.gradient_accumulation_steps)))
    return steps


def meets_each_batch(trainer: Any) -> bool:
    """Returns True if rings may wait for each other at every batch, not only at a step's last one."""
    plugin = trainer.accelerator.gradient_state.plugin_kwargs
    counts = trainer.args.include_num_input_tokens_seen != "no" or plugin.get("sync_each_batch", False)
    hosts = all(owner_of(type(trainer), name) is Trainer for name in _OF_A_BATCH)  # TRL's gather metrics
    own = any(set_on(trainer, name) is not None for name in _OF_A_BATCH) or runs_between_batches(trainer)
    return counts or not hosts or own or "DTensor" in latest_record(trainer.model).classes


_OF_A_BATCH = ("training_step", "compute_loss", "_prepare_inputs")
"""Methods that run for each batch: Trainer's own send nothing to other rings."""


def runs_between_batches(trainer: Any) -> bool:
    """Returns True for a trainer that may use gradients after each batch, which are averaged then."""
    callbacks = trainer.callback_handler.callbacks
    return is_own(trainer, "training_step") or any(is_own(one, "on_substep_end") for one in callbacks)


@contextmanager
def evened(loader: Any) -> Iterator[None]:
    """Fills up the last batches of a loader for an evaluation, which drops the rows that are there twice.

    Without that one ring has more rows than another, or a batch more: numbers are gathered in equal sizes only.
    """
    shard = _shard_of(loader)
    with nullcontext() if shard is None else Replaced(shard, "even_batches", True):
        yield


def ends_unequally(accelerator: Any) -> bool:
    """Returns True if rings may have unequal numbers of rows in this batch, the last one of a loader.

    Where some have a batch more, all tell each other if they end here: they cannot gather the next one.

    Raises:
        UnevenBatches: on every rank.
    """
    state = accelerator.gradient_state
    loader = state.active_dataloader
    if (counts := unequal_counts(loader)) is not None:
        ends = torch.tensor([int(state.end_of_dataloader)], device=accelerator.device)
        if bool(accelerator.gather(ends).any()):
            raise errors.UnevenBatches(*counts)
        return False
    shard = _shard_of(loader) if state.end_of_dataloader else None
    return shard is not None and shard.num_processes > 1 and not (shard.even_batches or shard.drop_last)


def leave_to_trainer(accelerator: Any) -> None:
    """Notes that a Trainer judges the loaders of an `Accelerator`: it refuses to train, and evens out evaluations."""
    accelerator._loaders_of_trainer = True


def warn_of(loader: Any, accelerator: Any) -> None:
    """Warns of a loader of a program's own loop, which may stop in time, or evaluate each ring alone."""
    counts = None if hasattr(accelerator, "_loaders_of_trainer") else unequal_counts(loader)
    if counts is not None:
        warn(_WAITS.format(*counts), everywhere=False)


_WAITS = (
    "with even_batches=False some rings get more batches of a loader ({1}) than others ({0}). A ring that trains on "
    "one which others lack, or gathers, waits for them until a timeout. Use even_batches=True, which is accelerate's "
    "default, or drop_last=True, or stop before."
)
