"""transformers' BatchRebalanceSampler, which deals rows out to processes, deals them out to rings."""

from __future__ import annotations

from typing import Any

from transformers.trainer_pt_utils import BatchRebalanceSampler

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
