"""Streams (IterableDataset) in rings: each rank reads one by itself, since a dispatcher would give ranks other rows.

Rings get the rows that the dispatcher gives processes without rings, also of a last batch that is not full, and know
how many rows of it are no repetitions. Without that an evaluation counted them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import find_batch_size
from torch.utils.data import IterableDataset

from ...comm.ring import world_size
from ..context.mesh import ring_of_process
from ..log import warn
from ..patching.changes import Original, Patch, around
from . import one_reader
from .rings_as_processes import RingsAsProcesses
from .samplers import shuffle_alike

_COUNTED = "_hf_ring_attn_counted"
"""The attribute of a loader that accelerate would have dispatched."""


class DealtStream(IterableDatasetShard):  # type: ignore[misc]  # accelerate has no types
    """The rows of one ring of several, as accelerate's dispatcher deals them out to processes.

    ``left``: rows of the last batch of all rings, without those that fill it up; -1 until then, and in the main process
    if workers read the stream.
    """

    left = -1

    def __iter__(self) -> Iterator[Any]:
        whole = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        first: list[Any] = []
        batch: list[Any] = []
        self.left = -1
        for row in self.dataset:
            if len(batch) == whole:
                yield from self._dealt(batch)
                batch = []
            batch.append(row)
            if len(first) < self.num_processes:
                first.append(row)
        if batch and (len(batch) == whole or not self.drop_last):
            self.left = len(batch)
            share = math.ceil(self.left / self.num_processes)
            yield from self._dealt([*batch, *first * self.num_processes][: share * self.num_processes])

    def _dealt(self, batch: list[Any]) -> list[Any]:
        share = len(batch) // self.num_processes
        return batch[self.process_index * share : (self.process_index + 1) * share]


def deal_as_dispatched(loader: Any, given: Any, accelerator: Any, split_batches: bool) -> Any:
    """Makes a loader that accelerate prepared of ``given`` for several rings deal out a stream as `DealtStream` does.

    accelerate fills a last batch with more rows, and gives rings other files of a stream of several, so that one ring
    may have fewer batches than another, which waits for it. One ring learns the size of the last batch.
    """
    stream = getattr(given, "dataset", None)
    if not isinstance(stream, IterableDataset) or loader is given:
        return loader
    vars(loader)[_COUNTED] = True
    rings = RingsAsProcesses(accelerator)
    count, index = rings.num_processes, rings.process_index
    if count > 1 and given.batch_size is not None:
        if given.num_workers > 0:
            warn(_WORKERS.format(count), everywhere=False)
        dealt = DealtStream(stream, given.batch_size, given.drop_last, count, index, split_batches)
        vars(loader.base_dataloader)["dataset"] = dealt  # a loader takes no other by assignment
    return loader


_WORKERS = (
    "workers read a stream (IterableDataset) for {} rings: an evaluation counts the rows that fill its last batch, and "
    "with several workers rings get rows in another order than accelerate gives them without rings. "
    "dataloader_num_workers=0 gives the numbers without rings."
)


@around
def _iter(original: Original, self: Any) -> Iterator[Any]:
    """Patches a loader's iteration to set ``remainder`` at the end as the dispatcher does, where that would run. Ranks
    shuffle alike, and get the batches that one of them reads for all."""
    shuffle_alike(self)
    # It counts rows of tensors: twice as many as samples in batches of pairs.
    dispatched = _COUNTED in vars(self) or isinstance(self.dataset, one_reader.ReadOnce)
    for batch in one_reader.exchanged(self, original(self)):
        if self.end_of_dataloader and isinstance(self.dataset, DealtStream):
            self.remainder = self.dataset.left
        elif self.end_of_dataloader and dispatched and 1 < ring_of_process().size == world_size():
            self.remainder = find_batch_size(batch) or -1
        yield batch


PATCHES = (Patch("accelerate.data_loader:DataLoaderShard.__iter__", "(self)", _iter),)
"""The change to accelerate's loaders."""
