"""The idea: a loss compares each token with the next one of the whole row.

The next token of a chunk's last one is on another rank. Let l be a rank's labels, and s those that were shifted on the
whole row: s[t] = l[t + 1], but not where two chunks meet. So a program must use s. If it shifts by hand, then

- a slice, as logits[:, :-1], leaves out tokens that have a label in s, at the same place on every rank; or
- its targets are l[1:] or s[1:] where s, or what was shifted further on the whole row, is different.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import errors
from ...sharding.layout import Layout
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


def dropped_by(cuts: set[tuple[int, int]], share: Share) -> tuple[int, int, int | Tensor]:
    """Returns how many tokens slices drop at the start and at the end, and 1 if any of these has a label.

    Slices that follow one another, from the first token to the last, drop none.
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
    if share.labels is None or not (at_start or at_end):
        return at_start, at_end, 1
    _, shifted = share.labels
    dropped = shifted[:, :at_start], shifted[:, share.tokens - at_end :]
    return at_start, at_end, torch.cat([x >= 0 for x in dropped], 1).any().long()


def target_of(call: Call) -> Tensor | None:
    """Returns the facts about the first targets among the arguments (`target_facts`); None: there are none."""
    if call.name not in TARGETED or call.share.labels is None:
        return None
    rows, tokens = call.share.rows, call.share.tokens
    for x in (*call.args, *call.kwargs.values()):
        of_tokens = isinstance(x, Tensor) and x.numel() in (rows * tokens, rows * (tokens - 1))
        if of_tokens and not x.is_floating_point():
            return target_facts(x.detach().reshape(rows, -1), *call.share.labels, *call.share.further())
    return None


def target_facts(targets: Tensor, labels: Tensor, *shifted: Tensor) -> Tensor:
    """[2] integers: targets are labels that were shifted by hand; they are others. Both 0: shifted on the whole row.

    Args:
        targets: [B, T] or [B, T - 1]. labels: of the rank. shifted: on the whole row by one token, by two, and so on.
    """
    tokens = labels.shape[1]
    by_hand, right = [], []
    for by, whole in enumerate(shifted[: max(tokens - 1, 0)], start=1):
        known = targets[:, : tokens - by]
        by_hand += [_like(known, labels[:, by:]), _like(known, shifted[0][:, by - 1 : -1])]
        right.append(_like(known, whole[:, : tokens - by]))
    is_right = torch.stack(right).any(0)
    is_by_hand = torch.stack(by_hand).any(0)
    return torch.stack([(is_by_hand & ~is_right).any(), ~(is_by_hand | is_right).any()]).long()


def _like(x: Tensor, y: Tensor) -> Tensor:
    """[2] x is y: exactly, but for the number of those that are ignored; where y has labels."""
    return torch.stack([(x.clamp(min=0) == y.clamp(min=0)).all(), ((x == y) | (y < 0)).all()])


class FurtherLabels:
    """A rank's labels [B, T] that were shifted on the whole row by two tokens, by three, and so on.

    A program may want them for heads that predict several tokens. A state of a batch: they are made once, for the first
    loss that has targets.
    """

    made: tuple[Tensor, ...] | None = None

    def of(self, whole: Tensor | None, layout: Layout) -> tuple[Tensor, ...]:
        """Returns them. ``whole``: [B, S] labels that were shifted by one."""
        if whole is None or whole.dim() != 2 or whole.shape[1] != layout.length:
            return ()
        if self.made is None:
            tails = [whole[:, by:] for by in range(1, MOST)]
            further = [torch.nn.functional.pad(x, (0, layout.length - x.shape[1]), value=IGNORED) for x in tails]
            self.made = tuple(layout.shard(layout.pad(x, 1, IGNORED), 1) for x in further)
        return self.made
