"""The last batch of a stream (IterableDataset): accelerate's loaders know its size only if they dispatch it to ranks.

Each rank of a ring reads the stream by itself, since the dispatcher gives ranks other batches. Without the size an
evaluation counted the rows of a last batch that is not full as often as those of a full one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.utils import find_batch_size
from torch.utils.data import IterableDataset

from ...comm.ring import world_size
from ..context.mesh import ring_of_process
from ..patching.changes import Patch

_COUNTED = "_hf_ring_attn_counted"
"""The attribute of a loader that accelerate would have dispatched."""


def count_last_batch(loader: Any) -> Any:
    """Marks a prepared loader, so that the size of a stream's last batch is known at its end."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        vars(loader)[_COUNTED] = True
    return loader


def _iter(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Patches a loader's iteration to set ``remainder`` at the end of a stream, as the dispatcher does.

    With several rings accelerate fills the last batch up with rows of the first one, so there it stays unknown.
    """

    def __iter__(self: Any) -> Iterator[Any]:
        for batch in original(self):
            if self.end_of_dataloader and _COUNTED in vars(self) and 1 < ring_of_process().size == world_size():
                self.remainder = find_batch_size(batch) or -1
            yield batch

    return __iter__


PATCHES = (Patch("accelerate.data_loader:DataLoaderShard.__iter__", "(self)", _iter),)
"""The change to accelerate's loaders."""
