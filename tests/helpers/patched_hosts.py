"""Trees of the installed hosts with the patches of docs/upstream, to be found before the installed ones.

A tree has copies of the files that a patch touches, and links to all others.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[2] / "docs" / "upstream"
HOSTS = {"accelerate": "src", "transformers": "src", "trl": ""}
"""Host: the folder of its repository that holds the package."""


def base_of(host: str) -> str:
    """The version of a host that its patch is for."""
    found = re.search(rf"^Base: {host} v(\S+)$", (PATCHES / f"{host}.patch").read_text(), re.MULTILINE)
    assert found is not None, f"{host}.patch names no version"
    return found[1]


def other_versions() -> list[str]:
    """The installed hosts that are not of the version of their patch, in words."""
    return [
        f"{host} {version(host)} is installed, its patch is for {base_of(host)}"
        for host in HOSTS
        if version(host) != base_of(host)
    ]


def touched(host: str) -> list[str]:
    """The files that a host's patch changes or adds, as its repository names them."""
    return re.findall(r"^\+\+\+ b/(\S+)$", (PATCHES / f"{host}.patch").read_text(), re.MULTILINE)


def build(folder: Path) -> list[Path]:
    """Makes the patched trees in ``folder``. Returns what belongs in PYTHONPATH."""
    paths = []
    for host, source in HOSTS.items():
        root, spec = folder / host, importlib.util.find_spec(host)
        assert spec is not None and spec.origin is not None
        root.mkdir()
        paths.append(root / source)
        package = Path(source, host)
        changed = {Path(file).relative_to(package) for file in touched(host) if Path(file).is_relative_to(package)}
        _link(Path(spec.origin).parent, root / package, changed)
        _apply(PATCHES / f"{host}.patch", root)
    return paths


def _link(source: Path, target: Path, copied: set[Path]) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        name = Path(path.name)
        inside = {file.relative_to(name) for file in copied if file.parts[0] == path.name and len(file.parts) > 1}
        if path.name == "__pycache__":  # that of the installed files, which python would write to
            continue
        if inside:
            _link(path, target / name, inside)
        elif name in copied:
            shutil.copyfile(path, target / name)
        else:
            (target / name).symlink_to(path)


def _apply(patch: Path, root: Path) -> None:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}  # it is no repository
    done = subprocess.run(
        ["git", "apply", str(patch)], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
