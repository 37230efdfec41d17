"""flash-attn-4's cache of compiled kernels: on by default, off where the user says so or where it could not work."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hf_ring_attn.kernels.flash4.disk_cache import ENABLED, FOLDER, use_disk_cache


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (ENABLED, FOLDER):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_it_is_on_in_a_folder_of_the_user_alone(tmp_path: Path) -> None:
    use_disk_cache()
    folder = Path(os.environ[FOLDER])
    assert os.environ[ENABLED] == "1" and folder.parent == tmp_path / "cache"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLED, "0")
    use_disk_cache()
    assert os.environ[ENABLED] == "0" and FOLDER not in os.environ


def test_the_folder_of_the_user_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    use_disk_cache()
    assert (os.environ[ENABLED], os.environ[FOLDER]) == ("1", str(tmp_path / "mine"))


def test_a_folder_that_cannot_be_made_leaves_it_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    use_disk_cache()
    assert ENABLED not in os.environ and FOLDER not in os.environ
