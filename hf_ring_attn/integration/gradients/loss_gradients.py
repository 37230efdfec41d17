"""Compares the gradients that the ranks' programs give the loss of a batch, before an optimizer steps by them.

The loss has one value on every rank, so any function of it has one gradient there. A program that also asks its rank's
tokens (twice the loss, if one of them is special) has another on each, perhaps on no row of the self-check.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ... import errors
from ...comm.ring import Ring
from ..context.attended_layers import AttendedLayers
from ..patching import optimizer_steps

TODO = (
    "A program may use the loss in any way, but not by what its rank's tokens or labels are. Look at whole rows in the "
    "collator, and give the batch what you found as another input."
)
SAME_LOSS = (
    "Every rank must compute the same loss of whole rows: not of the rank's number, nor of data or random numbers that "
    "others do not have."
)
SAMPLE = 2**16
"""The most numbers of a gradient that are compared one by one."""
SAME_NORM = 1e-3
"""The relative difference of norms that rounding explains."""
_DOUBLE, _LONG = struct.Struct("d"), struct.Struct("q")
_FACTOR = "factor of the loss that the model's forward returns, by that of its loss function"
_waiting: list[tuple[torch.device, Callable[[], object]]] = []
"""Devices and ends of the comparisons since an optimizer's last step, or since the last batch."""


def start(gradient: Tensor, ring: Ring, factor: float | Tensor | None, layers: AttendedLayers) -> None:
    """Starts the comparison of a gradient; the host does not wait.

    Args:
        factor: compared among ranks that have one. layers: of the batch.
    """
    facts = {"gradient of the loss": gradient.detach()}
    doing = "compared the gradient of its loss"
    device = ring.small_device(gradient.device)
    known: list[Any] = [0, 0] if factor is None else [1, _bits(factor, device)]
    _wait_for_both(ring, facts, known, layers, doing, device, _refuse_factors)


def compare_whole(gradient: Tensor | None, ring: Ring, device: torch.device, layers: AttendedLayers) -> None:
    """Starts the comparison of a gradient of whole rows, which each rank computed. Sums in other orders may differ.

    Args:
        gradient: None, under DDP, of what no loss uses. device: of what it is a gradient. layers: of the batch.
    """
    norm, along = torch.zeros(2, dtype=torch.float64, device=device)
    if gradient is not None:
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
        few = gradient.detach().flatten()[:: -(-gradient.numel() // SAMPLE)].double()
        along = few @ torch.arange(len(few), dtype=torch.float64, device=few.device).cos()
    device = ring.small_device(device)
    bits: list[Any] = [_bits(norm, device), _bits(along, device)]
    _wait_for_both(ring, {}, bits, layers, "compared a gradient of whole rows", device, _refuse_norms)


def _wait_for_both(
    ring: Ring, facts: Mapping[str, object], numbers: list[Any], layers: AttendedLayers, doing: str,
    device: torch.device, refuse: Callable[[list[int], list[int]], None],
) -> None:  # fmt: skip
    """Starts the comparison of two numbers of a gradient, which ``refuse`` gets of all ranks, and of layers."""
    end = ring.start_agreement(facts, device, TODO, collect=[*layers.numbers, *numbers], doing=doing)

    def refuse_either() -> None:
        known, layers_of, *of_gradient = end()
        layers.refuse(ring, known, layers_of)
        refuse(*of_gradient)

    wait_for(device, refuse_either)


def wait_for(device: torch.device, end: Callable[[], object]) -> None:
    """Ends a comparison before the next step of an optimizer, or the next batch. ``device``: of its messages."""
    optimizer_steps.call_before_each_step(_finish_before_step)
    _waiting.append((device, end))


def _bits(x: float | Tensor, device: torch.device) -> int | Tensor:
    """A number as an integer; on the device if it is a tensor, in float64."""
    if isinstance(x, Tensor):
        return x.to(device).view(torch.int64)
    number: int = _LONG.unpack(_DOUBLE.pack(x))[0]
    return number


def _refuse_factors(known: list[int], bits: list[int]) -> None:
    """Raises RanksDiffer, on every rank, if factors differ among the ranks that have one."""
    factors: list[float] = torch.tensor(bits, dtype=torch.int64).view(torch.float64).tolist()
    if len({factor for is_known, factor in zip(known, factors, strict=True) if is_known}) > 1:
        raise errors.RanksDiffer(_FACTOR, list(factors), TODO)


def _refuse_norms(norms: list[int], along: list[int]) -> None:
    """Raises RanksDiffer, on every rank, if gradients have other norms, or another part along one direction."""
    size, part = (torch.tensor(bits, dtype=torch.int64).view(torch.float64) for bits in (norms, along))
    finite = size.isfinite()
    apart = torch.maximum(size.amax() - size.amin(), part.amax() - part.amin())
    if finite.any() and not (finite.all() and apart <= SAME_NORM * size.amax()):
        raise errors.RanksDiffer(
            "gradient of what a model returned for whole rows (its norm)", size.tolist(), SAME_LOSS
        )


def finish() -> None:
    """Ends the comparisons that were started.

    Raises:
        RanksDiffer: on every rank.
    """
    ends, _waiting[:] = list(_waiting), []
    for device, end in ends:
        with beside(device):
            end()


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Inside, the host waits for a message alone, which began the backward, not for all of the backward."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_stream(device)):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _finish_before_step(_optimizer: Optimizer) -> None:
    finish()


def forget() -> None:
    """Drops the comparisons that were started."""
    _waiting.clear()
