"""Random numbers of what every rank computes whole: what a tower's dropout drops must be the same on all ranks.

Each rank reads all images, goes on with its part of the row, and returns its share of a tower's gradient. That adds up
to one tower's gradient only if all of them drew the same: dropout, LoRA's too, layers that are skipped, masked spans of
sound. Ranks may be seeded otherwise, or have drawn otherwise since. So what runs around a text model draws from a seed
that the ring shares, and the text model, which has other tokens on each rank, from the rank's own generators.
What a GPU makes of a seed depends on its kind: a ring of several kinds draws alike on none but those of one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch

SEEDS = 1 << 31
"""How many seeds there are: as many as every generator takes."""


def drawn() -> int:
    """A seed, by this rank's own generator."""
    return int(torch.randint(SEEDS, (), device="cpu"))


class Alike:
    """Of a batch with images: switches this process between the rank's own random numbers and those of its ring.

    Args:
        seed: the same on every rank of the ring.
    """

    def __init__(self, seed: int) -> None:
        self._seeds = random.Random(seed)
        self._own: list[Any] | None = None

    # Not compiled: what a compiler traces of generators, it would keep.
    @torch.compiler.disable(reason="generators are switched between graphs")  # type: ignore[untyped-decorator]
    def share(self) -> None:
        """From here on all ranks draw the same. Each time anew: what ran before may have drawn more on one rank."""
        if self._own is None:
            self._own = [source.get() for source in _sources()]
            seed_all(self._seeds.randrange(SEEDS))

    @torch.compiler.disable(reason="generators are switched between graphs")  # type: ignore[untyped-decorator]
    def give_back(self) -> None:
        """From here on this rank goes on where its own numbers ended."""
        own, self._own = self._own, None
        for source, state in zip(_sources(), own or (), strict=False):
            source.put(state)


class _Source(NamedTuple):
    """A generator of the process that models draw from."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    seed: Callable[[int], object]


_HOST = (
    _Source(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
    _Source(random.getstate, random.setstate, random.seed),
    _Source(numpy.random.get_state, numpy.random.set_state, numpy.random.seed),
)
_GPUS = _Source(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all, torch.cuda.manual_seed_all)


def _sources() -> tuple[_Source, ...]:
    """GPUs last: one that was not there when states were taken has nothing to put back."""
    return (*_HOST, _GPUS) if torch.cuda.is_initialized() else _HOST


def seed_all(seed: int) -> None:
    for source in _sources():
        source.seed(seed)
