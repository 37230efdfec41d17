"""Measured results as files: results.jsonl holds one row a line, each run after its head."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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


def save(folder: Path, name: str, head: dict[str, Any], rows: Iterable[dict[str, Any]] = ()) -> None:
    """Writes a run into the folder's results.jsonl and replaces an earlier run of the same program and command.

    If another command's run has the same name, this one is called name-2, name-3 and so on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = read(folder / FILE) if (folder / FILE).exists() else []
    others = {run.name for run in before if run.head.get("command") != head.get("command")}
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    mine = Run(next(one for one in names if one not in others), head, list(rows))
    runs = [*(run for run in before if run.name != mine.name), mine]
    lines = (row for run in runs for row in ({"run": run.name, **run.head}, *run.rows))
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in lines))
