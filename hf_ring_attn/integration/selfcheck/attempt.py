"""One attempt of the self-check: how far two runs of a row are apart, and how far rounding may take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ... import errors
from .tolerance import AMPLIFICATION, ROUNDING, rounded_anew


@dataclass
class Attempt:
    """The relative distances of two runs of one row, the largest on any rank, and their limits.

    Args:
        precise: no module's output was coarser than float32.
        again: the distances between the whole run and another one.
        refusal: the error, given the limits; it may raise a more precise one.
        fine: limits up to ``limits``; a distance between both passes if rounding explains it.
    """

    found: list[float]
    limits: list[float]
    precise: bool
    again: Callable[[], list[float]]
    refusal: Callable[[list[float]], errors.Refused]
    fine: list[float]

    def agrees(self, device: torch.device) -> bool:
        """Returns True if the runs agree. Unless they clearly do, limits are set by what the model amplifies first."""
        if self._within(self.fine):
            return True
        with rounded_anew(device):
            own = self.again()
        self.limits = [
            max(least, min(limit, ROUNDING * error), AMPLIFICATION * error)
            for least, limit, error in zip(self.fine, self.limits, own, strict=True)
        ]
        return self._within(self.limits)

    def _within(self, limits: list[float]) -> bool:
        return all(error <= limit for error, limit in zip(self.found, limits, strict=True))
