"""The two tables of CONTRIBUTING.md that the code must agree with: patches of hosts, and mutable globals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_ring_attn import integration
from hf_ring_attn.integration.hosts import trainer_start
from hf_ring_attn.integration.patching.changes import Patch

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "hf_ring_attn"
TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text()
CODE = re.compile(r"`([^`]+)`")
MUTABLE = re.compile(r"Weak|^RunningLayers$|^(list|OrderedDict|dict|set|deque|local|threading\.local)$")


def table(head: str) -> str:
    """The first column of the table with this head, below it."""
    rows = TEXT.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return "\n".join(row.split("|")[1] for row in rows)


PATCHES = [change for change in integration.CHANGES if isinstance(change, Patch)]
PATCHES += [patch for each in trainer_start.TRL_PATCHES.values() for patch in each]


@pytest.mark.parametrize("target", sorted({patch.target for patch in PATCHES}))
def test_every_patch_of_a_host_has_a_row(target: str) -> None:
    names = {part.rpartition(".")[2] for part in CODE.findall(table("patched"))}
    assert target.rpartition(":")[2].rpartition(".")[2] in names


def mutable_globals(source: str) -> Iterator[str]:
    """The names that functions of a file rebind, and containers that begin empty."""
    tree = ast.parse(source)
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(target, ast.Name) and value is not None and (target.id in rebound or _is_empty(value)):
            yield target.id


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return not value.args and MUTABLE.search(ast.unparse(value.func)) is not None
    return (isinstance(value, ast.List) and not value.elts) or (isinstance(value, ast.Dict) and not value.keys)


GLOBALS = {
    f"{path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.').removesuffix('.__init__')}.{name}"
    for path in sorted(PACKAGE.rglob("*.py"))
    for name in mutable_globals(path.read_text())
}


def listed() -> set[str]:
    """The globals in the table; a name without a file is in that of the name before it."""
    found, file = set(), ""
    for name in CODE.findall(table("global")):
        file = name.rpartition(".")[0] or file
        found.add(f"{file}.{name.rpartition('.')[2]}")
    return found


def test_the_table_of_mutable_globals_is_complete_and_has_no_others() -> None:
    assert sorted(GLOBALS - listed()) == []
    assert sorted(listed() - GLOBALS) == []


def test_mutable_globals_are_seen() -> None:
    source = (
        "A = []\nB: dict[int, int] = {}\nC = WeakIdKeyDictionary()\nD = (1,)\nE = 0\ndef f():\n    global E\nF = {1: 2}"
    )
    assert list(mutable_globals(source)) == ["A", "B", "C", "E"]
