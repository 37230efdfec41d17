"""The texts of errors: short, in plain words, and each with something to do."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import pytest

from hf_ring_attn.errors import core

FILES: list[ModuleType] = [core]
"""The files of errors that are held to this."""

MOST_WORDS = 60
BANNED = re.compile(r"\b(told|tells?|dealt|deals?|lies?|kept|half-way|let go|to be had|of (one|its|their)s? own|say)\b")

ARGUMENTS: dict[str, Any] = {
    "length": 4097, "world_size": 8, "pads": True, "name": "documents", "got": (2, 4096), "what": "input_ids[0, 17]",
    "need": "[2, 4096], the whole row", "per_rank": [5, 7], "todo": "Give every rank the same whole batch.",
    "messages": {0: "images cannot be sharded.", 3: "images cannot be sharded."}, "doing": "gathered keys and values",
    "rank": 1, "size": 8, "reasons": {"triton": ["needs an NVIDIA GPU, got tensors on cpu"]}, "ring_size": 8,
    "reason": "the GPUs of ranks 0 and 1 have no peer-to-peer access", "failures": {0: "raised ValueError"},
    "silent": {1: ""}, "seconds": 12.0, "file": "speed.json", "why": "no runs",
}  # fmt: skip
"""What a class is given, by the names of its parameters."""


def classes() -> list[type[Exception]]:
    return [
        value
        for file in FILES
        for value in vars(file).values()
        if isinstance(value, type) and issubclass(value, Exception) and "__init__" in vars(value)
    ]


def text_of(kind: type[Exception]) -> str:
    return str(kind(*(ARGUMENTS[name] for name in list(inspect.signature(kind).parameters))))


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_an_error_has_few_words_and_plain_ones(kind: type[Exception]) -> None:
    text = text_of(kind)
    assert len(text.split()) <= MOST_WORDS, text
    assert not BANNED.search(text), text


def test_there_are_errors_to_read() -> None:
    assert len(classes()) >= 15
