"""Random numbers in modules that are replicated on every rank: a vision tower's dropout must match on all ranks.

Each rank contributes its share of a tower's gradient. The shares add up only if all ranks drew the same: dropout
(LoRA's, too), skipped layers, masked spans of sound. So in a batch's context ranks draw from a shared seed, except in
the text model: its seed combines the rank with a number that all draw when it begins, so that a checkpoint's recompute
gets the same numbers. A ring of several kinds of GPUs draws the same only within a kind.

The program's own numbers (shuffled rows, masked tokens) are those of one process if the model draws none.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ...comm.ring import Ring
from ..patching.compiler import uncompiled

SEEDS = 1 << 31
"""Number of seeds that every generator accepts."""
_MULTIPLIER = 0x9E3779B1
"""Multiplier of the rank in a seed; odd, so that seeds differ for all ranks below `SEEDS`."""


def seed_of_rank(seed: int, rank: int) -> int:
    """A rank's own seed, made of one that all have."""
    return (seed + _MULTIPLIER * rank) % SEEDS


def draw_seed() -> int:
    """Draws a seed from this rank's generator."""
    return int(torch.randint(SEEDS, (), device="cpu"))


def next_seed() -> int:
    """A seed that this rank's generator would draw. It is left as it was, and the next call gives another seed."""
    global _peeked
    state = torch.get_rng_state()
    _peeked = (state, _peeked[1] + 1 if torch.equal(state, _peeked[0]) else 0)
    seed = draw_seed()
    torch.set_rng_state(state)
    return seed_of_rank(seed, _peeked[1])


_peeked: tuple[Tensor, int] = torch.empty(0, dtype=torch.uint8), 0
"""The state of the last `next_seed`, and how many had it before."""


_DOING = "sent the state of its random generators"


class RingRandomness:
    """Switches random generators in the context of a batch with images. All ranks give the same seed."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seeds, self._rank = random.Random(seed), rank
        self._own: list[Any] | None = None
        self._after: list[int] = []
        self._seeded: list[Any] = []
        self._drew = False

    def enter(self) -> None:
        """Enters the context: from here on all ranks draw the same. A new seed at each entry."""
        self._own, self._drew = [source.get() for source in _sources()], False
        self._seed(self._seeds.randrange(SEEDS))

    # Not compiled: a compiler would keep the traced state of generators.
    @uncompiled("generators are switched between graphs")
    def enter_text(self) -> None:
        """Enters the text model: each rank draws its own numbers."""
        self._note_draws()
        here, after = torch.randint(SEEDS, (2,), device="cpu").tolist()
        self._after.append(after)
        self._seed(seed_of_rank(here, self._rank))

    @uncompiled("generators are switched between graphs")
    def leave_text(self) -> None:
        """Leaves the text model, also after an error: all ranks draw the same again."""
        if self._after:
            self._note_draws()
            self._seed(self._after.pop())

    def leave(self) -> None:
        """Leaves the context and restores this rank's own generators; one number further if the model drew any."""
        self._note_draws()
        own, self._own = self._own, None
        self._after.clear()
        for source, state in zip(_sources(), own or (), strict=False):
            source.put(state)
        if self._drew:
            draw_seed()

    def _seed(self, seed: int) -> None:
        seed_all(seed)
        self._seeded = [source.get() for source in _sources()]

    def _note_draws(self) -> None:
        """Notes if numbers were drawn since the last seed."""
        now = zip(_sources(), self._seeded, strict=False)
        self._drew = self._drew or any(not source.same(source.get(), seeded) for source, seeded in now)


class _Source(NamedTuple):
    """A generator of the process that models draw from."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    seed: Callable[[int], object]
    same: Callable[[Any, Any], bool]


_HOST = (
    _Source(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed, torch.equal),
    _Source(random.getstate, random.setstate, random.seed, operator.eq),
    _Source(
        numpy.random.get_state,
        numpy.random.set_state,
        numpy.random.seed,
        lambda one, other: bool(one[2:] == other[2:] and (one[1] == other[1]).all()),
    ),
)
_GPUS = _Source(
    torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all, torch.cuda.manual_seed_all,
    lambda one, other: all(map(torch.equal, one, other)),
)  # fmt: skip

_GPU = _Source(torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed, torch.equal)
"""The generator of this rank's own GPU, which another rank can take over; `_GPUS` are those of all."""


def _sources() -> tuple[_Source, ...]:
    """The generators, GPUs last: one without a saved state has nothing to restore."""
    return (*_HOST, _GPUS) if torch.cuda.is_initialized() else _HOST


class Draws:
    """The process's generators as they are now: was anything drawn since, and back to them."""

    def __init__(self) -> None:
        self._before = [(source, source.get()) for source in _sources()]

    def drew(self) -> bool:
        """Returns True if numbers were drawn since."""
        return any(not source.same(source.get(), state) for source, state in self._before)

    def restore(self) -> None:
        """Sets the generators back."""
        for source, state in self._before:
            source.put(state)


@contextmanager
def preserved() -> Iterator[None]:
    """Restores the process's generators on exit."""
    before = Draws()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def as_first_rank(ring: Ring) -> Iterator[None]:
    """Inside, every rank draws what the ring's first rank draws; afterwards each goes on with its own generators."""
    with nullcontext() if ring.rank == 0 else preserved():
        follow_first_rank(ring)
        yield


def follow_first_rank(ring: Ring) -> None:
    """Makes every rank go on with the generators of the ring's first rank."""
    sources = (*_HOST, _GPU) if torch.cuda.is_initialized() else _HOST
    states = ring.of_first(None if ring.rank > 0 else [source.get() for source in sources], _DOING)
    for source, state in zip(sources, states, strict=True) if ring.rank > 0 else ():
        source.put(state)


def seed_all(seed: int) -> None:
    """Seeds all generators alike."""
    for source in _sources():
        source.seed(seed)
