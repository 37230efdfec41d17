"""The texts of errors: short, in plain words, and each with something to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import ModuleType

import pytest
import torch

from hf_ring_attn.errors import batches, core, hosts, losses
from tests.errors import examples

FILES: list[ModuleType] = [batches, core, hosts, losses]
"""The files of errors that are held to this."""

MOST_WORDS = 60
BANNED = re.compile(r"\b(told|tells?|dealt|deals?|lies?|kept|half-way|let go|to be had|of (one|its|their)s? own|say)\b")


def classes() -> list[type[Exception]]:
    return [
        value
        for file in FILES
        for value in vars(file).values()
        if isinstance(value, type) and issubclass(value, Exception) and "__init__" in vars(value)
    ]


def texts_of(kind: type[Exception]) -> list[str]:
    return [str(kind(**arguments)) for arguments in examples.given(kind, list(inspect.signature(kind).parameters))]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_an_error_has_few_words_and_plain_ones(kind: type[Exception]) -> None:
    for text in texts_of(kind):
        assert len(text.split()) <= MOST_WORDS, text
        assert not BANNED.search(text), text


def test_there_are_errors_to_read() -> None:
    assert len(classes()) >= 40


def test_classes_of_others_keep_their_modules() -> None:
    assert Mapping.__module__ == Sequence.__module__ == "collections.abc"
    assert core.BadOption.__module__ == "hf_ring_attn.errors"


def test_a_value_of_many_lines_is_shown_in_one() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert "\n" in repr(optimizer) and "\n" not in str(core.BadOption("model", optimizer, "a torch.nn.Module"))
