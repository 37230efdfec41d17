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

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import errors
from ...comm.fingerprint import numbers_of, row_of
from ...comm.ring import Ring
from ..gradients import loss_gradients
from .readings import Sample
from .targets import target_facts
from .weights import MOST_EACH, NO_WEIGHTS, are_of_a_rank, weight_facts


@dataclass
class _Noted:
    """Facts about the steps that a backward passed through.

    Attributes:
        divisors: what tokens were divided by, each by itself. weights: the gradients of tokens in sums and means.
        each: the gradients of numbers of tokens, the first few from the loss on; each_count: of how many steps.
        cuts: slices of tokens.
        in_16_bits: some of these are. targets: two flags each, see `target_facts`.
        reduced, picked: what must be the same of results made of all tokens, and of one token.
    """

    divisors: list[Any] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    each: list[Tensor] = field(default_factory=list)
    each_count: int = 0
    cuts: set[tuple[int, int]] = field(default_factory=set)
    in_16_bits: bool = False
    targets: list[Tensor] = field(default_factory=list)
    reduced: list[Any] = field(default_factory=list)
    picked: list[Tensor] = field(default_factory=list)

    def add_each(self, weights: Tensor) -> None:
        """Notes a gradient of numbers of tokens; of many it keeps no more than ranks compare."""
        self.each_count += 1
        if len(self.each) < MOST_EACH:
            self.each.append(weights.detach().double().reshape(-1))


@dataclass(eq=False)
class Origin:
    """One output of a model for each of a rank's tokens, and what a program makes of it on the way to its loss.

    Args:
        rows, tokens: B and T. padding: the places among T of tokens that pad the row to the ring's length.
        labels: the rank's labels, and those that were shifted on the whole row by one token, both [B, T], if the batch
            has any. further: makes those that were shifted by more.
        on_some_ranks: a loss may be computed from it on some ranks only, as a value head's where a rank has marked
            tokens; its gradient is there on all of them, by way of later layers.

    Attributes:
        used: a loss may have been computed from it, on every rank. noted: of the current backward.
        trains: it has a gradient.
    """

    ring: Ring
    rows: int
    tokens: int
    padding: list[int]
    labels: tuple[Tensor, Tensor] | None = None
    further: Callable[[], tuple[Tensor, ...]] = tuple
    on_some_ranks: bool = False
    used: bool = False
    trains: bool = False
    noted: _Noted = field(default_factory=_Noted)

    def begin_at(self, x: Tensor) -> None:
        """Lets ranks compare once the backward has the gradient of ``x``, on which all that is followed depends."""
        self.trains = x.requires_grad
        if x.requires_grad and self.on_some_ranks and x.grad_fn is not None:
            place = x.device  # the hook lives as long as the graph, where a program has dropped the output
            x.register_hook(lambda gradient: self.compare(gradient, place))
        elif x.requires_grad:
            weakref.finalize(self, x.register_hook(_comparison(weakref.ref(self))).remove)

    def read(self, logits: Tensor) -> None:
        """Reads weights of tokens from the gradient of their logits, if no step from these to the loss was followed.

        Args:
            logits: the model computed no loss of them.
        """
        if not logits.requires_grad:
            return
        noted_by = weakref.ref(self)
        sample = Sample.of(logits.detach(), None if self.labels is None else self.labels[1])

        def passes(gradient: Tensor | None) -> None:
            origin = noted_by()
            if origin is None or gradient is None:  # under DDP, of logits that no loss uses
                return
            origin.used = True
            if not (origin.noted.each or origin.noted.weights):
                origin.noted.add_each(sample.weights(gradient))
                origin.noted.in_16_bits |= gradient.dtype.itemsize == 2

        logits.register_hook(passes)

    def anew(self) -> Origin:
        """The same for another beginning."""
        return replace(self, on_some_ranks=False, noted=_Noted())

    def axis(self, shape: torch.Size, selected: int = 0) -> int | None:
        """The axis of the tokens; None: it is not for each token. ``selected``: their number, if these are not all."""
        if selected:
            return next((axis for axis, size in enumerate(shape) if size == selected), None)
        if shape[:1] == (self.rows * self.tokens,):
            return 0
        return next((axis for axis in (*range(1, len(shape)), 0) if shape[axis : axis + 1] == (self.tokens,)), None)

    def of_target(self, x: Any) -> Tensor | None:
        """Facts about targets, if these are of all tokens or of all but one (`target_facts`)."""
        sizes = (self.rows * self.tokens, self.rows * (self.tokens - 1))
        if self.labels is None or not isinstance(x, Tensor) or x.is_floating_point() or x.numel() not in sizes:
            return None
        return target_facts(x.detach().reshape(self.rows, -1), *self.labels, *self.further())

    def note(self, result: Tensor, step: Step, cut: tuple[int, int] | None = None) -> None:
        """Notes facts about a step from tokens to the loss, once the backward passes through its ``result``.

        Args:
            cut: the first token and the end of those that it took, if it is a slice.
        """

        reduced = result.detach() if step.made_of == "reduced" else None

        def passes(gradient: Tensor) -> None:
            noted = self.noted
            if step.divisor is not None:
                by = step.divisor
                noted.divisors.append(by.detach().double().reshape(-1) if isinstance(by, Tensor) else float(by))
            if cut is not None:
                noted.cuts.add(cut)
            if step.tokens is not None and step.made_of != "summed":
                noted.weights.append((gradient.detach().double() / step.tokens).reshape(-1))
                noted.in_16_bits |= gradient.dtype.itemsize == 2
            if step.is_each:
                noted.add_each(gradient)
                noted.in_16_bits |= gradient.dtype.itemsize == 2
            if step.target is not None:
                noted.targets.append(step.target)
            if step.made_of in ("mixed", "ordered"):
                is_even = step.made_of == "ordered" and gradient.amax() == gradient.amin()
                noted.reduced.append(
                    (self.ring.rank + 1) * (1 - torch.as_tensor(is_even, device=gradient.device).long())
                )
            elif step.made_of:
                kept = gradient if reduced is None else reduced
                if step.made_of == "summed" and step.tokens is not None:
                    kept = (gradient.double() / step.tokens).bfloat16()  # a mean of another number differs by more
                (noted.picked if step.made_of == "picked" else noted.reduced).append(kept.detach())
            noted.reduced.extend(step.statistics)

        facts = step.tokens, step.divisor, step.target, cut
        if step.made_of or step.statistics or step.is_each or any(fact is not None for fact in facts):
            result.register_hook(passes)

    def compare(self, gradient: Tensor | None, place: torch.device | None = None) -> None:
        """Starts the comparison.

        Args:
            gradient: None under DDP, where no loss uses this output. place: the device of the output.
        """
        if gradient is None or not self.used:
            if self.on_some_ranks and place is not None:
                self._send(_NOTHING, self.ring.small_device(place))
            return
        device = self.ring.small_device(gradient.device)
        noted, self.noted = self.noted, _Noted()
        picked = noted.picked if len(noted.picked) == 1 else []  # more: a program that takes token by token
        mine: list[Any] = [0, 0, 0, *_as_set(noted.divisors, device), *_as_set([*noted.reduced, *picked], device)]
        if noted.targets:
            mine[:2] = torch.stack(noted.targets).amax(0).to(device)
        of_tokens = gradient.shape[:2] == (self.rows, self.tokens) or len(gradient) == self.rows * self.tokens
        if self.padding and of_tokens:  # else it is that of a weight
            mine[2] = gradient.reshape(self.rows, self.tokens, -1)[:, self.padding].any().long().to(device)
        mine += [*self._dropped(noted.cuts), int(noted.in_16_bits)]
        mine += weight_facts(noted.weights, noted.each, noted.each_count, self.rows, self.tokens, device)
        self._send(mine, device)

    def _send(self, mine: list[Any], device: torch.device) -> None:
        end = self.ring.start_agreement({}, device, collect=mine, doing="compared how it made its loss")
        loss_gradients.wait_for(device, lambda: _refuse(*end()))

    def _dropped(self, cuts: set[tuple[int, int]]) -> list[Any]:
        """How many tokens slices drop at the start and at the end, and did any have a label?

        Slices that follow one another, from the first token to the last, drop none.
        """
        end = self.tokens - len(self.padding)
        starts, ends = {0}, {end, self.tokens}
        for first, last in sorted(cuts):
            starts |= {last} if first in starts else set()
        for first, last in sorted(cuts, reverse=True):
            ends |= {first} if last in ends else set()
        apart = [cut for cut in cuts if cut[0] not in starts or cut[1] not in ends]
        at_start = min((first for first, last in apart if last in (end, self.tokens)), default=0)
        at_end = min((self.tokens - last for first, last in apart if first == 0 and last < end), default=0)
        if self.labels is None or not (at_start or at_end):
            return [at_start, at_end, 1]
        shifted = self.labels[1]
        dropped = shifted[:, :at_start], shifted[:, self.tokens - at_end :]
        return [at_start, at_end, torch.cat([x >= 0 for x in dropped], 1).any().long()]


_NOTHING = [*(0,) * 9, 1, 0, *NO_WEIGHTS]
"""Numbers of a rank that computed no loss."""


class Step(NamedTuple):
    """A step from tokens to a loss.

    Args:
        tokens: whose mean it took; 1 of a sum. divisor: by which it divided tokens. target: see `target_facts`.
        made_of: how it made them of all tokens. is_each: it made one number of each. statistics: numbers of the rank's
            tokens that it used, which have no gradient.
    """

    tokens: int | Tensor | None = None
    divisor: Any = None
    target: Tensor | None = None
    made_of: str = ""
    is_each: bool = False
    statistics: tuple[Any, ...] = ()


def _comparison(of: weakref.ref[Origin]) -> Callable[[Tensor | None], None]:
    """A hook that does not keep its origin alive: a weight may have it."""

    def compare(gradient: Tensor | None) -> None:
        origin = of()
        if origin is not None:
            origin.compare(gradient)

    return compare


def _as_set(found: list[Any], device: torch.device) -> tuple[int | Tensor, int | Tensor]:
    """Their number, and a number for all of them, each once, since ranks may sum over different numbers of parts."""
    if not found:
        return 0, 0
    numbers = row_of(numbers_of(found), device).sort().values
    again = numbers == numbers.roll(1)
    again[0] = False
    return (~again).sum(), numbers.masked_fill(again, 0).sum()


def _differ(counts: list[int], numbers: list[int], of_one_count: bool = False) -> bool:
    """Returns True if ranks have other numbers, those that have any. ``of_one_count``: if all have as many."""
    if of_one_count and len(set(filter(None, counts))) > 1:
        return False
    return len({number for count, number in zip(counts, numbers, strict=True) if count}) > 1


def _refuse(by_hand: list[int], others: list[int], counts_padding: list[int], *compared: list[int]) -> None:
    # Of few labels, those of a rank may be the same either way.
    if any(by_hand) and not any(others):
        raise errors.ShiftedByHand()
    at_start, at_end, are_labelled, in_16_bits = compared[4:8]
    if any(are_labelled) and all(len(set(x)) == 1 for x in (at_start, at_end)) and at_start[0] + at_end[0] > 0:
        raise errors.ShiftedByHand()
    averages = _differ(compared[0], compared[1], of_one_count=True)
    averages = averages or are_of_a_rank(compared[8:], any(in_16_bits))
    if _differ(compared[2], compared[3]) and not averages:
        raise errors.PooledOnOneRank()
    if any(counts_padding):
        raise errors.PaddingInLoss()
    if averages:
        raise errors.MeanOfOneRank()
