"""Numbers of the self-check that all ranks hold: those of a ring, and of all ranks that shard its model's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ...comm.meeting import meet
from ...comm.ring import Ring
from ..context.tensor_tree import tensors_of
from ..gradients.same_weights import SAME_WEIGHTS
from .compare import relative, spread
from .tolerance import tolerance
from .trial import StepResult, distances

_SAME_WEIGHTS = f"The self-check ran it on every rank alone, so their weights differ. {SAME_WEIGHTS}"


def stays_in(ring: Ring, sharding: Sequence[Ring]) -> bool:
    """Returns True if no rank outside of ``ring`` holds parts of the weights, and so takes part in each forward."""
    return all(group.ranks() <= ring.ranks() for group in sharding)


class AcrossRanks:
    """Findings of all ranks, gathered or averaged. Its methods send messages, so all ranks call them.

    Attributes:
        ring: the ring that is checked. sharding: the groups of ranks that hold parts of the weights
            (`weight_parts.sharding_of`); none if each rank holds them all.
    """

    ring: Ring
    sharding: Sequence[Ring]
    device: torch.device

    def agree(self, ring: Ring, facts: Mapping[str, object], todo: str = "", failure: Exception | None = None) -> None:
        """Compares facts among the ranks of ``ring``, and among all that shard the weights; as `Ring.agree`.

        Raises (on every rank of both):
            RanksDiffer, RefusedElsewhere: they differ in one of these groups, or a rank has a ``failure``.
        """
        for group in (ring, *self.sharding):
            try:
                group.agree(facts, group.small_device(self.device), todo, failure, doing="agreed in its self-check")
            except errors.Refused as error:  # which the other groups are told, too
                failure = error
        if failure is not None:
            raise failure

    def _all_are_back(self, failed: bool) -> bool:
        """Returns False on a rank whose forward failed while others are still in theirs, and wait for its weights."""
        came = True
        for group in self.sharding:  # it comes to all of them, and waits in vain for one alone
            came = meet(group, waits=failed and came) and came
        return came

    def _gathered(self, row: Tensor) -> Tensor:
        """[W, ...] each rank's ``row``, on the CPU in float64."""
        row = row.to(self.ring.small_device(self.device), torch.float64)
        return self.ring.gather(row, "compared its part of the self-check").wait()[0].cpu()

    def _everywhere(self, numbers: list[float]) -> Tensor:
        """[n, ...] the numbers of each rank of this ring, and of all that shard its weights; some more than once."""
        table = self._gathered(torch.tensor(numbers, dtype=torch.float64))
        for group in self.sharding:
            rings = table.to(group.small_device(self.device))
            table = group.gather(rings, "compared its self-check").wait()[0].flatten(0, 1).cpu()
        return table

    def _spread(self, mine: Tensor) -> float:
        """The spread of the errors of all tokens, the largest of any ring; nan if one has nothing to compare."""
        return float(self._everywhere([spread(self._gathered(mine))]).max())

    def _tolerance(self, dtypes: set[torch.dtype]) -> float:
        """The tolerance of a token's output, by the coarsest dtype that a module returned on any rank."""
        spacing = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        return tolerance(float(self._everywhere([spacing]).max()), self.device)

    def _mean(self, mine: StepResult) -> StepResult:
        """The mean over the ring, as DDP makes it."""
        device = self.ring.small_device(self.device)
        loss, *gradients = self.ring.means([x.to(device) for x in (mine.loss, *mine.gradients)])
        return StepResult(loss, [x.to(self.device) for x in gradients])

    def _apart(self, got: StepResult, want: StepResult) -> list[float]:
        """The relative distance of the loss and of each gradient, the largest on any rank."""
        return [float(x) for x in self._everywhere(distances(got, want)).amax(0)]

    def _refuse_other_weights(self, whole: Any, least: float) -> None:
        """Refuses ranks whose answers to the whole row differ, which each of them computed alone."""
        answer = next(x for _, x in tensors_of(whole) if x.is_floating_point() and x.dim())
        answers = self._gathered(answer.flatten()[:256])
        away = relative(answers, answers[:1].expand_as(answers), 0)
        if float(away.max()) > least:
            norms: list[object] = [f"{float(x.norm()):.6g}" for x in answers]
            raise errors.RanksDiffer("answer to the same row (its norm)", norms, _SAME_WEIGHTS)
