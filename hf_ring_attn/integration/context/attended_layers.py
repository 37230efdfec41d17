"""The layers that attended in a batch, in their order, which ranks compare: keys of different layers would mix.

A program may skip layers by a number that its rank alone has, such as Python's random numbers with a seed of the rank.
If ranks skip as many, each attention still finds a partner.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ... import errors
from ...comm.fingerprint import number_of
from ...comm.ring import Ring
from .shared_kv import compiled_here

TODO = (
    "Keys and values of different layers were mixed. Skip layers, or choose them, by what all ranks have: a random "
    "number with one seed on all ranks, or one that the first rank draws and broadcasts."
)


class AttendedLayers(list[int]):
    """A state of a batch: the numbers of the layers whose attention ran, -1 for a layer without one."""

    def note(self, layer: nn.Module) -> None:
        """Notes an attention that runs now, uncompiled."""
        number: Any = getattr(layer, "layer_idx", None)
        self.append(number if isinstance(number, int) else -1)

    @property
    def numbers(self) -> list[int | Any]:
        """Two integers that this rank sends to the others, for `refuse`. Compiled code notes no layers."""
        return [0, 0] if compiled_here() else [1, number_of(str(self))]

    def refuse(self, ring: Ring, known: list[int], numbers: list[int]) -> None:
        """Raises RanksDiffer, on every rank, if the layers of ranks that know theirs differ.

        Args:
            known, numbers: the two `numbers` of each rank.
        """
        if len({number for is_known, number in zip(known, numbers, strict=True) if is_known}) > 1:
            raise errors.RanksDiffer("layers that attend", ring.objects(list(self)), TODO)
