"""The longest row that fits, and options that make a row fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..integration.memory.auto_saving import HOST_LEFT_FREE, LEFT_FREE
from .hardware import GIB
from .memory import Memory, activations, kept_bytes, memory_of
from .seconds import Seconds, seconds_of
from .setup import Setup
from .shape import ModelShape

CHUNK = 16384
"""The most tokens of an MLP's chunk that a search tries."""
LEAST_CHUNK = 1024
MOST_TOKENS = 2**30
AHEAD = (2, 5, 10, 20, 40)
"""How many percent beyond the longest row so far a search looks: memory may fall where a ring takes fewer heads."""
ABOUT = 1.03
"""Times of two setups that differ by less are about the same."""
QLORA = "--method qlora"
OFFLOAD = "--offload-above"
"""The change that puts checkpoints into host memory, as many as it holds."""
CHUNKS = "--mlp-tokens"
"""The change that runs MLPs over chunks, at least two."""
KEEP = "--keep-layers"
"""The change that keeps as many layers as keep_layers="auto" does."""

Changes = Sequence[tuple[str, dict[str, Any]]]

CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--save-attention", {"save_attention": True}),
    ("--no-save-attention", {"save_attention": False}),
    ("--loss chunked", {"loss": "chunked"}),
    ("checkpointing", {"checkpointing": True}),
    ("--no-checkpointing", {"checkpointing": False}),
    ("--shard fsdp2", {"shard": "fsdp2"}),
    ("--optimizer adamw_8bit", {"optimizer": "adamw_8bit"}),
    ("--offload-params", {"offload_params": True}),
    ("--liger", {"liger": True}),
    (QLORA, {"method": "qlora"}),
)
"""Options that a search tries beside `KEEP`, `OFFLOAD` and `CHUNKS`, as a user writes them. The last one changes what
is trained, so it is only tried where the user's own setup does not fit."""


@dataclass(frozen=True)
class Forecast:
    """The memory and time of one setup. ``changes``: how it differs from the user's."""

    setup: Setup
    memory: Memory
    seconds: Seconds
    memory_gib: float
    changes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return _fits(self.memory, self.setup, self.memory_gib)


def _fits(memory: Memory, setup: Setup, memory_gib: float) -> bool:
    """Into a GPU, and into its share of host memory."""
    return memory.total <= memory_gib * GIB and sum(memory.host.values()) <= setup.gpu.host_memory_gib * GIB


def forecast(model: ModelShape, setup: Setup, memory_gib: float, changes: tuple[str, ...] = ()) -> Forecast:
    return Forecast(setup, memory_of(model, setup), seconds_of(model, setup), memory_gib, changes)


def decided(model: ModelShape, setup: Setup, keeps: bool = False) -> Setup:
    """``setup``, with saved attention if save_attention="auto" turns it on: see `auto_saving`.

    With ``offload_above`` and a host memory that is not known, it does not; nor on one GPU, unless keep_layers="auto"
    asks for it (``keeps``).
    """
    saved = replace(setup, save_attention=True)
    if not setup.checkpointing or (setup.ring_size == 1 and not keeps):
        return setup
    if setup.offload_above is not None:
        there, more = (sum(memory_of(model, one).host.values()) for one in (setup, saved))
        free = setup.gpu.host_memory_gib * GIB - there
        if math.isinf(free) or more - there > (1 - HOST_LEFT_FREE) * free:
            return setup
    return saved if _room(model, saved) >= 0 else setup


def kept(model: ModelShape, setup: Setup) -> int:
    """How many layers keep_layers="auto" keeps beside saved attention: see `auto_saving`."""
    checkpointed = replace(setup, save_attention=True, keep_layers=0)
    fit = _room(model, checkpointed) // max(activations(model, setup).values())
    return max(0, min(int(fit), len(model.layers)))


def _room(model: ModelShape, setup: Setup) -> float:
    """Bytes of a GPU that "auto" may still fill."""
    memory = memory_of(model, setup)
    outside = sum(memory.outside.values())
    usable = setup.gpu.memory_gib * GIB - outside
    slack = memory.total - outside - memory.allocated
    return usable - max(LEFT_FREE * usable, slack) - memory.allocated


def most_tokens(model: ModelShape, at: Callable[[int], Setup], memory_gib: float) -> int:
    """The longest row that fits, a multiple of 2 * ring size; 0 if none does. ``at``: the setup of so many tokens."""
    unit = 2 * at(1).ring_size

    def fits(units: int) -> bool:
        longer = at(units * unit)
        return _fits(memory_of(model, longer), longer, memory_gib)

    found, longer = 0, int(fits(1))
    while longer:
        found = _last(fits, longer, MOST_TOKENS // unit)
        ahead = (found + max(1, found * percent // 100) for percent in AHEAD)
        longer = next((units for units in ahead if units * unit <= MOST_TOKENS and fits(units)), 0)
    return found * unit


def _last(fits: Callable[[int], bool], low: int, most: int) -> int:
    """The last number that fits before one that does not; ``low`` fits."""
    high = 2 * low
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def alternatives(model: ModelShape, own: Forecast, memory_gib: float, most: int = 3) -> list[Forecast]:
    """Setups that fit ``memory_gib`` among all combinations of `CHANGES`, the fastest first; of two that are about as
    fast the one with fewer.

    If the user's ``own`` fits, only faster ones, which train the same.
    """
    tried = (_changed(model, own.setup, chosen) for chosen in _combinations(own.setup))
    others = [one for one in tried if one is not None and not (own.fits and QLORA in one[1])]
    found = [forecast(model, other, memory_gib, changes) for other, changes in others]
    found = [one for one in found if one.fits and (not own.fits or one.seconds.total < 0.98 * own.seconds.total)]
    found.sort(key=lambda one: (round(one.seconds.total, 2), len(one.changes)))
    return [one for one in found if not any(_is_simpler(few, one) for few in found)][:most]


def longer_rows(model: ModelShape, own: Forecast, memory_gib: float) -> list[Forecast]:
    """Setups with longer rows than the longest of the user's ``own``: each the longest of those with as few changes,
    and longer than any with fewer. If the user's ``own`` fits, they train the same."""
    by_count: dict[int, list[Forecast]] = {}
    for chosen in _combinations(own.setup):
        trains_alike = QLORA not in dict(chosen) or not own.fits
        if trains_alike and (one := _longest(model, own.setup, chosen, memory_gib)):
            by_count.setdefault(len(chosen), []).append(one)
    found = [own]
    for count in sorted(by_count):
        most = max(one.setup.tokens for one in by_count[count])
        if most > ABOUT * found[-1].setup.tokens:
            about = (one for one in by_count[count] if ABOUT * one.setup.tokens >= most)
            found.append(min(about, key=lambda one: one.seconds.total / one.setup.tokens**2))
    return found[1:]


def _longest(model: ModelShape, setup: Setup, chosen: Changes, memory_gib: float) -> Forecast | None:
    """The longest row with these changes; None if they change nothing, or no row fits."""

    def at(tokens: int) -> Setup:
        changed = _changed(model, replace(setup, tokens=tokens), chosen)
        return replace(setup, tokens=tokens) if changed is None else changed[0]

    tokens = most_tokens(model, at, memory_gib) if _changed(model, setup, chosen) else 0
    changed = _changed(model, replace(setup, tokens=tokens), chosen) if tokens else None
    if changed is None:
        return None
    if OFFLOAD in dict(chosen):  # what stays on a GPU was rounded for that row: with it a longer one may fit
        tokens = most_tokens(model, lambda tokens: replace(changed[0], tokens=tokens), memory_gib)
    return forecast(model, replace(changed[0], tokens=tokens), memory_gib, changed[1])


def _is_simpler(few: Forecast, one: Forecast) -> bool:
    """With fewer changes about as fast: more of them are not worth it, unless they train what the user wants to."""
    trains_alike = QLORA in one.changes or QLORA not in few.changes
    return trains_alike and len(few.changes) < len(one.changes) and few.seconds.total <= ABOUT * one.seconds.total


def _stay(model: ModelShape, setup: Setup) -> float:
    """GiB of checkpoints that stay on a GPU if the host takes all others that it can hold."""
    of_states = sum(memory_of(model, replace(setup, offload_above=None)).host.values()) / GIB
    away = 0.9 * (setup.gpu.host_memory_gib - of_states)
    return float(math.ceil(max(0.0, len(model.layers) * kept_bytes(model, setup) / GIB - away)))


def _chunk(setup: Setup) -> int:
    """The tokens of a chunk: `CHUNK`, or a smaller power of two of which a rank has several; 0 if it has few."""
    chunk = CHUNK
    while chunk >= setup.tokens_per_rank:
        chunk //= 2
    return chunk if chunk >= LEAST_CHUNK else 0


def _combinations(setup: Setup) -> Iterator[Changes]:
    """The combinations of changes that a search tries."""
    useful = [(name, new) for name, new in CHANGES if replace(setup, **new) != setup and _is_possible(setup, name)]
    useful += [(CHUNKS, {}), (OFFLOAD, {}), (KEEP, {})] if setup.takes_options else []
    for count in range(1, len(useful) + 1):
        yield from itertools.combinations(useful, count)


def _changed(model: ModelShape, setup: Setup, chosen: Changes) -> tuple[Setup, tuple[str, ...]] | None:
    """The setup with these changes, and their names; None if one of them changes nothing, or hosts cannot run it."""
    changed = replace(setup, **{key: value for _, new in chosen for key, value in new.items()})
    names = [name for name, _ in chosen]
    if CHUNKS in names:
        changed = replace(changed, mlp_tokens=_chunk(changed))
        if changed.chunk in (0, setup.chunk):
            return None
        names[names.index(CHUNKS)] = f"{CHUNKS} {changed.chunk}"
    if OFFLOAD in names:
        changed = replace(changed, offload_above=_stay(model, changed))
        if changed.offload_above == setup.offload_above:
            return None
        names[names.index(OFFLOAD)] = f"{OFFLOAD} {changed.offload_above:g}"
    if KEEP in names:
        changed = replace(changed, keep_layers=kept(model, changed))
        if changed.keep_layers == setup.keep_layers:
            return None
        names[names.index(KEEP)] = f"{KEEP} {changed.keep_layers}"
    checkpoints = changed.save_attention or changed.keep_layers or changed.offload_above is not None
    # The step of a paged optimizer, which is bitsandbytes's, fails with sharded weights.
    fails = changed.is_sharded and changed.optimizer.startswith("paged")
    fails = fails or (changed.offload_params and not changed.is_sharded)
    fails = fails or bool(changed.keep_layers and changed.offload_above is not None)
    return None if fails or (checkpoints and not changed.checkpointing) else (changed, tuple(names))


def _is_possible(setup: Setup, name: str) -> bool:
    if name in ("--shard fsdp2", "--offload-params"):
        return setup.gpus > 1
    if name == "--save-attention":
        return setup.takes_options
    return name != QLORA or setup.method == "lora"
