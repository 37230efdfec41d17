"""The import rules: which room of the package may know which other room, which host, and the environment.

A room is a module or a folder under hf_ring_attn; the folders of `integration` are rooms, too. The rules are the tables
below; ``violations`` reads one file against them, and the planted violations show that each rule can go red.
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

from tests.helpers.patience import patient

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "hf_ring_attn"
MOST_LINES = 400

BASE = {"errors", "config", "arguments", "dtypes"}
DATA = BASE | {"comm", "sharding"}
RING = DATA | {"kernels", "traffic", "layers", "attention"}
SHARED = {"integration.log", "integration.patching", "integration.context"}
MODELS = {"integration.gradients", "integration.losses", "integration.memory", "integration.model"}
HOST = RING | {"integration", "biases"}
TOOLS = {"autoload", "doctor", "plan", "bench", "verify"}

# room -> the rooms it may import; every room may import itself
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "arguments": {"errors"},
    "dtypes": set(),
    "config": {"arguments", "errors"},
    "comm": BASE,  # buffers and groups, never who sees whom
    "sharding": BASE | {"comm"},  # data only: layouts, masks, plans
    "kernels": BASE | {"sharding.mask", "sharding.visible"},  # arithmetic: tiles as data, never a process group
    "traffic": DATA,  # how bytes move, whatever they mean
    "layers": DATA,  # layers beside attention
    "attention": DATA | {"kernels", "traffic"},
    "biases": {"errors"},  # functions for users: they know no ring
    "integration.patching": BASE,
    "integration.log": BASE | {"comm"},
    "integration.context": RING | {"integration.log", "integration.patching"},
    "integration.gradients": RING | SHARED,
    "integration.losses": RING | SHARED | {"integration.gradients"},
    "integration.memory": RING | SHARED,
    "integration.model": RING | SHARED | {"integration.gradients", "integration.losses", "integration.memory"},
    "integration.selfcheck": RING | SHARED | MODELS,
    "integration.attention": RING | SHARED | MODELS,
    "integration.batch": RING | SHARED | MODELS | {"integration.selfcheck", "integration.attention"},
    "integration.hosts": RING | SHARED | MODELS | {"integration.batch"},
    "integration": {
        "integration.patching",
        "integration.context",
        "integration.attention",
        "integration.batch",
        "integration.gradients",
        "integration.model",
        "integration.hosts",
    },
    "testing": {"errors"},  # references: not what they are to judge
    "autoload": BASE,  # files and imports, never a host
    "command_line": set(),
    "command_ranks": BASE | {"comm"},
    "doctor": HOST | {"autoload", "testing", "command_line", "command_ranks", "__init__"},
    "plan": HOST | {"testing", "command_line"},
    "bench": HOST | {"testing", "command_line", "command_ranks"},
    "verify": HOST | {"testing", "command_line", "command_ranks"},
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
        {"comm", "traffic", "bench", "command_ranks"}, frozenset({"attention", "integration", "__init__"})
    ),
    "triton": Users({"kernels"}),
    "flash_attn": Users({"kernels", "bench"}),  # a benchmark times it as it is shipped
}

# room or file -> why it may touch os.environ
ENVIRONMENT = {
    "config": "it is the one reader of our own variables",
    "bench": "a result's head tells the launcher that started it, and the commit of a copy without .git",
    "command_ranks": "ranks that it starts get their numbers by it",
    "kernels.flash4.disk_cache": "flash-attn-4's cache is turned on by its own variables alone",
}


class Import(NamedTuple):
    line: int
    name: str  # dotted, absolute
    type_only: bool


def room_of(name: str) -> str:
    """hf_ring_attn.kernels.base -> kernels; a public name taken from the package itself -> __init__."""
    parts = name.split(".")[1:]
    rooms = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((room for room in rooms if room in MAY_IMPORT), "__init__")


def may(room: str, name: str) -> bool:
    """Returns True if ``room`` may import the dotted ``name`` of ours: by its room, one around it, or a file in it."""
    parts = name.split(".")[1:]
    if room_of(name) in (room, "__init__"):
        return room_of(name) == room or "__init__" in MAY_IMPORT[room]
    return any(".".join(parts[:length]) in MAY_IMPORT[room] for length in range(len(parts), 0, -1))


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
            if not may(room, name):
                found.append(f"{where}, but of our rooms it may import only {sorted(MAY_IMPORT[room])}")
        elif users := users_of(name):
            allowed = users.importers | (users.type_users if type_only else set())
            if room.split(".")[0] not in allowed:
                found.append(f"{where}, which only {sorted(users.importers)} may")
    if not {room, module.removeprefix(f"{PACKAGE.name}.")} & ENVIRONMENT.keys():
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
    rooms |= {f"integration.{path.parent.name}" for path in PACKAGE.glob("integration/*/__init__.py")}
    assert rooms - set(MAY_IMPORT) == set(), "a new room: say in MAY_IMPORT what it may know"


def cycle(arrows: dict[str, set[str]]) -> list[str]:
    """The first cycle of arrows that a depth-first walk meets; [] if there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        found = next((x for to in sorted(arrows.get(name, ())) if (x := walk(to, [*path, name]))), [])
        done.add(name)
        return found

    return next((found for name in sorted(arrows) if (found := walk(name, []))), [])


def files_imported() -> dict[str, set[str]]:
    """The files of ours that each file imports, those under TYPE_CHECKING among them."""
    trees = {module_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    files = {module for module, _ in trees}
    arrows = {}
    for (module, is_folder), tree in trees.items():
        names = {name for _, name, _ in imports(tree, module, is_folder)}
        targets = {name if name in files else name.rpartition(".")[0] for name in names}
        arrows[module] = (targets & files) - {module}
    return arrows


def test_no_cycle_of_files_exists() -> None:
    assert cycle(files_imported()) == [], "imports go one way"


def test_a_planted_cycle_is_seen() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_two_rooms_may_import_each_other() -> None:
    pairs = [(a, b) for a, known in MAY_IMPORT.items() for b in known if a < b and a in MAY_IMPORT.get(b, ())]
    assert pairs == [], "imports go one way"


@pytest.mark.parametrize("folder", ["hf_ring_attn", "tests", "examples"])
def test_a_file_holds_one_idea(folder: str) -> None:
    long = {
        str(path.relative_to(REPOSITORY)): lines
        for path in (REPOSITORY / folder).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}, f"more than {MOST_LINES} lines: split it by idea"


ONLY = "only ['bench', 'comm', 'command_ranks', 'traffic'] may"

PLANTED = [
    ("kernels.base", "from ..comm.ring import Ring", "kernels imports hf_ring_attn.comm.ring.Ring"),
    ("kernels.base", "from ..sharding.plan import Plan", "kernels imports hf_ring_attn.sharding.plan.Plan"),
    ("kernels.base", "import torch.distributed as dist", ONLY),
    ("kernels.base", "from torch import distributed", ONLY),
    ("kernels.base", "import torch\ntorch.distributed.barrier()", "kernels imports torch.distributed"),
    (
        "kernels.base",
        "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup",
        "kernels imports torch.distributed.ProcessGroup",
    ),
    ("comm.ring", "from ..sharding.mask import Band", "comm imports hf_ring_attn.sharding.mask.Band"),
    ("comm.ring", "def late():\n    import hf_ring_attn.sharding.mask", "comm imports hf_ring_attn.sharding.mask"),
    ("attention.op", "from ..integration import batch", "attention imports hf_ring_attn.integration.batch"),
    ("attention.op", "import transformers", "only ['integration'] may"),
    ("attention.op", "import importlib\nimportlib.import_module('trl.trainer')", "attention imports trl.trainer"),
    ("attention.function", "from accelerate import Accelerator", "only ['integration'] may"),
    ("integration.model.adapters", "import triton", "only ['kernels'] may"),
    ("integration.model.adapters", "from ..selfcheck import check", "imports hf_ring_attn.integration.selfcheck.check"),
    ("integration.context.mesh", "from ..batch.shard import shard", "imports hf_ring_attn.integration.batch.shard"),
    ("integration.batch.shard", "import torch.distributed", ONLY),
    ("integration.batch.shard", "from ...cli import main", "integration.batch imports hf_ring_attn.cli.main"),
    ("integration.hosts.accelerate", "import os\nx = os.environ.get('A')", "touches the environment"),
    ("sharding.layout", "from os import getenv", "touches the environment"),
    ("sharding.layout", "import os\nos.environ['A'] = ''", "touches the environment"),
    ("errors.core", "from ..config import RingConfig", "errors imports hf_ring_attn.config"),
    ("config", "from .sharding.layout import Layout", "config imports hf_ring_attn.sharding.layout"),
]


@pytest.mark.parametrize(("module", "source", "complaint"), PLANTED, ids=[f"{row[0]}: {row[1]}" for row in PLANTED])
def test_a_planted_violation_is_seen(module: str, source: str, complaint: str) -> None:
    found = violations(source, f"hf_ring_attn.{module}")
    assert len(found) == 1, found
    assert complaint in found[0]


def test_what_is_allowed_is_let_through() -> None:
    host = "from ...attention.op import attend\nimport transformers\nfrom ..context import mesh"
    kernel = "from .base import Kernel\nfrom ..sharding.mask import Tile"
    type_only = "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup"
    assert violations(host, "hf_ring_attn.integration.hosts.trainer") == []
    assert violations(kernel, "hf_ring_attn.kernels.reference") == []
    assert violations(kernel, "hf_ring_attn.kernels", is_folder=True) == []
    assert violations("from .sharding.layout import positions", "hf_ring_attn", is_folder=True) == []
    assert violations(type_only, "hf_ring_attn.attention.function") == []


FRESH_IMPORT = """
import json, os, sys, threading, time
began = time.process_time()
import torch
of_torch = time.process_time() - began
from transformers import Trainer
modules, environment, threads = set(sys.modules), dict(os.environ), threading.active_count()
began = time.process_time()
import hf_ring_attn
print(json.dumps({
    "seconds": time.process_time() - began,
    "of_torch": of_torch,
    "loaded": sorted({name.split(".")[0] for name in sys.modules} - {name.split(".")[0] for name in modules}),
    "started": {
        "threads": threading.active_count() - threads,
        "distributed": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ) != environment,
    },
}))
"""


def test_importing_the_package_starts_nothing_and_loads_no_heavy_package() -> None:
    """Seconds are those of the processor, beside torch's own import, so other programs change no verdict."""
    run = subprocess.run(
        [sys.executable, "-c", FRESH_IMPORT], capture_output=True, text=True, timeout=patient(300), check=True
    )
    seen = json.loads(run.stdout.splitlines()[-1])
    foreign = set(seen["loaded"]) - {"hf_ring_attn"} - sys.stdlib_module_names
    assert not foreign, f"{foreign}, which transformers does not load"
    assert not any(seen["started"].values()), seen["started"]
    assert seen["seconds"] < seen["of_torch"], seen  # 0.3 s and 1.2 s; work at import, or heavy parts of torch
