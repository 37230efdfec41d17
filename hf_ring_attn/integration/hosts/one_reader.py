"""dispatch_batches=True in a ring: its first rank reads, and sends each batch to the others.

Images are decoded, and random augmentations drawn, once a ring. All ranks keep the sampler, so that lengths, epochs and
skipped batches are those of a loader that every rank reads, and go on with the random state of the first.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, IterableDataset

from ... import errors
from ...comm.broadcast import tensor_of_first
from ...comm.ring import Ring
from ..context.mesh import ring_of_process
from ..context.ring_random import Draws, follow_first_rank

_WANTED = "dispatch_batches=True"
_DOING = "sent its batch to the other ranks"
_ENDS = "The loaders of all ranks must have as many batches: a sampler of one's own needs the same seed on every rank."


class ReadOnce(Dataset[Any]):
    """A data set that the first rank of a ring reads for all: the others get nothing for a row.

    Attributes:
        is_read: this rank reads it.
    """

    def __init__(self, rows: Any, reads: bool) -> None:
        self._read, self.is_read = rows, reads

    def __len__(self) -> int:
        return len(self._read)

    def __getitem__(self, index: Any) -> Any:
        return self._read[index] if self.is_read else None

    def __getitems__(self, indices: list[Any]) -> Any:
        several = getattr(self._read, "__getitems__", None)
        return several(indices) if self.is_read and several is not None else [self[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name == "_read":  # while a worker gets a copy
            raise AttributeError(name)
        return getattr(self._read, name)


def _nothing(_rows: Any) -> dict[str, Any]:
    """The batch of a rank that does not read, until `exchanged` puts the first rank's in its place."""
    return {}


_IDLE = {
    "collate_fn": _nothing, "num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0,
    "worker_init_fn": None, "pin_memory": False,
}  # fmt: skip
"""Settings of a loader that does not read."""


def check(given: Any, rings: int, options: Any) -> None:
    """Refuses loaders of which accelerate's dispatcher would make other batches. ``options``: of its loaders.

    Raises:
        DispatchedBatches: a stream, or rows that several rings would share in another way.
    """
    if isinstance(given.dataset, IterableDataset):
        raise errors.DispatchedBatches(_WANTED)
    if options.use_stateful_dataloader:
        raise errors.DispatchedBatches(f"{_WANTED} with use_stateful_dataloader=True", "ranks would save unlike states")
    if rings > 1 and not _fills_all(given, 1 if options.split_batches else rings):
        how = f"{_WANTED} with {rings} rings and a last batch that is not full, or a batch sampler of one's own"
        raise errors.DispatchedBatches(how, "accelerate would deal those rows to processes as no ring gets them")


def _fills_all(given: Any, batches: int) -> bool:
    """Returns True if the rows of a loader make whole steps of so many batches."""
    if type(given.batch_sampler) is not BatchSampler:
        return False
    return bool(len(given.sampler) % (given.batch_size * batches) == 0)


def read_once(loader: Any) -> Any:
    """Makes a loader that accelerate prepared for the ranks of a ring one that the first rank reads."""
    reads = ring_of_process().rank == 0
    own = vars(loader.base_dataloader)  # a loader takes no other by assignment
    own.update({} if reads else _IDLE, dataset=ReadOnce(own["dataset"], reads))
    return loader


def exchanged(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a prepared loader; those of the first rank on all ranks, if that alone reads them."""
    if not isinstance(loader.dataset, ReadOnce):
        return batches
    return (_sent if loader.dataset.is_read else _received)(loader, batches, ring_of_process())


def _sent(loader: Any, batches: Iterator[Any], ring: Ring) -> Iterator[Any]:
    """The first rank's batches, each after it was sent. An error of the data is sent in place of a batch."""
    while True:
        tensors: list[Tensor] = []
        draws = Draws()
        try:
            batch, drew = next(batches), draws.drew()
            message = pickle.dumps((recursively_apply(partial(_described, tensors), batch), drew))
        except StopIteration:
            return
        except Exception as error:
            ring.of_first(f"{type(error).__name__}: {error}", _DOING)
            raise
        ring.of_first(message, _DOING)
        _compare_ends(loader, ring)
        if drew:
            follow_first_rank(ring)
        for tensor in tensors:
            tensor_of_first(tensor, ring, _DOING)
        yield batch


def _received(loader: Any, batches: Iterator[Any], ring: Ring) -> Iterator[Any]:
    """The first rank's batches on another rank, which counts its own, and goes on with the first rank's random state if
    that drew numbers to read: so the program draws the same on all ranks."""
    for _ in batches:
        message = ring.of_first(None, _DOING)
        if isinstance(message, str):
            raise errors.RefusedElsewhere({0: message})
        _compare_ends(loader, ring)
        form, drew = pickle.loads(message)
        if drew:
            follow_first_rank(ring)
        yield recursively_apply(partial(_filled, ring, loader.device), form, test_type=_is_described)


def _compare_ends(loader: Any, ring: Ring) -> None:
    """Refuses a batch that is the last one of some ranks only."""
    device = ring.small_device(loader.device or torch.device("cpu"))
    ring.agree({"end of the data": bool(loader.end_of_dataloader)}, device, _ENDS, doing=_DOING)


@dataclass(frozen=True)
class _Described:
    """The form of a tensor, of which a rank makes space for it. ``device``: its type."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


def _described(tensors: list[Tensor], x: Tensor) -> _Described:
    tensors.append(x)
    return _Described(x.shape, x.dtype, x.device.type)


def _is_described(x: object) -> bool:
    return isinstance(x, _Described)


def _filled(ring: Ring, device: torch.device | None, x: _Described) -> Tensor:
    """The first rank's tensor. The loader put it on its ``device``, or left it where it was."""
    place = device if device is not None and device.type == x.device else torch.device(x.device)
    return tensor_of_first(torch.empty(x.shape, dtype=x.dtype, device=place), ring, _DOING)
