"""A model's output of one rank's tokens, and what a program makes of it on the way to its loss.

A program may compute its loss from a rank's tokens if the sum of the ranks' losses is the loss of the whole rows.
Nothing fails if it is not: the loss is a little off. Five ideas tell, each in its file:

- `shifts`: a token's label is the next token of the whole row, which may be on another rank;
- `pooling`: what is made of all tokens of a row must be the same on every rank;
- `trials`: a function that makes a token's result of others, too, is found by trying it;
- `weights`: every token has the same weight in the loss, whichever rank has it;
- `whole_counts`: a rank divides by a part of the whole count.

And tokens that only pad the row to the ring's length have no gradient. So torch's functions are followed from the
output on (`local_logits`). Each is a step with facts (`steps`). When the backward arrives at the output, the ranks
compare the facts of the steps that it passed through. What is only logged has no backward.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ...comm.fingerprint import numbers_of, row_of
from ..context.attended_layers import AttendedLayers
from ..gradients import loss_gradients
from ..log import warn
from . import shifts, weights, whole_counts
from .calls import Share


@dataclass(eq=False)
class Origin(Share):
    """One output of a model for each of a rank's tokens.

    Args:
        on_some_ranks: some ranks may compute a loss from it, and others none: that of a value head needs marked tokens,
            which a rank may lack. All ranks have its gradient, which later layers pass on.
        arrives: called in each backward that arrives at it.
        batch: what the program may count in the batch; None: it gave the count itself. layers: those of the batch.

    Attributes:
        used: a loss may have been computed from it, on every rank. trains: it has a gradient.
        noted: facts about the steps that the current backward passed through, by name (`steps`).
    """

    on_some_ranks: bool = False
    arrives: Callable[[], None] | None = None
    batch: whole_counts.BatchCounts | None = None
    layers: AttendedLayers = field(default_factory=AttendedLayers)
    used: bool = False
    trains: bool = False
    noted: dict[str, list[Any]] = field(default_factory=partial(defaultdict, list))

    def begin_at(self, x: Tensor) -> None:
        """Lets ranks compare once the backward has the gradient of ``x``, on which all that is followed depends."""
        self.trains = x.requires_grad
        if not x.requires_grad:
            return
        # A hook on a weight outlives the batch, so it must not keep this; one on a result ends with its graph.
        of: Callable[[], Origin | None] = weakref.ref(self) if x.grad_fn is None else lambda: self
        device = x.device

        def compare(gradient: Tensor | None) -> None:
            if (origin := of()) is not None:
                if origin.arrives is not None:
                    origin.arrives()
                origin.compare(gradient, device)

        hook = x.register_hook(compare)
        if x.grad_fn is None:
            weakref.finalize(self, hook.remove)

    def anew(self) -> Origin:
        """The same for another beginning."""
        return replace(self, on_some_ranks=False, noted=defaultdict(list))

    def note(self, facts: dict[str, Any], result: Tensor) -> None:
        """Notes facts about a step, once the backward passes through its ``result``."""

        def passes(gradient: Tensor) -> None:
            for name, fact in facts.items():
                found = self.noted[name]
                if name == "nearest":
                    found.clear()
                is_enough = name == "each" and len(found) >= weights.MOST_EACH  # of more, ranks compare the number
                found.append(None if is_enough else fact(gradient.detach()) if callable(fact) else fact)

        if facts:
            result.register_hook(passes)

    def read(self, logits: Tensor) -> None:
        """Reads weights of tokens from the gradient of their logits, if no step from these to the loss was followed.

        Args:
            logits: the model computed no loss of them.
        """
        if not logits.requires_grad:
            return
        sample = weights.Sample.of(logits.detach(), None if self.labels is None else self.labels[1])

        def passes(gradient: Tensor | None) -> None:
            if gradient is None:  # under DDP, of logits that no loss uses
                return
            self.used = True
            if not (self.noted["each"] or self.noted["in_sums"]):
                self.noted["each"].append(sample.weights(gradient))
                self.noted["bytes"].append(gradient.itemsize)

        logits.register_hook(passes)

    def compare(self, gradient: Tensor | None, device: torch.device) -> None:
        """Starts the comparison.

        Args:
            gradient: None under DDP, where no loss uses this output. device: of the output.
        """
        has_loss = gradient is not None and self.used
        if not (has_loss or self.on_some_ranks):
            return
        device = self.ring.small_device(device)
        message = Message.of(self, gradient if has_loss else None, device)
        self.noted.clear()
        loss_gradients.compare_with_layers(
            self.ring, {}, message.packed(), self.layers, "compared how it made its loss", device,
            lambda *columns: _refuse(Message.unpacked(list(columns))),
        )  # fmt: skip


class Message(
    namedtuple(
        "Message",
        "shifted_by_hand other_targets dropped_at_start dropped_at_end dropped_labels divisors divided_by pooled "
        "pooled_to pads in_16_bits by_whole_count each_count weights groups",
    )
):
    """Facts about a rank's loss as it sends them; and, as all ranks receive them, a list of each.

    Flags: of targets; of tokens that slices drop, if some have labels; of a gradient of padding; of a whole count.
    divisors, pooled: how many, and then a number for all of them. weights, groups: their summaries, with one more dim
    as received.
    """

    @staticmethod
    def of(origin: Origin, gradient: Tensor | None, device: torch.device) -> Message:
        """Collects the facts. ``gradient``: of the output, or of a weight; None: the rank computed no loss."""
        noted, rows, tokens, padding = origin.noted, origin.rows, origin.tokens, origin.padding
        targets = torch.stack(noted["targets"]).to(device) if noted["targets"] else None
        by_hand, others = (0, 0) if targets is None else targets[:, :2].amax(0)
        are_labels = None if targets is None else targets[:, 2].bool().all()
        picked = noted["picked"] if len(noted["picked"]) == 1 else []  # more: a program that takes token by token
        pooled = [*noted["pooled"], *chain.from_iterable(noted["statistics"]), *picked]
        pads: int | Tensor = 0
        if gradient is not None and (gradient.shape[:2] == (rows, tokens) or gradient.shape[:1] == (rows * tokens,)):
            pads = gradient.reshape(rows, tokens, -1)[:, padding].any().long().to(device) if padding else 0
        return Message(
            by_hand, others, *shifts.dropped_by(set(noted["cuts"]), origin, are_labels),
            *_as_set(noted["divisors"], device), *_as_set(pooled, device), pads, int(2 in noted["bytes"]),
            whole_counts.divides_by_whole(noted["factors"], origin.batch, origin.ring.size, device),
            len(noted["each"]), weights.summaries(noted["in_sums"], noted["each"], rows, tokens, device),
            weights.groups_of(noted, None if origin.labels is None else origin.labels[1], device),
        )  # fmt: skip

    def packed(self) -> list[Any]:
        """Integers, equally many on every rank."""
        return [*self[:-2], *torch.cat([self.weights.flatten(), self.groups]).view(torch.int64)]

    @staticmethod
    def unpacked(columns: list[list[int]]) -> Message:
        """The lists of all ranks' facts. ``columns``: each integer, of all ranks."""
        facts: Any = columns[: len(Message._fields) - 2]
        table = torch.tensor(columns[len(facts) :], dtype=torch.int64).view(torch.float64).T
        number = math.prod(weights.GROUPS)
        summaries, groups = table[:, :-number], table[:, -number:]
        return Message(*[*facts, summaries.unflatten(1, (-1, weights.SUMMARY)), groups])


def _as_set(found: list[Any], device: torch.device) -> tuple[int | Tensor, int | Tensor]:
    """The number of different values, and one number for all of these: ranks may sum over other numbers of parts."""
    if not found:
        return 0, 0
    numbers = row_of(numbers_of(found), device).sort().values
    again = numbers == numbers.roll(1)
    again[0] = False
    return (~again).sum(), numbers.masked_fill(again, 0).sum()


def _differ(counts: list[int], numbers: list[int]) -> bool:
    """Returns True if numbers differ among the ranks whose count is not 0."""
    return len({number for count, number in zip(counts, numbers, strict=True) if count}) > 1


def _refuse(ranks: Message) -> None:
    """Raises on every rank if the sum of the ranks' losses is not that of the whole rows."""
    # A rank that has few labels may have the same targets either way.
    if any(ranks.shifted_by_hand) and not any(ranks.other_targets):
        raise errors.ShiftedByHand()
    dropped = set(zip(ranks.dropped_at_start, ranks.dropped_at_end, strict=True))
    if any(ranks.dropped_labels) and len(dropped) == 1 and dropped != {(0, 0)}:
        raise errors.ShiftedByHand()
    averages = len(set(filter(None, ranks.divisors))) == 1 and _differ(ranks.divisors, ranks.divided_by)
    in_16_bits = any(ranks.in_16_bits)
    averages = averages or weights.are_of_a_rank(ranks.weights, ranks.each_count, in_16_bits)
    if _differ(ranks.pooled, ranks.pooled_to) and not averages:
        raise errors.PooledOnOneRank()
    if any(ranks.pads):
        raise errors.PaddingInLoss()
    if averages or (not in_16_bits and weights.divide_by_groups(ranks.groups)):
        raise errors.MeanOfOneRank()
    if any(ranks.by_whole_count):
        warn(whole_counts.DIVIDED.format(len(ranks.by_whole_count)), everywhere=False)
