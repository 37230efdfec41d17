"""Targets of a rank's tokens in a loss: were these labels shifted by hand, or on the whole row?

The two differ where two chunks meet. A program may want the label of the token after the next one (heads that predict
several tokens): this is right as a column of the batch, and wrong if a rank shifts its labels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...sharding.layout import Layout
from ..context.whole_batch import IGNORED

MOST = 4
"""The most tokens by which labels are shifted."""


class FurtherLabels:
    """A rank's labels [B, T] that were shifted on the whole row by two tokens, by three, and so on.

    A state of a batch: they are made once, for the first loss that has targets.
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
