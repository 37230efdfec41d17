"""Loaders of which one ring gets more batches or rows than another (`even_batches=False`).

In training it would wait for the others. That follows from the sampler that all ranks have, so each rank knows it
before the first step, without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from accelerate.data_loader import BatchSamplerShard

from ... import errors
from ..log import warn
from ..patching.modules import Replaced

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

    Raises:
        UnevenBatches: on every rank.
    """
    counts, args = unequal_counts(trainer.callback_handler.train_dataloader), trainer.args
    if counts is None:
        return
    fewest, most = (_steps(args, count) for count in counts)  # Trainer counts epochs in a process's own batches
    if fewest != most or most * args.gradient_accumulation_steps > counts[0]:
        raise errors.UnevenBatches(*counts)


def _steps(args: Any, batches: int) -> int:
    """The steps of a Trainer whose process gets so many batches an epoch."""
    if args.max_steps > 0:
        return int(args.max_steps)
    steps: int = math.ceil(args.num_train_epochs * max(1, math.ceil(batches / args.gradient_accumulation_steps)))
    return steps


@contextmanager
def evened(loader: Any) -> Iterator[None]:
    """Fills up the last batches of a loader for an evaluation, which drops the rows that are there twice.

    Without that one ring has more rows than another, or a batch more: numbers are gathered in equal sizes only.
    """
    shard = _shard_of(loader)
    with nullcontext() if shard is None else Replaced(shard, "even_batches", True):
        yield


def ends_unequally(loader: Any) -> bool:
    """Returns True if rings may have unequal numbers of rows in the last batch of a loader.

    Raises:
        UnevenBatches: some have a batch more.
    """
    if (counts := unequal_counts(loader)) is not None:
        raise errors.UnevenBatches(*counts)
    shard = _shard_of(loader)
    return shard is not None and shard.num_processes > 1 and not (shard.even_batches or shard.drop_last)


def warn_of(loader: Any) -> None:
    """Warns of a loader of a program's own loop, which may stop in time, or evaluate each ring alone."""
    if (counts := unequal_counts(loader)) is not None:
        warn(_WAITS.format(*counts), everywhere=False)


_WAITS = (
    "with even_batches=False some rings get more batches of a loader ({1}) than others ({0}). A ring that trains on "
    "one which others lack, or gathers, waits for them until a timeout. Use even_batches=True, which is accelerate's "
    "default, or drop_last=True, or stop before. An evaluation by Trainer fills its last batches up."
)
