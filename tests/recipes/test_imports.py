"""Programs that mypy and the tests of the package do not reach: all that they import of it exists."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.programs import REPOSITORY

FOLDERS = ("recipes", "examples", "docs_tools", "tests/gpu")
PROGRAMS = sorted(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py"))


def names_of_ours(source: str) -> Iterator[tuple[str, str]]:
    """Each module of ours that a program imports, wherever in it, and each name from there ("": the module alone)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        yield from ((module, name) for module, name in found if module.split(".")[0] == "hf_ring_attn")


def exists(module: str, name: str) -> bool:
    """Returns True if ``name`` is there: an attribute of the module, or a module in it."""
    try:
        if not name or hasattr(importlib.import_module(module), name):
            return importlib.import_module(module) is not None
        return importlib.import_module(f"{module}.{name}") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_a_program_imports_only_what_is_there(program: Path) -> None:
    """A benchmark imported a class that had another name by then: it ended at its first line."""
    assert [name for name in names_of_ours(program.read_text()) if not exists(*name)] == []


def test_a_name_that_is_gone_is_seen() -> None:
    source = "def late():\n    from hf_ring_attn.bench.clock import Call, Timed\nimport hf_ring_attn.gone, torch"
    assert sorted(names_of_ours(source)) == [
        ("hf_ring_attn.bench.clock", "Call"), ("hf_ring_attn.bench.clock", "Timed"), ("hf_ring_attn.gone", ""),
    ]  # fmt: skip
    assert sorted(name for name in names_of_ours(source) if not exists(*name)) == [
        ("hf_ring_attn.bench.clock", "Call"), ("hf_ring_attn.gone", ""),
    ]  # fmt: skip
    assert exists("hf_ring_attn.bench", "clock") and not exists("hf_ring_attn.bench", "gone")
