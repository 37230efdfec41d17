"""Numbers of one rank's tokens, as a program gets them: it may neither shift them nor divide by its own count of them.

A rank has no label for the last token of a chunk: that is in the next chunk, on another rank. And ranks hold different
numbers of labels, so the mean of their means is not the mean of the row. Neither fails: the loss is a little off.

Nor may it count tokens that only pad the row to the ring's length: they have a gradient then. And what it makes of all
tokens of a row, or of its last one, is made of a rank's.

So what a model returns for each token is followed through torch's functions, and compared with the other ranks' in the
backward. The gradient of each token in a sum or a mean must be the same, whatever the program made of it: with 1 over a
rank's own count it is another, and where the loss is a function of a rank's sum. And targets must not be the rank's own
labels, shifted. What is only logged has no backward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import errors
from ...comm.fingerprint import numbers_of, row_of
from ...comm.ring import Ring
from . import loss_gradients

SAME_WEIGHT = 1e-5, 1e-2
"""Relative, in float32 and in 16 bits: weights of tokens that are computed in another way differ by rounding."""
MOST_WEIGHTS = 8
"""The most different weights of tokens that ranks compare; a loss with more has one for each document, perhaps."""


@dataclass
class _Noted:
    """Facts about the steps that a backward passed through.

    Attributes:
        divisors: what tokens were divided by, each by itself. weights: the gradients of tokens in sums and means.
        in_16_bits: some of these are. targets: two flags each, see `Origin.of_target`.
        reduced, picked: what must be the same of results made of all tokens, and of one token.
    """

    divisors: list[Any] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    in_16_bits: bool = False
    targets: list[Tensor] = field(default_factory=list)
    reduced: list[Tensor] = field(default_factory=list)
    picked: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Origin:
    """One output of a model for each of a rank's tokens, and what a program makes of it on the way to its loss.

    Args:
        rows, tokens: B and T. padding: the places among T of tokens that pad the row to the ring's length.
        labels: the rank's labels, and those that were shifted on the whole row, both [B, T], if the batch has any.

    Attributes:
        used: a loss may have been computed from it, on every rank. noted: of the current backward.
    """

    ring: Ring
    rows: int
    tokens: int
    padding: list[int]
    labels: tuple[Tensor, Tensor] | None = None
    used: bool = False
    noted: _Noted = field(default_factory=_Noted)

    def begin_at(self, x: Tensor) -> None:
        """Lets ranks compare once the backward has the gradient of ``x``, on which all that is followed depends."""
        if x.requires_grad:
            weakref.finalize(self, x.register_hook(_comparison(weakref.ref(self))).remove)

    def anew(self) -> Origin:
        """The same for another beginning."""
        return replace(self, noted=_Noted())

    def axis(self, shape: torch.Size) -> int | None:
        """The axis of the tokens; None: it is not for each token."""
        if shape[:1] == (self.rows * self.tokens,):
            return 0
        return next((axis for axis in (*range(1, len(shape)), 0) if shape[axis : axis + 1] == (self.tokens,)), None)

    def of_target(self, x: Any) -> Tensor | None:
        """[2] integers for targets: they are the rank's labels shifted by hand; they are others.

        Both 0: they are the labels that were shifted on the whole row, which differ where two chunks meet. None: no
        targets of all tokens, or of all but one.
        """
        sizes = (self.rows * self.tokens, self.rows * (self.tokens - 1))
        if self.labels is None or not isinstance(x, Tensor) or x.is_floating_point() or x.numel() not in sizes:
            return None
        known = x.detach().reshape(self.rows, -1)[:, : self.tokens - 1]

        def like(y: Tensor) -> Tensor:
            """[2] Exactly, and where there are labels."""
            return torch.stack([(known.clamp(min=0) == y.clamp(min=0)).all(), ((known == y) | (y < 0)).all()])

        by_hand, right = like(self.labels[0][:, 1:]), like(self.labels[1][:, :-1])
        return torch.stack([(by_hand & ~right).any(), ~(by_hand | right).any()]).long()

    def note(self, result: Tensor, step: Step) -> None:
        """Notes facts about a step from tokens to the loss, once the backward passes through its ``result``."""

        def passes(gradient: Tensor) -> None:
            noted = self.noted
            if step.divisor is not None:
                by = step.divisor
                noted.divisors.append(by.detach().double().reshape(-1) if isinstance(by, Tensor) else float(by))
            if step.tokens is not None:
                noted.weights.append((gradient.detach().double() / step.tokens).reshape(-1))
                noted.in_16_bits |= gradient.dtype.itemsize == 2
            if step.target is not None:
                noted.targets.append(step.target)
            if step.made_of:
                kept = result if step.made_of == "reduced" else gradient
                (noted.picked if step.made_of == "picked" else noted.reduced).append(kept.detach())

        if step.made_of or any(fact is not None for fact in (step.tokens, step.divisor, step.target)):
            result.register_hook(passes)

    def compare(self, gradient: Tensor) -> None:
        """Starts the comparison."""
        if not self.used:
            return
        noted, self.noted = self.noted, _Noted()
        device = self.ring.small_device(gradient.device)
        picked = noted.picked if len(noted.picked) == 1 else []  # more: a program that takes token by token
        mine: list[Any] = [0, 0, 0, *_as_set(noted.divisors, device), *_as_set([*noted.reduced, *picked], device)]
        if noted.targets:
            mine[:2] = torch.stack(noted.targets).amax(0).to(device)
        if self.padding and gradient.shape[:2] == (self.rows, self.tokens):  # else it is that of a weight
            mine[2] = gradient[:, self.padding].any().long().to(device)
        mine += [int(noted.in_16_bits), *_different(noted.weights, device).view(torch.int64)]
        end = self.ring.start_agreement({}, device, collect=mine, doing="compared how it made its loss")
        loss_gradients.wait_for(device, lambda: _refuse(*end()))


class Step(NamedTuple):
    """A step from tokens to a loss.

    Args:
        tokens: whose mean it took; 1 of a sum. divisor: by which it divided tokens. target: see `Origin.of_target`.
        made_of: see `_made_of`.
    """

    tokens: int | Tensor | None = None
    divisor: Any = None
    target: Tensor | None = None
    made_of: str = ""


def _different(weights: list[Tensor], device: torch.device) -> Tensor:
    """[`MOST_WEIGHTS` + 1] float64: different weights beside 0, in order; nan where there are no more."""
    found = torch.full((MOST_WEIGHTS + 1,), math.nan, dtype=torch.float64, device=device)
    if weights:
        every = torch.cat(weights).to(device).sort().values
        again = torch.cat([every[:1].isnan(), every[1:] == every[:-1]]) | (every == 0)
        kept = every.masked_fill(again, math.nan).sort().values[: len(found)]
        found[: len(kept)] = kept
    return found


def _comparison(of: weakref.ref[Origin]) -> Callable[[Tensor], None]:
    """A hook that does not keep its origin alive: a weight may have it."""

    def compare(gradient: Tensor) -> None:
        origin = of()
        if origin is not None:
            origin.compare(gradient)

    return compare


def _as_set(found: list[Any], device: torch.device) -> tuple[int, int | Tensor]:
    """Is there any, and a number for all of them, each once, since ranks may sum over different numbers of parts."""
    if not found:
        return 0, 0
    numbers = row_of(numbers_of(found), device).sort().values
    again = numbers == numbers.roll(1)
    again[0] = False
    return 1, numbers.masked_fill(again, 0).sum()


def _differ(there: list[int], numbers: list[int]) -> bool:
    return len({number for is_there, number in zip(there, numbers, strict=True) if is_there}) > 1


def _weigh_differently(in_16_bits: list[int], *bits: list[int]) -> bool:
    """Returns True if tokens of some ranks count more. ``bits``: of `_different` of all ranks, by place."""
    weights = torch.tensor(bits, dtype=torch.int64).view(torch.float64).T  # of each rank
    weights = weights[~weights[:, 0].isnan()]
    counts = (~weights.isnan()).sum(1)
    if not len(weights) or counts.max() > MOST_WEIGHTS or counts.min() < counts.max():
        return False
    least, most = (torch.stack([getattr(x, end)() for x in weights.T[: counts[0]]]) for end in ("min", "max"))
    return bool((most - least > SAME_WEIGHT[any(in_16_bits)] * torch.maximum(most.abs(), least.abs())).any())


def _refuse(by_hand: list[int], others: list[int], counts_padding: list[int], *compared: list[int]) -> None:
    # Of few labels, those of a rank may be the same either way.
    if any(by_hand) and not any(others):
        raise errors.ShiftedByHand()
    averages = _differ(*compared[:2]) or _weigh_differently(*compared[4:])
    if _differ(*compared[2:4]) and not averages:
        raise errors.PooledOnOneRank()
    if any(counts_padding):
        raise errors.PaddingInLoss()
    if averages:
        raise errors.MeanOfOneRank()
