"""The longest row that fits, and options that make a row fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .hardware import GIB
from .memory import Memory, kept_bytes, memory_of
from .seconds import Seconds, seconds_of
from .setup import Setup
from .shape import ModelShape

CHUNK = 16384
"""Tokens of an MLP's chunk that a search tries."""
MOST_TOKENS = 2**30
ABOUT = 1.03
"""Times of two setups that differ by less are about the same."""
QLORA = "--method qlora"

CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--save-attention", {"save_attention": True}),
    ("no --save-attention", {"save_attention": False}),
    ("--loss chunked", {"loss": "chunked"}),
    ("checkpointing", {"checkpointing": True}),
    ("--no-checkpointing", {"checkpointing": False}),
    (f"--mlp-tokens {CHUNK}", {"mlp_tokens": CHUNK}),
    ("--shard fsdp2", {"shard": "fsdp2"}),
    ("--optimizer adamw_8bit", {"optimizer": "adamw_8bit"}),
    ("--offload-params", {"offload_params": True, "shard": "fsdp2"}),
    ("--liger", {"liger": True}),
    (QLORA, {"method": "qlora"}),
)
"""Options that a search tries, as a user writes them. The last one changes what is trained, so it is only tried where
the user's own setup does not fit."""


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


def most_tokens(model: ModelShape, setup: Setup, memory_gib: float) -> int:
    """The longest row that fits, a multiple of 2 * ring size; 0 if none does."""
    unit = 2 * setup.ring_size

    def fits(units: int) -> bool:
        longer = replace(setup, tokens=units * unit)
        return _fits(memory_of(model, longer), longer, memory_gib)

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high * unit < MOST_TOKENS:
        low, high = high, 2 * high
    while high - low > 1:  # not by steps of 1: memory may fall where the ring takes fewer heads at a time
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def alternatives(model: ModelShape, own: Forecast, memory_gib: float, most: int = 3) -> list[Forecast]:
    """Setups that fit ``memory_gib`` among all combinations of `CHANGES`, the fastest first; of two that are about as
    fast the one with fewer.

    If the user's ``own`` fits, only faster ones, which train the same.
    """
    others = [(other, changes) for other, changes in _others(model, own.setup) if not (own.fits and QLORA in changes)]
    found = [forecast(model, other, memory_gib, changes) for other, changes in others]
    found = [one for one in found if one.fits and (not own.fits or one.seconds.total < 0.98 * own.seconds.total)]
    found.sort(key=lambda one: (round(one.seconds.total, 2), len(one.changes)))
    return [one for one in found if not any(_is_simpler(few, one) for few in found)][:most]


def _is_simpler(few: Forecast, one: Forecast) -> bool:
    """With fewer changes about as fast: more of them are not worth it, unless they train what the user wants to."""
    trains_alike = QLORA in one.changes or QLORA not in few.changes
    return trains_alike and len(few.changes) < len(one.changes) and few.seconds.total <= ABOUT * one.seconds.total


def _offload(model: ModelShape, setup: Setup) -> tuple[str, dict[str, Any]]:
    """The change that puts into host memory what it holds of the checkpoints, or all of them."""
    away = 0.9 * setup.gpu.host_memory_gib
    stay = math.ceil(max(0.0, len(model.layers) * kept_bytes(model, setup) / GIB - away))
    return f"--offload-above {stay}", {"offload_above": float(stay), "checkpointing": True}


def _others(model: ModelShape, setup: Setup) -> Iterator[tuple[Setup, tuple[str, ...]]]:
    """Each combination of changes that changes something, and that hosts can run."""
    by_saved = {saves: _offload(model, replace(setup, save_attention=saves)) for saves in (False, True)}
    changes = (*CHANGES[:-1], by_saved[setup.save_attention], CHANGES[-1])
    useful = [(name, new) for name, new in changes if replace(setup, **new) != setup and _is_possible(setup, name)]
    for count in range(1, len(useful) + 1):
        for chosen in itertools.combinations(useful, count):
            saves = {**vars(setup), **{key: value for _, new in chosen for key, value in new.items()}}["save_attention"]
            chosen = tuple(by_saved[saves] if "offload_above" in new else (name, new) for name, new in chosen)
            changed = replace(setup, **{key: value for _, new in chosen for key, value in new.items()})
            keeps = changed.save_attention or changed.offload_above is not None
            # The step of a paged optimizer, which is bitsandbytes's, fails with sharded weights.
            fails = changed.is_sharded and changed.optimizer.startswith("paged")
            if (changed.checkpointing or not keeps) and not fails:  # both are for checkpoints
                yield changed, tuple(name for name, _ in chosen)


def _is_possible(setup: Setup, name: str) -> bool:
    if name in ("--shard fsdp2", "--offload-params"):
        return setup.gpus > 1
    return name != QLORA or setup.method == "lora"
