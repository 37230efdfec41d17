"""The patch mechanism on a made-up host: guarded, idempotent, undone exactly."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.integration.patching import changes
from hf_ring_attn.integration.patching.changes import Patch, Registration, render
from tests.helpers.patience import patient

HOST = """
    __version__ = "2.7.1"

    class Base:
        def inherited(self, x, *rest, flag=True, **options):
            return "base"

    class Thing(Base):
        count = 3

        def method(self, x: int, y: int = 2) -> int:
            "Adds."
            return x + y

        @property
        def size(self):
            return 1

        @classmethod
        def make(cls, n):
            return cls.__name__ * n

    def function(a, *, b):
        return a

    class Registry:
        _global_mapping = {"taken": 1}

        @classmethod
        def register(cls, key, value):
            cls._global_mapping.update({key: value})
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is installed in the test, and the package's own patches are back after it."""
    hf_ring_attn.uninstall()
    yield
    changes.uninstall()
    hf_ring_attn.install()


@pytest.fixture
def host(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Imports the made-up host "oddhost.core" when called; its tested versions are 2.5 to 2.7."""
    package = tmp_path / "oddhost"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.7.1'\n")
    (package / "core.py").write_text(textwrap.dedent(HOST))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(changes.TESTED, "oddhost", ("2.5", "2.7"))
    yield lambda: importlib.import_module("oddhost.core")
    for name in [name for name in sys.modules if name.startswith("oddhost")]:
        del sys.modules[name]


def plus(amount: int) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs) + amount

        return replacement

    return make


METHOD = Patch("oddhost.core:Thing.method", "(self, x, y=)", plus(10))
SIZE = Patch("oddhost.core:Thing.size", "(self)", lambda old: property(lambda self: old.__get__(self) + 1))
INHERITED = Patch(
    "oddhost.core:Thing.inherited", "(self, x, *rest, flag=, **options)", lambda old: lambda self, *a, **k: "patched"
)
MAKE = Patch("oddhost.core:Thing.make", "(n)", lambda old: classmethod(lambda cls, n: "made"))
FUNCTION = Patch("oddhost.core:function", "(a, *, b)", lambda old: lambda a, *, b: old(a, b=b) * b)
ENTRY = Registration("oddhost.core:Registry", "ring", len)
TAKEN = Registration("oddhost.core:Registry", "taken", 2)
ALL = (METHOD, SIZE, INHERITED, MAKE, FUNCTION, ENTRY, TAKEN)


def behaviour(core: Any) -> tuple[Any, ...]:
    thing = core.Thing()
    return (
        thing.method(1), thing.size, thing.inherited(0), core.Thing.make(2),
        core.function(2, b=3), dict(core.Registry._global_mapping),
    )  # fmt: skip


STOCK = (3, 1, "base", "ThingThing", 2, {"taken": 1})
PATCHED = (13, 2, "patched", "made", 6, {"taken": 2, "ring": len})


def test_changes_are_made_once_and_undone_to_the_same_objects(host: Callable[[], Any]) -> None:
    core = host()
    before = {**vars(core.Thing)}, {**vars(core)}
    changes.install(ALL)
    changes.install(ALL)
    assert behaviour(core) == PATCHED
    assert changes.installed() == [change.key for change in ALL]
    assert inspect.signature(core.Thing.method) == inspect.signature(before[0]["method"])
    assert core.Thing.method.__doc__ == "Adds."
    changes.uninstall()
    assert behaviour(core) == STOCK
    after = {**vars(core.Thing)}, {**vars(core)}
    for old, new in zip(before, after, strict=True):
        assert list(old) == list(new), "an inherited or new attribute was left behind"
        assert all(new[name] is old[name] for name in old)
    assert changes.installed() == []
    changes.install(ALL)
    assert behaviour(core) == PATCHED


def test_a_module_that_is_not_imported_is_left_alone(host: Callable[[], Any]) -> None:
    finders = list(sys.meta_path)
    changes.install(ALL)
    assert "oddhost.core" not in sys.modules
    assert (changes.installed(), sys.meta_path) == ([], finders)
    core = host()
    assert behaviour(core) == STOCK
    changes.install(ALL)
    assert behaviour(core) == PATCHED


@pytest.mark.parametrize(
    ("patch", "found"),
    [
        (Patch("oddhost.core:Thing.method", "(self, x)", plus(1)), r"found \(self, x, y=\), needed \(self, x\)"),
        (Patch("oddhost.core:Thing.gone", "(self)", plus(1)), r"found no such attribute, needed \(self\)"),
        (Patch("oddhost.gone.core:Thing.method", "(self)", plus(1)), r"found no such module, needed \(self\)"),
        (Registration("oddhost.gone:Registry", "ring", 1), r"found no such module, needed register\(key, value\)"),
        (Patch("oddhost.core:Gone.method", "(self)", plus(1)), r"found no Gone, needed \(self\)"),
        (Patch("oddhost.core:Thing.count", "(self)", plus(1)), r"found a int, needed \(self\)"),
        (Registration("oddhost.core:Thing", "ring", 1), "found no such registry, needed register"),
    ],
    ids=lambda value: getattr(value, "target", ""),
)
def test_a_changed_host_is_refused_by_name(host: Callable[[], Any], patch: Any, found: str) -> None:
    text = rf"{patch.target} of oddhost 2.7.1 is not what .*: {found}.*Use a tested version of oddhost \(2.5 to 2.7\)"
    core = host()
    for _ in range(2):
        with pytest.raises(errors.ChangedHost, match=text):
            changes.install([METHOD, patch])
        assert behaviour(core) == STOCK, "either all of the changes are made or none"
    changes.install([METHOD])
    assert core.Thing().method(1) == 13


@pytest.mark.parametrize(
    ("version", "warned"), [("2.5.0", 0), ("2.7.9", 0), ("2.8.0.dev0", 1), ("2.4.9", 1), ("10.6", 1)]
)
def test_an_untested_version_warns_once_by_name(host: Callable[[], Any], version: str, warned: int) -> None:
    core = host()
    sys.modules["oddhost"].__version__ = version  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        changes.install([METHOD])
        changes.install([SIZE])
    assert core.Thing().method(1) == 13
    texts = [str(warning.message) for warning in seen if warning.category is errors.UntestedHost]
    assert len(texts) == warned
    assert all(f"tested with oddhost 2.5 to 2.7, not with {version}" in text for text in texts)


@pytest.mark.usefixtures("fresh")
def test_a_host_without_patches_warns_when_it_is_imported(host: Callable[[], Any]) -> None:
    """torch and peft: nothing of theirs is patched, and peft may be imported after this package."""
    changes.warn_if_untested("oddhost")
    host()
    sys.modules["oddhost"].__version__ = "3.0"  # type: ignore[attr-defined]
    with pytest.warns(errors.UntestedHost, match=r"oddhost 2.5 to 2.7, not with 3.0"):
        changes.install([])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changes.warn_if_untested("oddhost")


def test_on_gpus_only_what_ran_there_is_tested(host: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(changes.NEWEST_ON_GPUS, "oddhost", "2.6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    host()
    assert changes.tested_range("oddhost") == "2.5 to 2.6, on CPUs to 2.7"
    assert changes.is_tested("oddhost", "2.7.1") and not changes.is_tested("oddhost", "2.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert changes.is_tested("oddhost", "2.6.2") and not changes.is_tested("oddhost", "2.7.1")
    with pytest.warns(errors.UntestedHost, match=r"with oddhost 2.5 to 2.6, on CPUs to 2.7, not with 2.7.1 on GPUs\."):
        changes.warn_if_untested("oddhost")


def test_pip_is_told_the_tested_versions(host: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes.requirement("oddhost") == "oddhost>=2.5,<2.8"
    monkeypatch.setitem(changes.NEWEST_ON_GPUS, "oddhost", "2.6")
    assert changes.requirement("oddhost") == "oddhost>=2.5,<2.7"
    assert changes.untested() == []
    host()
    sys.modules["oddhost"].__version__ = "3.0"  # type: ignore[attr-defined]
    assert changes.untested() == ["oddhost"]


def test_every_pinned_host_is_a_tested_one() -> None:
    pins = (Path(__file__).resolve().parents[3] / "tests/constraints.txt").read_text().splitlines()
    found = dict(line.split("==") for line in pins if "==" in line and not line.startswith("#"))
    assert {"torch", "transformers", "accelerate", "trl", "peft"} <= changes.TESTED.keys()
    assert [host for host in changes.TESTED if host in found and not changes.is_tested(host, found[host])] == []


def test_a_patch_on_top_of_ours_is_taken_away_with_a_warning(host: Callable[[], Any]) -> None:
    core = host()
    original = vars(core.Thing)["method"]
    changes.install([METHOD])
    core.Thing.method = lambda self, x: 0
    with pytest.warns(errors.PatchedByOthers, match=r"oddhost.core:Thing.method was patched again"):
        changes.uninstall()
    assert vars(core.Thing)["method"] is original


def test_a_warning_that_is_an_error_stops_no_uninstall(host: Callable[[], Any]) -> None:
    """It was raised in the middle: the attribute and all earlier changes stayed."""
    core = host()
    originals = vars(core.Thing)["method"], core.function
    changes.install([FUNCTION, METHOD])
    core.Thing.method = lambda self, x: 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.PatchedByOthers):
            changes.uninstall()
    assert (vars(core.Thing)["method"], core.function) == originals
    assert changes.installed() == []


def test_render() -> None:
    def everything(a: int, b: int = 1, *rest: int, c: int, d: int = 2, **more: int) -> None: ...
    def starred(a: int, *, b: int) -> None: ...

    assert render(everything) == "(a, b=, *rest, c, d=, **more)"
    assert render(starred) == "(a, *, b)"


REAL = """
import sys, tempfile, warnings
warnings.simplefilter("error")
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import AttentionInterface, Trainer, TrainingArguments
hosts = ParallelismConfig, Accelerator, AcceleratorState, Trainer
before = [dict(vars(host)) for host in hosts]
import hf_ring_attn, torch
from hf_ring_attn.integration.patching import changes
assert "trl" not in sys.modules
first = changes.installed()
warnings.simplefilter("ignore")
from trl import SFTTrainer
warnings.simplefilter("error")
stock = dict(vars(SFTTrainer))
class Own(SFTTrainer):
    __init__ = Trainer.__init__
args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[])
Trainer(torch.nn.Linear(1, 1), args)
assert dict(vars(SFTTrainer)) == stock
Own(torch.nn.Linear(1, 1), args)
later = changes.installed()
assert vars(SFTTrainer)["compute_loss"] is not stock["compute_loss"]
assert [dict(vars(host)) for host in hosts] != before
hf_ring_attn.uninstall()
assert not changes.installed()
for host, old in zip((*hosts, SFTTrainer), (*before, stock)):
    assert vars(host).keys() == old.keys() and all(vars(host)[name] is old[name] for name in old), host
assert "ring_fp32" not in AttentionInterface()
hf_ring_attn.install()
assert sorted(changes.installed()) == sorted(later)
print(len(first), len(later))
"""


@pytest.mark.turns
@pytest.mark.slow
def test_the_real_hosts_are_patched_and_trl_by_its_first_trainer() -> None:
    """A fresh process with warnings as errors: the installed versions are tested ones, and signatures fit."""
    pytest.importorskip("trl")
    run = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, timeout=patient(100), check=False
    )
    assert run.returncode == 0, run.stderr
    first, later = map(int, run.stdout.split())
    assert 0 < first < later
