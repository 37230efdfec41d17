"""The rows of the sweep: two rows of tokens, plain, padded on one side, or packed, and what their oracle is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .configs import VOCABULARY

IGNORED = -100
FIRST_TOKEN = 3
"""Ids below are padding, begin and end; models may treat them otherwise."""

PADDING = {"right": ((0, 7), (0, 2)), "left": ((5, 0), (0, 0))}
"""Kind: for each of the two rows, how much padding stands (before, after) its real tokens."""
DOCUMENTS = {24: ((5, 12, 7), (10, 14)), 23: ((3, 13, 7), (9, 14))}
"""Length: the documents of each row; none is a multiple of a rank's chunk, some are longer than a rank's share."""


@dataclass(frozen=True)
class Row:
    """``kind``: "plain", "right" and "left" (padded, with a 2-D mask), "packed" (position_ids restart), or "rope": a
    plain row beyond the length at which RoPE of type "dynamic" begins to stretch."""

    kind: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.length}"

    def batch(self, numbered: bool = False) -> dict[str, Tensor]:
        """input_ids and labels [2, S], and what makes it this kind of row. Padding and first tokens have no label.

        ``numbered``: with position_ids, for models that a ring takes only with them.
        """
        generator = torch.Generator().manual_seed(self.length)
        ids = torch.randint(FIRST_TOKEN, VOCABULARY, (2, self.length), generator=generator)
        labels = ids.clone()
        labels[0, 9:12] = IGNORED
        batch = {"input_ids": ids, "labels": labels}
        if self.kind == "packed":
            each = [torch.cat([torch.arange(count) for count in counts]) for counts in DOCUMENTS[self.length]]
            batch["position_ids"] = torch.stack(each)
            labels[batch["position_ids"] == 0] = IGNORED
        elif self.kind in PADDING:
            mask = torch.ones_like(ids)
            for row, (before, after) in enumerate(PADDING[self.kind]):
                mask[row, :before] = 0
                mask[row, self.length - after :] = 0
            batch["attention_mask"] = mask
            batch["input_ids"] = ids.masked_fill(mask == 0, 0)
            batch["labels"] = labels.masked_fill(mask == 0, IGNORED)
            # What padding predicts is arbitrary in eager attention too: no label for the first real token.
            for row, (before, _) in enumerate(PADDING[self.kind]):
                batch["labels"][row, before] = IGNORED
        if numbered:
            batch.setdefault("position_ids", torch.arange(self.length).expand(2, -1).contiguous())
        return batch

    def documents(self) -> list[tuple[int, int, int]]:
        """Of a packed row: (row, start, stop) of every document, in order."""
        found = []
        for row, counts in enumerate(DOCUMENTS[self.length]):
            start = 0
            for count in counts:
                found.append((row, start, start + count))
                start += count
        return found


KINDS = ("plain", "right", "left", "packed", "rope")
LENGTHS = (24, 23)
ROWS = tuple(Row(kind, length) for kind in KINDS for length in LENGTHS)


def projection(length: int) -> Tensor:
    """[S, V] fixed random weights of a loss of whole rows, for models whose own loss is refused."""
    return torch.randn(length, VOCABULARY, generator=torch.Generator().manual_seed(7)) / length
