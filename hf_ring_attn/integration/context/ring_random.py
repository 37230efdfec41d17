"""Random numbers of what every rank computes whole: what a tower's dropout drops must be the same on all ranks.

Each rank reads all images, goes on with its part of the row, and returns its share of a tower's gradient. That adds up
to one tower's gradient only if all of them drew the same: dropout, LoRA's too, layers that are skipped, masked spans of
sound. Ranks may be seeded otherwise, or have drawn otherwise since. So in a batch's context ranks draw from a seed that
the ring shares, but for the text model, which has other tokens on each rank: its seed is made of a number that all draw
where it begins, and of the rank. So whoever puts the generators back and runs a model again, as checkpointing does,
gets the same numbers again. What stands behind the text model (a head, a loss) draws alike again.
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
_APART = 0x9E3779B1
"""What tells the seeds of neighbouring ranks apart: odd, so that it makes no two ranks of less than `SEEDS` alike."""


def drawn() -> int:
    """A seed, by this rank's own generator."""
    return int(torch.randint(SEEDS, (), device="cpu"))


class RingRandomness:
    """Of a batch with images: the random numbers of its context.

    Args:
        seed: the same on every rank of the ring.
        rank: of this process in it.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._seeds, self._rank = random.Random(seed), rank
        self._own: list[Any] | None = None
        self._after: list[int] = []

    def enter(self) -> None:
        """The context begins: from here on all ranks draw the same. Each time anew."""
        self._own = [source.get() for source in _sources()]
        seed_all(self._seeds.randrange(SEEDS))

    # Not compiled: what a compiler traces of generators, it would keep.
    @torch.compiler.disable(reason="generators are switched between graphs")  # type: ignore[untyped-decorator]
    def apart(self) -> None:
        """The text model begins: each rank draws its own."""
        here, after = torch.randint(SEEDS, (2,), device="cpu").tolist()
        self._after.append(after)
        seed_all((here + _APART * self._rank) % SEEDS)

    @torch.compiler.disable(reason="generators are switched between graphs")  # type: ignore[untyped-decorator]
    def together(self) -> None:
        """The text model has ended, by an error perhaps."""
        if self._after:
            seed_all(self._after.pop())

    def leave(self) -> None:
        """The context has ended: this rank goes on where its own numbers ended."""
        own, self._own = self._own, None
        self._after.clear()
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
