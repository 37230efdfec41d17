"""Real text that every machine with Python holds, the source of its standard library, with a byte as a token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import ByT5Tokenizer

VOCABULARY = 259
"""Padding, end, unknown, and the 256 bytes."""


def tokenizer() -> ByT5Tokenizer:
    """The bytes of UTF-8, each plus 3. It needs no files."""
    return ByT5Tokenizer(extra_ids=0)


def modules() -> Iterator[str]:
    """The text of the standard library's modules, in alphabetical order."""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        yield path.read_text(encoding="utf-8")


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens that follow each other in the text. The labels [length] are the input_ids [length] themselves.

    Args:
        count: how many rows; length: tokens in each.
        skip: rows that are left out before the first.

    Raises:
        ValueError: the standard library is shorter than that (it has about 7 million bytes).
    """

    def __init__(self, count: int, length: int, skip: int = 0) -> None:
        end = (skip + count) * length
        tokens: list[int] = []
        for text in modules():
            tokens += tokenizer().encode(text, add_special_tokens=False)
            if len(tokens) >= end:
                break
        else:
            raise ValueError(f"the text has {len(tokens)} tokens, fewer than the {end} that were asked for")
        self.tokens = torch.tensor(tokens[skip * length : end]).view(count, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def documents(count: int) -> list[str]:
    """``count`` short texts of different lengths: functions and classes, which two blank lines set apart."""
    pieces = (piece.strip() for text in modules() for piece in text.split("\n\n\n"))
    return list(islice(filter(None, pieces), count))
