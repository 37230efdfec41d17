"""``hf-ring-attn autoload``: files that it writes and takes away, and a program that never imports the package."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PathDistribution, entry_points
from pathlib import Path
from typing import Any

import pytest

from hf_ring_attn import cli, errors
from hf_ring_attn.autoload import switch
from tests.helpers.patience import patient

REPOSITORY = Path(__file__).resolve().parents[2]
RECORD = "hf_ring_attn/__init__.py,,\nhf_ring_attn-9.dist-info/RECORD,,\n"
ENTRIES = "[console_scripts]\nhf-ring-attn = hf_ring_attn.cli:main\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site folder in which the package is installed, first on the path."""
    folder = tmp_path / "site"
    info = folder / "hf_ring_attn-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: hf-ring-attn\nVersion: 9\n")
    (info / "RECORD").write_text(RECORD)
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    return folder


def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["autoload", *arguments]) == 0
    return capsys.readouterr().out.strip()


def files(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder).as_posix(): path.read_text() for path in found}


def test_on_and_off_again_leaves_no_trace(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(site)
    assert say(capsys) == f"autoload: off ({site})"
    for _ in range(2):
        assert say(capsys, "--enable") == f"autoload: on ({site / 'hf_ring_attn_autoload.py'})"
    now = files(site)
    assert now["hf_ring_attn_autoload.py"] == switch.SOURCE.read_text()
    assert now["hf_ring_attn-9.dist-info/RECORD"] == RECORD + "hf_ring_attn_autoload.py,,\n", "uninstall removes it"
    assert now.keys() == before.keys() | {"hf_ring_attn_autoload.py"}
    (entry,) = (one for one in entry_points(group="torch.backends") if one.name == "hf_ring_attn")
    assert entry.value == "hf_ring_attn_autoload:start"
    assert [one.name for one in entry_points(group="console_scripts") if one.value == "hf_ring_attn.cli:main"]
    for _ in range(2):
        assert say(capsys, "--disable") == f"autoload: off ({site})"
    assert files(site) == before and not list(site.rglob("*.pyc"))


def test_the_state_names_what_stops_it(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(capsys, "--enable")
    (site / "hf_ring_attn_autoload.py").write_text("def start(): ...\n")
    assert "it is of another version: --enable renews it" in say(capsys, "--status")
    say(capsys, "--enable")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert say(capsys).endswith("but TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off in this environment")


def test_a_hard_link_to_an_installers_cache_stays_as_it_is(site: Path, tmp_path: Path) -> None:
    """uv links files of its cache into environments."""
    cached = tmp_path / "cached"
    os.link(site / "hf_ring_attn-9.dist-info/entry_points.txt", cached)
    switch.enable(switch.find())
    assert cached.read_text() == ENTRIES


def test_torch_never_sees_the_entry_point_without_the_module(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Any = switch._write
    place = switch.find()

    def stops(path: Path, text: str) -> None:
        assert place.module.exists() or switch.ENTRY not in text
        write(path, text)

    monkeypatch.setattr(switch, "_write", stops)
    switch.enable(place)
    switch.disable(place)


def test_what_cannot_be_changed_is_refused_in_words(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    before = files(site)
    monkeypatch.setattr(os, "replace", denied)
    assert cli.main(["autoload", "--enable"]) == 2
    assert f"autoload cannot write to {site} (Permission denied)" in capsys.readouterr().err
    assert files(site) == before
    (site / "hf_ring_attn-9.dist-info/RECORD").unlink()
    with pytest.raises(errors.NotInstalled, match=r"runs from a folder here\. Install it first"):
        switch.find(PathDistribution(site / "hf_ring_attn-9.dist-info"))


PROGRAM = """
import sys, time
import torch
finders = [finder for finder in sys.meta_path if finder.__module__ == "hf_ring_attn_autoload"]
import transformers
early = "hf_ring_attn" in sys.modules
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
try:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ring_fp32")
    name = model.config._attn_implementation
except ValueError as error:
    name = "refused"
print(len(finders), early, name, "hf_ring_attn" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "1 False ring_fp32 True"),
        pytest.param({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "0 False refused False", marks=pytest.mark.turns),
    ],
    ids=["on", "off by torch's variable"],
)
def test_a_program_needs_no_import(site: Path, tmp_path: Path, environment: dict[str, str], told: str) -> None:
    switch.enable(switch.find())
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=patient(100),
        check=False, env={**os.environ, "PYTHONPATH": f"{site}:{REPOSITORY}", **environment},
    )  # fmt: skip
    assert run.stdout.splitlines()[-1:] == [told], run.stderr
