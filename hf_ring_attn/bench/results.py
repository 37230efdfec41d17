"""Measured results as files: results.jsonl holds one row a line, each run after its head."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from ..errors import ResultsNotSaved

FILE = "results.jsonl"


class Run(NamedTuple):
    """One run of one program.

    Attributes:
        head: provenance and fields that all rows share; in the file also `name`, under the key "run".
    """

    name: str
    head: dict[str, Any]
    rows: list[dict[str, Any]]


def read(path: Path) -> list[Run]:
    """The runs of a file.

    Raises:
        ValueError: if a line is not JSON, or if rows come before the first head.
    """
    found: list[Run] = []
    for row in map(json.loads, path.read_text().splitlines()):
        if "run" in row:
            found.append(Run(row.pop("run"), row, []))
        elif found:
            found[-1].rows.append(row)
        else:
            raise ValueError("rows before the head of a run")
    return found


def earlier(folder: Path) -> list[Run]:
    """Makes the folder, and returns the runs in it; a program calls it before it measures for an hour.

    Raises:
        ResultsNotSaved: nothing can be written there, or its file is of another kind.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return read(folder / FILE) if (folder / FILE).exists() else []
    except (OSError, ValueError, TypeError) as error:
        raise ResultsNotSaved(str(folder), f"{type(error).__name__}: {error}"[:200]) from None


def save(folder: Path, name: str, head: dict[str, Any], rows: Iterable[dict[str, Any]] = ()) -> None:
    """Writes a run into the folder's results.jsonl and replaces an earlier run of the same program and command.

    If another command's run has the same name, this one is called name-2, name-3 and so on.

    Raises:
        ResultsNotSaved: as `earlier`.
    """
    before = earlier(folder)
    others = {run.name for run in before if run.head.get("command") != head.get("command")}
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    mine = Run(next(one for one in names if one not in others), head, list(rows))
    runs = [*(run for run in before if run.name != mine.name), mine]
    lines = (row for run in runs for row in ({"run": run.name, **run.head}, *run.rows))
    part = (folder / FILE).with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in lines))
    part.replace(folder / FILE)  # a full disk leaves the earlier runs
