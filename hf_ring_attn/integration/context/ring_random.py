"""Random numbers in modules that are replicated on every rank: a vision tower's dropout must match on all ranks.

Each rank contributes its share of a tower's gradient. The shares add up only if all ranks drew the same: dropout
(LoRA's, too), skipped layers, masked spans of sound. So in a batch's context ranks draw from a shared seed, except in
the text model: its seed combines the rank with a number that all draw when it begins, so that a checkpoint's recompute
gets the same numbers. A ring of several kinds of GPUs draws the same only within a kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch

from ...comm.ring import Ring

SEEDS = 1 << 31
"""Number of seeds that every generator accepts."""
_APART = 0x9E3779B1
"""Multiplier of the rank in a seed; odd, so that seeds differ for all ranks below `SEEDS`."""


def drawn() -> int:
    """Draws a seed from this rank's generator."""
    return int(torch.randint(SEEDS, (), device="cpu"))


class RingRandomness:
    """Switches random generators in the context of a batch with images. All ranks give the same seed."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seeds, self._rank = random.Random(seed), rank
        self._own: list[Any] | None = None
        self._after: list[int] = []

    def enter(self) -> None:
        """Enters the context: from here on all ranks draw the same. A new seed at each entry."""
        self._own = [source.get() for source in _sources()]
        seed_all(self._seeds.randrange(SEEDS))

    # Not compiled: a compiler would keep the traced state of generators.
    @torch.compiler.disable(reason="generators are switched between graphs")  # type: ignore[untyped-decorator]
    def apart(self) -> None:
        """Enters the text model: each rank draws its own numbers."""
        here, after = torch.randint(SEEDS, (2,), device="cpu").tolist()
        self._after.append(after)
        seed_all((here + _APART * self._rank) % SEEDS)

    @torch.compiler.disable(reason="generators are switched between graphs")  # type: ignore[untyped-decorator]
    def together(self) -> None:
        """Leaves the text model, also after an error: all ranks draw the same again."""
        if self._after:
            seed_all(self._after.pop())

    def leave(self) -> None:
        """Leaves the context and restores this rank's own generators."""
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
    """The generators, GPUs last: one without a saved state has nothing to restore."""
    return (*_HOST, _GPUS) if torch.cuda.is_initialized() else _HOST


@contextmanager
def of_first_rank(ring: Ring) -> Iterator[None]:
    """Draws on every rank what the ring's first rank draws, as one process would; the others' generators are kept."""
    sources = (*_HOST, _GPU) if torch.cuda.is_initialized() else _HOST
    own = [source.get() for source in sources]
    if ring.rank > 0:
        theirs = ring.of_first(None, _SENT)
        for source, state in zip(sources, theirs, strict=True):
            source.put(state)
    else:
        ring.of_first(own, _SENT)
    try:
        yield
    finally:
        if ring.rank > 0:
            for source, state in zip(sources, own, strict=True):
                source.put(state)


_SENT = "sent the state of its random generators"
_GPU = _Source(torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed)
"""That of this rank's GPU: ranks have different ones."""


def seed_all(seed: int) -> None:
    for source in _sources():
        source.seed(seed)
