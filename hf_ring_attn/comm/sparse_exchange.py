"""Sparse exchange: an all-to-all of the keys that each rank sees, and of their gradients back to the owners."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .ring import Pending, Ring


@dataclass(frozen=True, eq=False)
class Exchange:
    """The tokens that a rank sends to each rank, and the places of those that it receives.

    Args:
        sends: number of tokens sent to rank 0, 1, ...; receives: received from there.
        sent: [sum(sends)] indices into this rank's T tokens, in sending order.
        received: [sum(receives)] indices into the S tokens that it sees, in order of arrival, each once.
    """

    sends: list[int]
    receives: list[int]
    sent: Tensor
    received: Tensor
    _on: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, sends: Tensor, receives: Tensor, ring_size: int) -> Exchange:
        """Builds one from tables [n, 3 or more] of runs: rank, offset, length; in order of ranks."""
        counts = _counts(sends, ring_size), _counts(receives, ring_size)
        return cls(*counts, _places(sends), _places(receives))

    def take(self, ring: Ring, tensor: Tensor) -> Pending:
        """Starts the exchange of this rank's [B, T, ...]; gives [S, B, ...] in order of arrival, for `arrived`."""
        sent, _ = self._indices(tensor.device)
        leaving = tensor.transpose(0, 1).index_select(0, sent)  # contiguous
        return ring.all_to_all(leaving, self.sends, self.receives, "exchanged keys and values")

    def arrived(self, tensor: Tensor) -> Tensor:
        """Sorts the result of `take` by position: [B, S, ...]."""
        _, received = self._indices(tensor.device)
        return torch.empty_like(tensor).index_copy_(0, received, tensor).transpose(0, 1)

    def give_back(self, ring: Ring, gradient: Tensor, tokens: int) -> Tensor:
        """Reduce-scatters gradients: [B, S, ...] of the tokens that each rank sees to [B, T, ...] of this rank's own.

        Summed in rank order and in the gradient's dtype, so the bits are the same from run to run.
        """
        sent, received = self._indices(gradient.device)
        leaving = gradient.transpose(0, 1).index_select(0, received)
        (parts,) = ring.all_to_all(leaving, self.receives, self.sends, "gave gradients back").wait()
        home = gradient.new_zeros(tokens, *parts.shape[1:])
        for places, part in zip(sent.split(self.sends), parts.split(self.sends), strict=True):
            home.index_add_(0, places, part)  # a rank sends no token twice
        return home.transpose(0, 1)

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on:
            self._on[device] = self.sent.to(device), self.received.to(device)
        return self._on[device]


def _counts(table: Tensor, ring_size: int) -> list[int]:
    counts = torch.zeros(ring_size, dtype=torch.int64, device="cpu").index_add_(0, table[:, 0], table[:, 2])
    return [int(count) for count in counts]


def _places(table: Tensor) -> Tensor:
    runs = [torch.arange(start, start + length, device="cpu") for start, length in table[:, 1:3].tolist()]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device="cpu")
