"""`Accelerator.gather_for_metrics` for rings: one value per ring, since its ranks share a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from ... import errors
from ...comm.fingerprint import fingerprint
from ...comm.ring import Ring
from ..context.mesh import ring_group
from . import uneven_batches

_SAME_VALUES = (
    "A gathered value is taken once per ring, so make it the same on all its ranks first: in a Trainer by "
    "RingConfig(loss='gathered') or accelerator.reduce(count), in a loop by sharded.gather(x) for what each token has, "
    "and sharded.reduce(loss)."
)
_CHECKED_VALUES = 1 << 18


def gather_once_per_ring(accelerator: Any, data: Any, use_gather_object: bool = False) -> Any:
    """Implements `Accelerator.gather_for_metrics` with one entry per ring instead of one per rank.

    Every rank sends 1/W of its tensor, so memory and traffic are those of one entry per ring.

    Args:
        data: nested tensors [N, ...] (or scalars, taken as [1]), the same on all ranks of a ring; or a picklable list.

    Returns:
        The same structure of tensors [rings * N, ...] in the order of data parallel ranks, on every rank; at the end of
        a dataloader cut to the samples that are left. An object of one ring is returned as it is.

    Raises:
        RanksDiffer: the ranks of a ring hold different values, such as shards that were never gathered.
        UnevenBatches: on every rank, if a ring has no more batches than this, and others have.
    """
    ring, tensors = Ring.of(ring_group(accelerator)), _tensors(data)
    unequal = uneven_batches.ends_unequally(accelerator)
    if use_gather_object or tensors is None:
        return _cut(accelerator, _gather_objects(data, ring.size))

    facts = {f"value {index}": _checked(tensor) for index, tensor in enumerate(tensors)}
    ring.agree(facts, ring.small_device(accelerator.device), _SAME_VALUES, doing="gathered values for metrics")

    # accelerate drops no samples in one process if a tensor has none: router logits stay whole beside an aux_loss.
    keeps = ring.size == accelerator.num_processes and any(tensor.dim() == 0 for tensor in tensors)

    def once(tensor: Tensor) -> Tensor:
        rows = tensor if tensor.dim() else tensor[None]
        sizes = _sizes(accelerator, rows, ring.size) if unequal else [rows.numel()]
        share = max(1, -(-max(sizes) // ring.size))
        flat = torch.nn.functional.pad(rows.reshape(-1), (0, share * ring.size - rows.numel()))
        everyone = accelerator.gather(flat[ring.rank * share : (ring.rank + 1) * share]).view(-1, ring.size * share)
        if unequal:
            whole = torch.cat([each[:size] for each, size in zip(everyone, sizes, strict=True)])
        else:  # logits are large, so no copy
            whole = everyone[:, : rows.numel()]
        entries: Tensor = whole.reshape(-1, *rows.shape[1:])
        return entries if keeps else _cut(accelerator, entries)

    return recursively_apply(once, data)


def _gather_objects(data: Any, ring_size: int) -> Any:
    """The entries of each ring's list; of one ring, what it has."""
    everyone: list[Any] = gather_object([data])
    rings = [everyone[first : first + ring_size] for first in range(0, len(everyone), ring_size)]
    for values in rings:
        if not all(_same(value, values[0]) for value in values):
            raise errors.RanksDiffer("values", values, _SAME_VALUES)
    if len(rings) == 1:  # accelerate returns the object of one process as it is
        return data
    return [value for values in rings for value in values[0]]


def _sizes(accelerator: Any, rows: Tensor, ring_size: int) -> list[int]:
    """The number of elements that each ring has."""
    sizes: list[int] = accelerator.gather(torch.tensor([rows.numel()], device=rows.device)).tolist()
    return sizes[::ring_size]


def gather_sums_per_ring(accelerator: Any, tensor: Tensor) -> Tensor:
    """Sums numbers [N, ...] over the ranks of each ring, floats in float64; shapes as in `gather_once_per_ring`."""
    rows = tensor if tensor.dim() else tensor[None]
    ranks = accelerator.gather(rows).view(-1, accelerator.parallelism_config.cp_size, *rows.shape)
    wide = torch.float64 if tensor.dtype.is_floating_point else torch.int64
    sums = ranks.sum(1, dtype=wide).to(tensor.dtype)
    entries: Tensor = _cut(accelerator, sums.reshape(-1, *rows.shape[1:]))
    return entries


def _tensors(data: Any) -> list[Tensor] | None:
    """The tensors of nested tuples, lists and dicts; None if anything else is in there."""
    if isinstance(data, Tensor):
        return [data]
    if isinstance(data, (tuple, list, Mapping)):
        parts = [_tensors(part) for part in (data.values() if isinstance(data, Mapping) else data)]
        return None if any(part is None for part in parts) else [tensor for part in parts for tensor in part or ()]
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and fingerprint(one) == fingerprint(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return (one == other) is not False  # arrays compare to arrays: those stay unchecked


def _checked(tensor: Tensor) -> object:
    """A tensor, or the shape and a sample of a large one, which distinguish shards without a copy."""
    step = max(1, tensor.numel() // _CHECKED_VALUES)
    return tensor if step == 1 else {"shape": list(tensor.shape), f"each {step}": tensor.reshape(-1)[::step]}


def _cut(accelerator: Any, entries: Any) -> Any:
    """Drops the samples that were repeated to fill the last batch, by accelerate's count."""
    state = accelerator.gradient_state
    left = state.remainder if state.end_of_dataloader else 0
    has_rows = hasattr(entries, "__getitem__") and not isinstance(entries, Mapping)
    return entries[:left] if left > 0 and has_rows else entries
