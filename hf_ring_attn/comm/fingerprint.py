"""Numbers by which ranks find out whether their tensors hold the same values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 2**18
"""Values that a fingerprint takes at a time: what comes of them fits a CPU's cache, several times as fast as memory."""


def fingerprint(tensor: Tensor | None) -> int:
    """A whole number that differs, but for one chance in 2**62, where shapes or values differ. Stops the host.

    Every value counts: where one differs it is seen for certain, where several do, but for that chance. Memory beside
    the tensor's: less than 100 bytes for each of `PIECE` values.
    """
    if tensor is None:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    first = 1
    for values in _pieces(tensor.detach()):
        if values.dtype.is_floating_point:
            values = values.double().view(torch.int64)
        places = torch.arange(first, first + values.numel(), device=values.device)
        # A multiplicative hash of value and place, each value to another one, with high bits mixed into low ones, as
        # floats need it; int64 arithmetic wraps around, on every device alike, so the sum knows no order and no pieces.
        mixed = (values.long() * 0x1E3779B97F4A7C15).add_(places)
        _mix(mixed, 32).mul_(places.mul_(0x5851F42D4C957F2D).bitwise_or_(1))
        _mix(mixed, 29).mul_(0x2545F4914F6CDD1D)
        _mix(mixed, 32)
        total += mixed.sum()
        first += values.numel()
    return int(total) ^ hash(tuple(tensor.shape)) & 0x3FFFFFFFFFFFFFFF


def _mix(bits: Tensor, down: int) -> Tensor:
    """``bits`` ^= ``bits`` shifted down, filled up with zeros, not with the sign."""
    return bits.bitwise_xor_((bits >> down).bitwise_and_((1 << (64 - down)) - 1))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The values of a tensor in their order, flat, `PIECE` of them or fewer at a time, without a copy of it all."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(PIECE)
    elif (row := tensor[0].numel()) > PIECE:
        for part in tensor:
            yield from _pieces(part)
    else:
        yield from (rows.reshape(-1) for rows in tensor.split(PIECE // row))
