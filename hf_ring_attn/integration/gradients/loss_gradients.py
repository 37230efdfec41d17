"""Compares the gradients that the ranks' programs give the loss of a batch, before an optimizer steps by them.

The loss has one value on every rank, so any function of it has one gradient there. A program that also asks its rank's
tokens (twice the loss, if one of them is special) has another on each, perhaps on no row of the self-check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ... import errors
from ...comm.fingerprint import number_of
from ...comm.ring import Ring
from ...traffic import interruption_guard
from ..context.attended_layers import AttendedLayers
from ..patching import optimizer_steps
from ..patching.changes import at_uninstall

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
_FACTOR = "factor of the loss that the model's forward returns, by that of its loss function"
_waiting: list[tuple[torch.device, Callable[[], object]]] = []
"""Devices and ends of the comparisons since an optimizer's last step, or since the last batch."""
at_uninstall(_waiting.clear)


def start(gradient: Tensor, ring: Ring, factor: float | Tensor | None, layers: AttendedLayers) -> None:
    """Starts the comparison of a gradient; the host does not wait.

    Args:
        factor: compared among ranks that have one. layers: of the batch.
    """
    facts = {"gradient of the loss": gradient.detach()}
    doing = "compared the gradient of its loss"
    known: list[Any] = [0, 0] if factor is None else [1, _bits(factor, ring.small_device(gradient.device))]
    compare_with_layers(ring, facts, known, layers, doing, gradient.device, _refuse_factors)


def compare_whole(gradient: Tensor | None, ring: Ring, device: torch.device, layers: AttendedLayers) -> None:
    """Starts the comparison of a gradient of whole rows, which each rank computed. Sums in other orders may differ.

    Args:
        gradient: None, under DDP, of what no loss uses. device: of what it is a gradient. layers: of the batch.
    """
    bits = [_bits(x, ring.small_device(device)) for x in summary_of(gradient, device)]
    compare_with_layers(ring, {}, bits, layers, "compared a gradient of whole rows", device, _refuse_norms)


def summary_of(gradient: Tensor | None, device: torch.device) -> Tensor:
    """[2] float64: the norm of a gradient, and its part along one direction. ``device``: of what it is a gradient."""
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64, device=device)
    gradient = gradient.detach()
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    few = gradient.flatten()[:: max(1, -(-gradient.numel() // SAMPLE))].double()
    return torch.stack([norm, few @ torch.arange(len(few), dtype=torch.float64, device=few.device).cos()])


def differ(summaries: Tensor, least: float = 0.0) -> bool:
    """Returns True if `summary_of` a gradient [2, ranks] differs by more than rounding, and than ``least``."""
    norms, along = summaries
    finite = norms.isfinite() & along.isfinite()
    apart = torch.maximum(norms.amax() - norms.amin(), along.amax() - along.amin())
    return bool(finite.any() and not (finite.all() and apart <= SAME_NORM * norms.amax() + least))


def compare_with_layers(
    ring: Ring, facts: Mapping[str, object], numbers: list[Any], layers: AttendedLayers, doing: str,
    device: torch.device, refuse: Callable[..., None],
) -> None:  # fmt: skip
    """Starts the comparison of layers, of ``facts``, and of ``numbers``: ``refuse`` gets each of these of all ranks.

    It ends before the next step of an optimizer, or with the next batch.
    """
    interruption_guard(ring).note_backward()
    device = ring.small_device(device)
    end = ring.start_agreement(facts, device, TODO, collect=[*layers.numbers, *numbers], doing=doing)

    def refuse_either() -> None:
        known, layers_of, *others = end()
        layers.refuse(ring, known, layers_of)
        refuse(*others)

    optimizer_steps.call_before_each_step(finish)
    _waiting.append((device, refuse_either))


def _bits(x: float | Tensor, device: torch.device) -> int | Tensor:
    """A number as an integer; on the device if it is a tensor, in float64."""
    return x.to(device).view(torch.int64) if isinstance(x, Tensor) else number_of(x)


def _refuse_factors(known: list[int], bits: list[int]) -> None:
    """Raises RanksDiffer, on every rank, if factors differ among the ranks that have one."""
    factors: list[float] = torch.tensor(bits, dtype=torch.int64).view(torch.float64).tolist()
    if len({factor for is_known, factor in zip(known, factors, strict=True) if is_known}) > 1:
        raise errors.RanksDiffer(_FACTOR, list(factors), TODO)


def _refuse_norms(norms: list[int], along: list[int]) -> None:
    """Raises RanksDiffer, on every rank, if gradients have other norms, or another part along one direction."""
    summaries = torch.tensor([norms, along], dtype=torch.int64).view(torch.float64)
    if differ(summaries):
        raise errors.RanksDiffer(
            "gradient of what a model returned for whole rows (its norm)", summaries[0].tolist(), SAME_LOSS
        )


def finish(_optimizer: Optimizer | None = None) -> None:
    """Ends the comparisons that were started.

    Raises:
        RanksDiffer: on every rank.
    """
    ends, _waiting[:] = list(_waiting), []
    for device, end in ends:
        with beside(device):
            end()


def beside(device: torch.device) -> AbstractContextManager[object]:
    """Lets the host wait inside for a message that was sent as the backward began, not for all of the backward."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
