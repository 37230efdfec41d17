"""Samplers in rings: transformers' BatchRebalanceSampler deals rows out to rings, and shuffles need no seed."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import get_sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler

from ..context import ring_random
from ..context.mesh import ring_of_process
from ..patching.changes import Original, around
from .rings_as_processes import processes_counted


@around
def rings_balanced(original: Original, self: Any, train_dataset: Any = None) -> Any:
    """Patches Trainer's `_get_train_sampler`: with "batch_rebalance" each ring gets what a process gets without rings.

    Other samplers are the same on all processes, and accelerate deals out their batches.
    """
    with processes_counted(self):  # a program's own sampler, which counts rings, may call it
        sampler = original(self, train_dataset)
    size = ring_of_process().size
    if size == 1 or not isinstance(sampler, BatchRebalanceSampler):
        return sampler
    return type(sampler)(
        sampler.lengths, sampler.effective_batch_size // size, sampler.dp_size // size, sampler.grad_accum,
        sampler.shuffle, sampler.seed, sampler.rank // size, sampler.drop_last,
    )  # fmt: skip


def shuffle_alike(loader: Any) -> None:
    """Lets ranks of a ring shuffle alike at the start of an epoch, also if the program set no seed, or one for each.

    accelerate sends the generator of a shuffle from the first process to several others. One ring counts as one
    process, whose sampler draws from torch's own generator.
    """
    sampler = get_sampler(loader)
    if getattr(sampler, "generator", loader) is None and (ring := ring_of_process()).size > 1:
        ring_random.follow_first_rank(ring)
