"""The language of docstrings: each says at once what it does or is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import hf_ring_attn

PACKAGE = Path(hf_ring_attn.__file__).parent
RIDDLES = re.compile(r"(What|Whether|Of|Where|Which)\b")


def docstrings(source: str) -> list[tuple[int, str]]:
    """Every docstring, also of attributes and constants: (line, text)."""
    return [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def files() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", files())
def test_a_docstring_begins_with_a_verb_or_a_noun(file: str) -> None:
    found = docstrings((PACKAGE / file).read_text())
    assert [f"{file}:{line}: {text[:80]}" for line, text in found if RIDDLES.match(text)] == []


def test_a_riddle_is_seen() -> None:
    source = 'def f() -> None:\n    """Whether it is."""\n\nX = 1\n"""Of a rank."""\nY = 2\n"""Offsets."""\n'
    assert {line for line, text in docstrings(source) if RIDDLES.match(text)} == {2, 5}
