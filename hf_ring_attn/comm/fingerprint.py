"""Fingerprints that ranks compare to check that they hold the same values, and a search for the first difference."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..config import RingConfig

PIECE = 2**18
"""Values hashed at a time, so that intermediates fit a CPU's cache."""


def fingerprint(tensor: Tensor | None) -> int:
    """Hashes shape and values to an int; a collision has a chance of 2**-62. Synchronizes with the device.

    One differing value always changes it. Extra memory: less than 100 bytes for each of `PIECE` values.
    """
    return 0 if tensor is None else int(_fingerprints([tensor])[0])


def numbers_of(values: Iterable[object]) -> list[int | Tensor]:
    """Maps each value to an int, as `number_of`; small tensors that are alike by the same operations."""
    values = list(values)
    numbers: list[Any] = [None if isinstance(value, Tensor) else number_of(value) for value in values]
    alike: dict[object, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            alike.setdefault((value.shape, value.dtype, value.device), []).append(place)
    for places in alike.values():
        tensors: list[Any] = [values[place] for place in places]
        together = len(tensors) * tensors[0].numel() <= PIECE
        found = _fingerprints(tensors) if together else [_fingerprints([tensor])[0] for tensor in tensors]
        for place, number in zip(places, found, strict=True):
            numbers[place] = number
    return numbers


def number_of(value: object) -> int | Tensor:
    """Maps a value to an int: itself or its fingerprint; for a tensor an int64 tensor on its device, without a sync.

    Equal only for equal values, but for chance: floats by their bits, mappings, sequences and options by their items.
    Objects that are no values, such as functions, give 0.
    """
    if type(value).__module__ == "numpy":  # its numbers and arrays
        value = _of_numpy(value)
    if value is None or isinstance(value, (str, bytes, complex, torch.dtype)):
        return _hash(repr(value))
    if isinstance(value, Tensor):
        return _fingerprints([value])[0]
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else _hash(repr(value))
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    if isinstance(value, RingConfig):
        return _number_of_options(value)
    if not isinstance(value, (tuple, list, Mapping)):
        return 0
    numbers = [number_of(part) for pair in _parts(value) for part in pair]
    on = next((number.device for number in numbers if isinstance(number, Tensor)), None)
    return _hash(repr(numbers)) if on is None else _fingerprints([row_of(numbers, on)])[0]


def _of_numpy(value: Any) -> object:
    """A number of numpy's as Python's, an array as a tensor; one of a dtype that torch lacks as nested lists."""
    if getattr(value, "ndim", 0):
        with suppress(TypeError, ValueError):
            return torch.as_tensor(value.copy())
    return value.tolist() if hasattr(value, "tolist") else value


@lru_cache(maxsize=64)
def _number_of_options(options: RingConfig) -> int:
    """By values: equal options have one number, though one of them holds 1 and another 1.0."""
    values = vars(options).values()
    return _hash(repr([x if x is None or isinstance(x, (bool, str)) else float(x) for x in values]))


def row_of(numbers: list[int | Tensor], device: torch.device) -> Tensor:
    """Stacks numbers to int64 [N] on a device. Synchronizes if a tensor is on another device, or for new numbers."""
    row = _known_row(tuple(0 if isinstance(number, Tensor) else number for number in numbers), device).clone()
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            row[place] = number
    return row


@lru_cache(maxsize=64)
def _known_row(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A row on a device. Kept: copying it waits for a GPU, and most messages have the numbers of the step before."""
    return torch.tensor(numbers, device=device)


def first_difference(name: str, value: object, gather: Callable[[object], list[Any]]) -> tuple[str, list[object]]:
    """Finds the first difference between the ranks' values, which all ranks know to differ. Several collectives.

    Args:
        gather: all-gathers an object.

    Returns:
        The name of the first entry that differs, such as ``input_ids[0, 17]``, and each rank's value there.
    """
    kinds = gather(_kind(value))
    if any(kind != kinds[0] for kind in kinds):
        if not all(isinstance(kind, str) for kind in kinds):
            return name, kinds
        same = next((place for place, letters in enumerate(zip(*kinds, strict=False)) if len(set(letters)) > 1), 0)
        return name, [f"...{kind[same - 20 :]}" for kind in kinds] if same > 40 else kinds
    if isinstance(value, Tensor):
        flat, first, stop = value.detach().reshape(-1), 0, value.numel()
        while stop - first > 1:
            middle = (first + stop) // 2
            prints = gather(fingerprint(flat[first:middle]))
            first, stop = (first, middle) if len(set(prints)) > 1 else (middle, stop)
        places = torch.unravel_index(torch.tensor(first, device="cpu"), value.shape)
        at = f"[{', '.join(str(int(place)) for place in places)}]" if value.dim() else ""
        return name + at, gather(flat[first].item())
    parts = _parts(value)
    for place, each in enumerate(zip(*gather([int(number_of(part)) for _, part in parts]), strict=True)):
        if len(set(each)) > 1:
            key, part = parts[place]
            at = f".{key}" if isinstance(value, RingConfig) else f"[{key!r}]"
            return first_difference(name + at, part, gather)
    return name, kinds


def _parts(value: object) -> list[tuple[object, object]]:
    if isinstance(value, Mapping):
        return sorted(value.items(), key=lambda item: str(item[0]))
    if isinstance(value, RingConfig):
        return list(vars(value).items())
    return list(enumerate(value)) if isinstance(value, tuple | list) else []


def _kind(value: object) -> object:
    """A short description of a value: itself if small; else its type, for a tensor with dtype and shape."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    parts = _parts(value)
    if isinstance(value, RingConfig):
        return "RingConfig"
    if len(parts) <= 8 and not any(isinstance(part, Tensor) or _parts(part) for _, part in parts):
        return str(value)
    return str([key for key, _ in parts]) if isinstance(value, Mapping) else f"{len(parts)} values"


@lru_cache(maxsize=1024)
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def _fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """[N] int64 fingerprints of tensors of one shape, dtype and device. Several must be small: they are copied."""
    shape = hash(tuple(tensors[0].shape)) & 0x3FFFFFFFFFFFFFFF
    total: Tensor | None = None
    first = 0
    one = len(tensors) == 1
    for values in _pieces(tensors[0].detach()) if one else [torch.stack([x.detach() for x in tensors])]:
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        count = values.numel() // len(tensors)
        values = values.reshape(len(tensors), count)
        values = values.double().view(torch.int64) if values.dtype.is_floating_point else values.long()
        # An invertible multiplicative hash of value and index, with high bits mixed into low ones, as floats need it.
        # int64 arithmetic wraps around alike on every device, so the sum does not depend on the order.
        places = torch.arange(shape + first, shape + first + count, device=values.device)
        mixed = _mix(torch.add(places, values, alpha=0x1E3779B97F4A7C15), 32)
        odd = 0x5851F42D4C957F2D + 2 * first
        mixed.mul_(torch.arange(odd, odd + 2 * count, 2, device=values.device))
        summed = _mix(mixed, 29).mul_(0x2545F4914F6CDD1D).sum(1)
        total = summed if total is None else total + summed
        first += count
    if total is None or not first:
        return torch.tensor([shape] * len(tensors), device=tensors[0].device)
    return total


def _mix(bits: Tensor, down: int) -> Tensor:
    """Computes ``bits`` ^= ``bits`` >> ``down`` in place, with a logical shift (zeros, not the sign)."""
    return bits.bitwise_xor_((bits >> down).bitwise_and_((1 << (64 - down)) - 1))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor's values in order, flat, at most `PIECE` at a time, without copying the whole."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(PIECE)
    elif (row := tensor[0].numel()) > PIECE:
        for part in tensor:
            yield from _pieces(part)
    else:
        yield from (rows.reshape(-1) for rows in tensor.split(PIECE // row))
