"""The module that torch calls: the plugin is imported once hosts are whole, and no error reaches the program."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_ring_attn.autoload import watch

FILES = {
    "oddhost/__init__.py": "",
    "oddhost/core.py": "import oddlog\noddlog.said.append('core')",
    "oddhost/early.py": "import oddtorch, oddlog\noddlog.said.append('early')",  # imports torch, which calls start
    "oddouter.py": "import oddhost.core, oddlog\noddlog.said.append('outer')",
    "oddprogram.py": "import oddhost.core, oddlog\noddlog.said.append('program')",
    "oddplugin.py": "import oddlog\noddlog.said.append('plugin')",
    "oddbroken.py": "raise RuntimeError('two versions do not fit')",
    "oddtorch.py": "from hf_ring_attn.autoload import watch\nwatch.start()\nimport oddlog\noddlog.said.append('torch')",
    "oddfails.py": "import oddhost.core\nraise ImportError('optional')",
    "oddlog.py": "said = []",
}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Modules in the order in which their imports ended."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(watch, "HOSTS", ("oddhost.core", "oddhost.early", "oddhost.none"))
    monkeypatch.setattr(watch, "PLUGIN", "oddplugin")
    monkeypatch.setattr(watch, "_NEEDED", {"oddhost", "oddtorch", "oddouter", "oddfails"})
    yield importlib.import_module("oddlog").said
    for name in [name for name in sys.modules if name.startswith("odd")]:
        del sys.modules[name]


def finders() -> int:
    return sys.meta_path.count(watch._Finder)


def test_the_plugin_follows_the_host(said: list[str]) -> None:
    watch.start()
    assert finders() == 1
    importlib.import_module("oddhost")
    assert said == []
    importlib.import_module("oddhost.core")
    assert said == ["core", "plugin"] and finders() == 0
    assert type(sys.modules["oddhost.core"].__spec__) is importlib.machinery.ModuleSpec


@pytest.mark.parametrize(
    ("module", "order"),
    [
        ("oddouter", ["core", "outer", "plugin"]),  # as trl: whole before the plugin patches it
        ("oddprogram", ["core", "plugin", "program"]),  # a program may train while it is imported
        ("oddtorch", ["torch"]),
        ("oddhost.early", ["torch", "early", "plugin"]),  # transformers imports torch, which calls start
    ],
)
def test_packages_that_are_half_imported_are_waited_for(said: list[str], module: str, order: list[str]) -> None:
    if module in ("oddouter", "oddprogram"):
        watch.start()
    importlib.import_module(module)
    assert said == order


def test_an_import_that_fails_stays_the_programs_error(said: list[str]) -> None:
    watch.start()
    with pytest.raises(ImportError, match="optional"):
        importlib.import_module("oddfails")
    assert said == ["core", "plugin"]
    with pytest.raises(ModuleNotFoundError, match=r"oddhost\.none"):
        importlib.import_module("oddhost.none")


def test_a_plugin_that_was_imported_is_left_alone(said: list[str]) -> None:
    importlib.import_module("oddplugin")
    watch.start()
    importlib.import_module("oddhost.core")
    assert said == ["plugin", "core"]


@pytest.mark.parametrize("plugin", ["oddbroken", "oddmissing"])
def test_a_plugin_that_fails_is_a_line_and_no_error(
    said: list[str], plugin: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "PLUGIN", plugin)
    watch.start()
    importlib.import_module("oddhost.core")
    assert said == ["core"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('hf_ring_attn was not loaded, so "ring_fp32" is not registered (')
    assert "two versions do not fit" in line or "No module named 'oddmissing'" in line
    assert "hf-ring-attn autoload --disable" in line


def test_nothing_breaks_without_stderr_or_with_foreign_specs(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        __slots__ = ("_initializing", "loader", "name", "origin")

    foreign: Any = Spec()
    watch._watch(foreign)
    assert type(foreign) is Spec
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(watch, "PLUGIN", "oddbroken")
    watch.start()
    importlib.import_module("oddhost.core")
    assert said == ["core"]


@pytest.mark.usefixtures("said")
def test_start_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would raise "Failed to load the backend extension"."""

    def fails() -> None:
        raise ValueError("a defect")

    broken: Callable[[], None] = fails
    monkeypatch.setattr(watch, "_settle", broken)
    monkeypatch.setitem(sys.modules, "oddhost.core", sys)
    watch.start()


def test_it_costs_nothing_to_import() -> None:
    """A few modules that every Python has imported: under a millisecond."""
    tree = ast.parse(Path(watch.__file__).read_text())
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert froms == {"__future__", "collections.abc", "importlib.machinery", "types", "typing"}
    assert plain == {"sys"}


START = f"""
import importlib.metadata, sys, time, typing
sys.path.insert(0, {str(Path(watch.__file__).parent)!r})
began = time.perf_counter()
import watch
watch.start()
print(time.perf_counter() - began)
"""


def test_it_starts_in_less_than_a_millisecond() -> None:
    """Where the modules that torch needs to call it are loaded. The shortest of several new processes."""
    command = [sys.executable, "-I", "-c", START]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(10)]
    assert min(float(run.stdout) for run in runs) < 0.001
