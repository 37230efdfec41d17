"""The idea: a loss compares each token with the next one of the whole row.

The next token of a chunk's last one is on another rank. Let l be a rank's labels, and s those that were shifted on the
whole row: s[t] = l[t + 1], but not where two chunks meet. So a program must use s. If it shifts by hand, then

- a slice, as logits[:, :-1], leaves out tokens that have a label in s, at the same place on every rank; or
- its targets are l[1:] or s[1:] where s, or what was shifted further on the whole row, is different.

The same holds for input_ids, which are targets of more tokens if some labels are masked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import errors
from ...sharding.layout import Layout
from ..context.local_batch import MadeInputs
from ..context.whole_batch import IGNORED
from .calls import Call, Share

MOST = 4
"""The most tokens by which labels are shifted."""
TARGETED = {"cross_entropy", "nll_loss", "gather", "take_along_dim"}
"""Functions that get targets."""


def refuse_shift(call: Call) -> None:
    """Refuses all tokens but the first or the last one, unless as one of several slices by numbers."""
    shape = call.x.shape
    if (axis := call.share.axis(shape)) is None:
        return
    entry, one_less = call.entry(axis), (slice(None, shape[axis] - 1), slice(1, None))
    if isinstance(entry, slice) and (entry.stop == -1 or entry in one_less):
        raise errors.ShiftedByHand()


def cut_of(call: Call) -> tuple[int, int] | None:
    """Returns the first token and the end of those that a slice takes; None: it is no slice of tokens."""
    share, shape = call.share, call.x.shape
    axis = share.axis(shape)
    entry = None if axis is None or shape[axis] != share.tokens else call.entry(axis)
    if not isinstance(entry, slice) or entry == slice(None):
        return None
    start, stop, by = entry.indices(share.tokens)
    return (start, stop) if by == 1 and stop > start else None


def dropped_by(cuts: set[tuple[int, int]], share: Share, are_labels: Tensor | None) -> tuple[int, int, int | Tensor]:
    """Returns how many tokens slices drop at the start and at the end, and 1 if any of these has a target.

    Slices that follow one another, from the first token to the last, drop none.

    Args:
        are_labels: the targets are the batch's labels, as far as slices left them; None: there are no targets.
    """
    end = share.tokens - len(share.padding)
    starts, ends = {0}, {end, share.tokens}
    for first, last in sorted(cuts):
        starts |= {last} if first in starts else set()
    for first, last in sorted(cuts, reverse=True):
        ends |= {first} if last in ends else set()
    apart = [cut for cut in cuts if cut[0] not in starts or cut[1] not in ends]
    at_start = min((first for first, last in apart if last in (end, share.tokens)), default=0)
    at_end = min((share.tokens - last for first, last in apart if first == 0 and last < end), default=0)
    if share.labels is None or are_labels is None or not (at_start or at_end):
        return at_start, at_end, 1
    _, shifted = share.labels
    dropped = shifted[:, :at_start], shifted[:, share.tokens - at_end :]
    has_label = torch.cat([x >= 0 for x in dropped], 1).any()
    return at_start, at_end, (has_label | ~are_labels.to(has_label.device)).long()


def target_of(call: Call) -> Tensor | None:
    """Returns the facts about the first targets among the arguments (`target_facts`); None: there are none."""
    if call.name not in TARGETED or call.share.known_targets is None:
        return None
    rows, tokens = call.share.rows, call.share.tokens
    for x in (*call.args, *call.kwargs.values()):
        of_tokens = isinstance(x, Tensor) and x.numel() in (rows * tokens, rows * (tokens - 1))
        if of_tokens and not x.is_floating_point():
            known = call.share.known_targets()
            return None if known is None else target_facts(x.detach().reshape(rows, -1), known)
    return None


class Shifted(NamedTuple):
    """Labels or ids of a rank's tokens that were shifted in several ways: [n, B, T - 1], without the last token.

    Args:
        ends: [n] a shift by several tokens has so few of these.
    """

    targets: Tensor
    ends: Tensor

    def like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n] each: x [B, T - 1] is them; x is them where they are not ignored."""
        beyond = (torch.arange(x.shape[1], device=x.device) >= self.ends[:, None])[:, None]
        is_same = (x.clamp(min=0) == self.targets.clamp(min=0)) | beyond
        is_same_label = (x == self.targets) | (self.targets < 0) | beyond
        return is_same.flatten(1).all(1), is_same_label.flatten(1).all(1)


class KnownTargets(NamedTuple):
    """The targets that a program may have made. ``labels``: how many of ``right`` are labels, the first of them."""

    by_hand: Shifted
    right: Shifted
    labels: int


def target_facts(targets: Tensor, known: KnownTargets) -> Tensor:
    """[3] integers: targets are labels or ids that were shifted by hand; they are others; they are labels.

    Args:
        targets: [B, T] or [B, T - 1].
    """
    x = targets[:, : known.right.targets.shape[2]].to(known.right.targets)
    by_hand, right = known.by_hand.like(x), known.right.like(x)
    # Where labels are masked, ids that were shifted by hand may differ from labels there alone.
    is_right = right[0].any() | (right[1].any() & ~by_hand[0].any())
    is_by_hand = torch.cat(by_hand).any() & ~is_right
    return torch.stack([is_by_hand, ~(is_by_hand | is_right), right[0][: known.labels].any()]).long()


class TargetsOfBatch:
    """The labels and the ids of a rank, shifted by hand and on the whole row.

    A program may want those that are shifted by several tokens, for heads that predict several. A state of a batch:
    they are made once, for the first loss that has targets.
    """

    made: KnownTargets | None = None

    def of(self, inputs: MadeInputs, rows: int, layout: Layout) -> KnownTargets | None:
        """Returns them; None: the batch has neither labels nor ids."""
        if self.made is None:
            shape, known = (rows, layout.local_length), list[tuple[Tensor, list[Tensor]]]()
            labels, shifted = (x.value for x in (inputs.labels, inputs.shifted))
            if labels is not None and labels.shape == shape:
                known.append((labels, [shifted, *_shifted(inputs.whole_shifted, layout)[: MOST - 1]]))
            of_labels = sum(len(whole) for _, whole in known)
            ids, whole_ids = inputs.ids
            if ids is not None and ids.shape == shape and (whole := _shifted(whole_ids, layout)):
                known.append((ids, whole))
            if not known or shape[1] < 2:
                return None
            by_hand = [x for own, whole in known for x in _by_hand(own, whole)]
            right = [x[:, :-1] for _, whole in known for x in whole]
            self.made = KnownTargets(_stacked(by_hand), _stacked(right), of_labels)
        return self.made


def _shifted(whole: Tensor | None, layout: Layout) -> list[Tensor]:
    """A rank's part of whole rows [B, S] that are shifted by one token, by two, and so on."""
    if whole is None or whole.dim() != 2 or whole.shape[1] != layout.length:
        return []
    tails = (pad(whole[:, by:], (0, min(by, layout.length)), value=IGNORED) for by in range(1, MOST + 1))
    return [layout.shard(layout.pad(x, 1, IGNORED), 1) for x in tails]


def _by_hand(own: Tensor, whole: list[Tensor]) -> list[Tensor]:
    """Returns what a program makes of a rank's labels, or of those that were shifted by one token on the whole row."""
    numbers = range(1, min(len(whole), own.shape[1] - 1) + 1)
    return [x for by in numbers for x in (own[:, by:], whole[0][:, by - 1 : -1])]


def _stacked(found: list[Tensor]) -> Shifted:
    longest = max(x.shape[1] for x in found)
    ends = torch.tensor([x.shape[1] for x in found]).to(found[0].device, non_blocking=True)
    padded = (pad(x, (0, longest - x.shape[1]), value=IGNORED) for x in found)
    return Shifted(torch.stack([x.to(torch.int32) for x in padded]), ends)
