"""The import rules: which room of the package may know which other room, which host, and the environment.

A room is a module or a folder directly under hf_ring_attn. The rules are the tables below; ``violations`` reads one
file against them, and the planted violations show that each rule can go red.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "hf_ring_attn"
MOST_LINES = 320

BASE = {"errors", "config", "arguments"}
CORE = BASE | {"layout", "mask", "comm", "fingerprints", "kernels", "once"}
ALONG = {"sequence", "by_heads"}
RING = CORE | ALONG | {
    "balance", "exchange", "tables", "choice", "trial", "traffic", "backward", "ring", "scored", "functional",
}  # fmt: skip
HOST = RING | {"integration", "biases"}
TOOLS = {"doctor", "plan", "bench", "verify"}

# room -> the rooms it may import; every room may import itself
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "arguments": {"errors"},
    "config": {"arguments", "errors"},
    "once": {"errors"},  # of any autograd function
    "layout": BASE,
    "balance": BASE | {"layout"},  # whose chunks are whose, by the work of documents alone
    "mask": BASE | {"layout"},
    "fingerprints": set(),  # of any tensor
    "comm": BASE | {"fingerprints"},  # traffic: buffers and groups, never who sees whom
    "kernels": BASE | {"mask"},  # arithmetic: tiles as data, never a process group
    "exchange": BASE | {"comm"},
    "sequence": BASE | {"comm", "layout", "exchange", "once"},  # layers beside attention: which tokens go where
    "by_heads": BASE | {"sequence", "once"},  # and which heads
    "tables": BASE | {"layout", "mask", "comm", "exchange"},
    "choice": CORE | {"trial"},
    "traffic": BASE | {"comm", "layout", "exchange"},  # roads: how bytes move, whatever they mean
    "backward": CORE | {"tables", "traffic"},
    "ring": CORE | {"backward", "tables", "traffic"},
    "trial": CORE | {"backward", "ring", "tables", "traffic"},  # the real ring's code, with ranks that are played
    "scored": CORE | {"backward", "ring", "tables", "traffic"},
    "functional": CORE | {"choice", "ring", "scored", "tables", "traffic"},
    "biases": {"errors"},  # functions for users: they know no ring
    "integration": RING,
    "testing": RING,
    "doctor": HOST | {"testing"},
    "plan": HOST | {"testing"},
    "bench": HOST | {"testing"},
    "verify": HOST | {"testing"},
    "run": HOST | {"__init__"},  # imports the plugin, then runs a stranger's program
    "cli": HOST | TOOLS | {"__init__"},
    "__main__": {"cli"},
    "__init__": HOST,
}


class Users(NamedTuple):
    """Who may import a package, and who may only name its types (under TYPE_CHECKING)."""

    importers: set[str]
    type_users: frozenset[str] = frozenset()


# the most specific row that fits an import decides; a package without a row is anybody's
PACKAGES: dict[str, Users] = {
    "transformers": Users({"integration"}),
    "accelerate": Users({"integration"}),
    "peft": Users({"integration"}),
    "trl": Users({"integration"}),
    "torch.distributed": Users(
        {"comm", "traffic", "testing", "bench"}, frozenset({"functional", "integration", "__init__"})
    ),
    "torch.multiprocessing": Users({"testing"}),
    "triton": Users({"kernels"}),
    "flash_attn": Users({"kernels", "bench"}),  # a benchmark times it as it is shipped
}

# room -> why it may touch os.environ
ENVIRONMENT = {
    "config": "it is the one reader of our own variables",
    "bench": "a result's head tells the launcher that started it, and the commit of a copy without .git",
    "testing": "it sets the variables of torch's launcher (rank, world size) for the ranks it starts",
}


class Import(NamedTuple):
    line: int
    name: str  # dotted, absolute
    type_only: bool


def room_of(name: str) -> str:
    """hf_ring_attn.kernels.base -> kernels; a public name taken from the package itself -> __init__."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "__init__"


def type_only_nodes(tree: ast.AST) -> set[ast.AST]:
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}


def dotted(node: ast.expr) -> str:
    """torch.distributed.broadcast as a string; "" for what is not a plain chain of names."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def imports(tree: ast.Module, module: str, is_folder: bool) -> Iterator[Import]:
    """Everything a file imports, wherever in the file, and what it reaches as an attribute (torch.distributed.x)."""
    type_only = type_only_nodes(tree)
    parents = module.split(".") if is_folder else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            names = [f"{origin}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            names = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        elif isinstance(node, ast.Attribute):
            names = [name] if (name := dotted(node)) in PACKAGES else []
        else:
            continue
        for name in names:
            yield Import(node.lineno, name, node in type_only)


def users_of(name: str) -> Users | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((PACKAGES[prefix] for prefix in prefixes if prefix in PACKAGES), None)


def environment_lines(tree: ast.AST) -> Iterator[int]:
    """The lines that reach os.environ, os.getenv or os.putenv."""
    doors = {"environ", "getenv", "putenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            reached = {node.attr} if dotted(node.value) == "os" else set()
        elif isinstance(node, ast.ImportFrom):
            reached = {alias.name for alias in node.names} if node.module == "os" else set()
        else:
            continue
        if reached & doors:
            yield node.lineno


def violations(source: str, module: str, is_folder: bool = False) -> list[str]:
    """What in the file ``source`` of the dotted name ``module`` breaks a rule, a line each."""
    tree = ast.parse(source)
    room = room_of(module)
    found = []
    for line, name, type_only in imports(tree, module, is_folder):
        where = f"{module}, line {line}: {room} imports {name}"
        if name.split(".")[0] == PACKAGE.name:
            target = room_of(name)
            if target != room and target not in MAY_IMPORT[room]:
                found.append(f"{where}, but of our rooms it may import only {sorted(MAY_IMPORT[room])}")
        elif users := users_of(name):
            allowed = users.importers | (users.type_users if type_only else set())
            if room not in allowed:
                found.append(f"{where}, which only {sorted(users.importers)} may")
    if room not in ENVIRONMENT:
        where = f"{room} touches the environment, which only {sorted(ENVIRONMENT)} may"
        found += [f"{module}, line {line}: {where}" for line in environment_lines(tree)]
    return found


def module_of(path: Path) -> tuple[str, bool]:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    is_folder = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_folder else parts), is_folder


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_keeps_the_import_rules(path: Path) -> None:
    module, is_folder = module_of(path)
    assert violations(path.read_text(), module, is_folder) == []


def test_every_room_has_a_row() -> None:
    rooms = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - set(MAY_IMPORT) == set(), "a new room: say in MAY_IMPORT what it may know"


def test_no_two_rooms_may_import_each_other() -> None:
    pairs = [(a, b) for a, known in MAY_IMPORT.items() for b in known if a < b and a in MAY_IMPORT[b]]
    assert pairs == [], "imports go one way"


@pytest.mark.parametrize("folder", ["hf_ring_attn", "tests", "examples"])
def test_a_file_holds_one_idea(folder: str) -> None:
    long = {
        str(path.relative_to(REPOSITORY)): lines
        for path in (REPOSITORY / folder).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}, f"more than {MOST_LINES} lines: split it by idea"


ONLY = "only ['bench', 'comm', 'testing', 'traffic'] may"

PLANTED = [
    ("hf_ring_attn.kernels.base", "from ..comm import Ring", "kernels imports hf_ring_attn.comm.Ring"),
    ("hf_ring_attn.kernels.base", "from .. import comm", "kernels imports hf_ring_attn.comm"),
    ("hf_ring_attn.kernels.base", "import torch.distributed as dist", ONLY),
    ("hf_ring_attn.kernels.base", "from torch import distributed", ONLY),
    ("hf_ring_attn.kernels.base", "import torch\ntorch.distributed.barrier()", "kernels imports torch.distributed"),
    (
        "hf_ring_attn.kernels.base",
        "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup",
        "kernels imports torch.distributed.ProcessGroup",
    ),
    ("hf_ring_attn.comm", "from .mask import Band", "comm imports hf_ring_attn.mask.Band"),
    ("hf_ring_attn.comm", "def late():\n    import hf_ring_attn.mask", "comm imports hf_ring_attn.mask"),
    ("hf_ring_attn.ring", "from .integration import batch", "ring imports hf_ring_attn.integration.batch"),
    ("hf_ring_attn.ring", "import transformers", "only ['integration'] may"),
    ("hf_ring_attn.ring", "import importlib\nimportlib.import_module('trl.trainer')", "ring imports trl.trainer"),
    ("hf_ring_attn.functional", "from accelerate import Accelerator", "only ['integration'] may"),
    ("hf_ring_attn.integration.peft", "import triton", "only ['kernels'] may"),
    ("hf_ring_attn.integration.batch", "import torch.distributed", ONLY),
    ("hf_ring_attn.integration.batch", "from ..cli import main", "integration imports hf_ring_attn"),
    ("hf_ring_attn.integration.accelerate", "import os\nx = os.environ.get('A')", "touches the environment"),
    ("hf_ring_attn.layout", "from os import getenv", "touches the environment"),
    ("hf_ring_attn.layout", "import os\nos.environ['A'] = ''", "touches the environment"),
    ("hf_ring_attn.errors", "from .config import RingConfig", "errors imports hf_ring_attn.config"),
    ("hf_ring_attn.config", "from .layout import Layout", "config imports hf_ring_attn.layout"),
]


@pytest.mark.parametrize(("module", "source", "complaint"), PLANTED, ids=[f"{row[0]}: {row[1]}" for row in PLANTED])
def test_a_planted_violation_is_seen(module: str, source: str, complaint: str) -> None:
    found = violations(source, module)
    assert len(found) == 1, found
    assert complaint in found[0]


def test_what_is_allowed_is_let_through() -> None:
    host = "from ..ring import attend\nimport transformers\nfrom . import masks"
    kernel = "from .base import Kernel\nfrom ..mask import Tile"
    type_only = "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup"
    assert violations(host, "hf_ring_attn.integration.trainer") == []
    assert violations(kernel, "hf_ring_attn.kernels.reference") == []
    assert violations(kernel, "hf_ring_attn.kernels", is_folder=True) == []
    assert violations("from .layout import positions", "hf_ring_attn", is_folder=True) == []
    assert violations(type_only, "hf_ring_attn.functional") == []


FRESH_IMPORT = """
import json, os, sys, threading, time
from transformers import Trainer
modules, environment, threads = set(sys.modules), dict(os.environ), threading.active_count()
began = time.perf_counter()
import hf_ring_attn
seconds = time.perf_counter() - began
import torch
print(json.dumps({
    "seconds": seconds,
    "loaded": sorted({name.split(".")[0] for name in set(sys.modules) - modules}),
    "started": {
        "threads": threading.active_count() - threads,
        "distributed": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ) != environment,
    },
}))
"""


def test_importing_the_package_starts_nothing_and_loads_no_heavy_package() -> None:
    """Time is a benchmark's business (at most 0.5 s); two seconds here only catch a heavy package of a new name."""
    run = subprocess.run([sys.executable, "-c", FRESH_IMPORT], capture_output=True, text=True, timeout=300, check=True)
    seen = json.loads(run.stdout.splitlines()[-1])
    assert {"triton", "trl", "peft", "datasets", "flash_attn"}.isdisjoint(seen["loaded"]), seen["loaded"]
    assert not any(seen["started"].values()), seen["started"]
    assert seen["seconds"] < 2.0
