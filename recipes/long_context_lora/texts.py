"""Real text that every machine with Python holds, the source of its standard library, as rows of tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


def modules() -> Iterator[str]:
    """The text of the standard library's modules, its packages' too, in alphabetical order."""
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def by_bytes(text: str) -> list[int]:
    """A byte is a token: its value plus 3, as ByT5's tokenizer has it. It needs no files."""
    return [byte + 3 for byte in text.encode(errors="replace")]


class Rows(Dataset[dict[str, Tensor]]):
    """``count`` rows of ``length`` tokens that follow each other in the text; labels are the input_ids themselves.

    Raises:
        ValueError: the standard library has fewer tokens than that.
    """

    def __init__(self, encode: Callable[[str], list[int]], count: int, length: int) -> None:
        tokens: list[int] = []
        for text in modules():
            tokens += encode(text)
            if len(tokens) >= count * length:
                break
        else:
            raise ValueError(f"the text has {len(tokens)} tokens, fewer than {count} rows of {length}")
        self.tokens = torch.tensor(tokens[: count * length]).view(count, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}
