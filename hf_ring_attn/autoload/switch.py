"""Turns autoload on and off: an entry point in the metadata of the installed package, and a module beside it.

Both belong to the installed package's own RECORD, so that uninstalling or updating the package removes them. The module
is a copy outside of the package: torch's import would fail without it, and must not depend on a checkout.
"""

from __future__ import annotations

import os
import py_compile
import tempfile
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import cache_from_source
from pathlib import Path

from .. import errors

NAME = "hf-ring-attn"
MODULE = "hf_ring_attn_autoload"
ENTRY = f"[torch.backends]\nhf_ring_attn = {MODULE}:start\n"
SOURCE = Path(__file__).with_name("watch.py")


@dataclass(frozen=True)
class Place:
    """Files of the installed package in one site folder."""

    site: Path
    entry_points: Path
    record: Path

    @property
    def module(self) -> Path:
        return self.site / f"{MODULE}.py"


def find(installed: Distribution | None = None) -> Place:
    """Returns the files of the installed package, or of the one given.

    Raises:
        NotInstalled: the package runs from a folder, without being installed.
    """
    try:
        found = installed or distribution(NAME)
        record = next(file for file in found.files or () if file.name == "RECORD" and len(file.parts) == 2)
    except (PackageNotFoundError, StopIteration):
        raise errors.NotInstalled() from None
    path = Path(str(found.locate_file(record)))
    return Place(path.parent.parent, path.with_name("entry_points.txt"), path)


def is_on(place: Place) -> bool:
    """Returns True if torch will call the module."""
    return place.entry_points.exists() and ENTRY in place.entry_points.read_text() and place.module.exists()


def is_current(place: Place) -> bool:
    """Returns True if the module is the copy that this version would write."""
    return place.module.exists() and place.module.read_bytes() == SOURCE.read_bytes()


def enable(place: Place) -> None:
    """Writes the module, then the entry point that names it: torch never sees one without the other.

    Raises:
        NotWritable: the files are another user's.
    """
    line = f"{place.module.name},,\n"
    try:
        _write(place.module, SOURCE.read_text())
        py_compile.compile(str(place.module), quiet=2)  # compiling it takes longer than the rest of its work
        record = place.record.read_text()
        if line not in record:
            _write(place.record, record + line)
        entries = place.entry_points.read_text() if place.entry_points.exists() else ""
        if ENTRY not in entries:
            _write(place.entry_points, f"{entries.rstrip()}\n\n{ENTRY}")
    except OSError as error:
        raise errors.NotWritable(str(place.site), error.strerror or str(error)) from error


def disable(place: Place) -> None:
    """Takes the entry point away, then the module.

    Raises:
        NotWritable: the files are another user's.
    """
    try:
        if place.entry_points.exists() and ENTRY in (entries := place.entry_points.read_text()):
            _write(place.entry_points, f"{entries.replace(ENTRY, '').rstrip()}\n")
        line = f"{place.module.name},,\n"
        if line in (record := place.record.read_text()):
            _write(place.record, record.replace(line, ""))
        for path in (place.module, Path(cache_from_source(str(place.module)))):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise errors.NotWritable(str(place.site), error.strerror or str(error)) from error


def _write(path: Path, text: str) -> None:
    """Replaces a file at once: a reader sees the old or the new one, and a hard link to an installer's cache ends."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
