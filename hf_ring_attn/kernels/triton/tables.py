"""Schedules on the device, cached by table of tiles, since all layers of a model use the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor

from ...sharding.visible import bounds
from .positions import positions
from .schedule import Schedule, schedule

BYTES_KEPT = 128 * 2**20
"""Most bytes of the cache, which drops the least recently used tables. A batch needs 8 bytes per query and pass, and
with a bias by distance 8 more per distance: 69 MiB for a row of a million tokens on eight ranks."""

Key = tuple[object, ...]
_kept: OrderedDict[Key, tuple[Tensor, ...]] = OrderedDict()
_lock = Lock()  # autograd runs the backward of each device on another thread


def bounds_on(tiles: Tensor, device: torch.device, batch: int, tokens: int) -> Tensor:
    """`sharding.visible.bounds` on the device."""
    (table,) = _made(device, _key(tiles, "bounds", batch, tokens), lambda: (bounds(tiles, batch, tokens),))
    return table


def places_on(tiles: Tensor, device: torch.device, batch: int, tokens: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """`positions.positions` on the device."""
    key = _key(tiles, "places", batch, tokens, keys)
    of_q, of_k, distances = _made(device, key, lambda: positions(tiles, batch, tokens, keys))
    return of_q, of_k, distances


def schedule_on(
    tiles: Tensor, device: torch.device, side: str, block: int, other_block: int, batch: int, tokens: int, *,
    idle: bool, by_row: bool,
) -> Schedule:  # fmt: skip
    """`schedule.schedule` on the device."""

    def make() -> tuple[Tensor, ...]:
        made = schedule(tiles, side, block, other_block, batch, tokens, idle=idle, by_row=by_row)
        return made.programs, made.runs

    programs, runs = _made(device, _key(tiles, side, block, other_block, batch, tokens, idle, by_row), make)
    return Schedule(programs, runs)


def _key(tiles: Tensor, *rest: object) -> Key:
    # By content: equal tables of different batches share a schedule. A row is 72 bytes.
    return tiles.cpu().numpy().tobytes(), *rest


def _made(device: torch.device, key: Key, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    with _lock:
        tables = _kept.get((device, *key))
        if tables is None:
            # A blocking copy: complete for every stream.
            tables = _kept[device, *key] = tuple(table.to(device) for table in make())
            while len(_kept) > 1 and sum(map(_bytes, _kept.values())) > BYTES_KEPT:
                _kept.popitem(last=False)
        else:
            _kept.move_to_end((device, *key))
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        for table in tables:
            table.record_stream(stream)
    return tables


def _bytes(tables: tuple[Tensor, ...]) -> int:
    return sum(table.numel() * table.element_size() for table in tables)
