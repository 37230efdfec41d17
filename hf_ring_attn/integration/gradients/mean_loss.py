"""The mean of a loss over the ranks of a ring."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import errors
from ...comm.ring import Ring
from ..log import warn
from .loss_gradients import TODO

_ROUNDING = 1e-3
"""The relative difference that rounding explains."""


def mean_loss(loss: Tensor, ring: Ring, has_one_value: bool = False) -> Tensor:
    """The mean over the ring of each rank's ``loss``. Warns of a rank whose loss alone is not finite.

    Args:
        has_one_value: it is no part of a loss, but the same on every rank.

    Raises:
        RanksDiffer: on every rank, if it has another value on one.
    """
    if loss.numel() != 1 or ring.size == 1 or not loss.is_floating_point():
        return ring.mean(loss)
    bits = loss.double().view(torch.int64).reshape(())
    numbers = ring.numbers(bits, ring.small_device(loss.device), "averaged its loss (reduce)")
    losses = torch.tensor(numbers).view(torch.float64)
    finite = losses.isfinite().tolist()
    if any(finite) and not all(finite):
        odd, others = finite.index(False), [str(rank) for rank, it_is in enumerate(finite) if it_is]
        warn(
            f"the loss is {float(losses[odd])} on rank {odd}, not on rank {', '.join(others)}: look at its tokens first"
        )
    elif has_one_value and all(finite) and float(losses.max() - losses.min()) > _ROUNDING * float(losses.abs().max()):
        raise errors.RanksDiffer("loss of a batch", losses.tolist(), TODO)
    return losses.mean().to(loss).reshape(loss.shape)
