"""Embeddings that a program gathers from all processes, as negatives of a contrastive loss.

With accelerate's functions a trainer sees one process for each ring (`rings_as_processes`). torch's own gather from
each rank, and ranks of a ring have the same rows: each would come several times, and be its own negative.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ...comm.ring import world_size
from ..context.batch_context import live_batches, rings_of_batches
from ..context.mesh import ring_of_process
from ..patching.changes import Patch


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches one of torch's functions to refuse the same rows of several ranks."""

    signature = inspect.signature(original)

    def gather(*args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # What a library gathers without gradients are weights and numbers. A program may so gather rows, for a queue.
        is_of_library = caller.startswith(LIBRARIES)
        trains = any(isinstance(x, Tensor) and x.requires_grad for x in (*args[1:], *kwargs.values()))
        if torch.compiler.is_compiling() or (is_of_library and not trains) or caller.startswith("accelerate."):
            return work
        given = signature.bind(*args, **kwargs).arguments
        gathered, tensor = [*given.values()][:2]
        if not given.get("async_op") and (trains or (tensor.dim() > 1 and tensor.is_floating_point())):
            parts = gathered.detach().flatten().split(tensor.numel()) if isinstance(gathered, Tensor) else gathered
            refuse_same(parts, trains)
        return work

    return gather


LIBRARIES = ("accelerate.", "deepspeed.", "hf_ring_attn.", "peft.", "torch.", "transformers.", "trl.")


def refuse_same(gathered: Sequence[Tensor], trains: bool = False) -> None:
    """Refuses tensors of all ranks of the world if all ranks of a ring gave the same.

    Args:
        trains: they have gradients, so they may be of a batch that the program has dropped.

    Raises:
        SameRowsGathered: on every rank of the ring.
    """
    if len(gathered) != world_size() or gathered[0].numel() < 2:
        return
    rings = {ring_of_process(), *(context.ring for context in live_batches())}  # a trainer's batches may have ended
    rings |= rings_of_batches() if trains else set()
    for ring in (ring for ring in rings if ring.size > 1):
        first, *others = (gathered[rank].detach() for rank in ring.ranks())
        if all(torch.equal(first, other) for other in others):
            raise errors.SameRowsGathered(ring.size)


PATCHES = (
    Patch("torch.distributed:all_gather", "(tensor_list, tensor, group=, async_op=)", _refusing),
    Patch("torch.distributed:all_gather_into_tensor", "(output_tensor, input_tensor, group=, async_op=)", _refusing),
)
