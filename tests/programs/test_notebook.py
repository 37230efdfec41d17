"""The notebook of examples: its cells run as a program, and print what is stored in it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.patience import patient
from tests.helpers.programs import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "two_ranks.ipynb"
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def code() -> str:
    return "\n\n".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code")


def printed(stream: str) -> str:
    """What the stored run printed to "stdout" or "stderr"."""
    outputs = [output for cell in cells() for output in cell.get("outputs", ()) if output["name"] == stream]
    return "".join("".join(output["text"]) for output in outputs)


def test_the_notebook_is_one() -> None:
    """Its form is that of nbformat 4.5, and its stored run is of the cells in their order."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in cells()]
    assert len(set(ids)) == len(ids)
    for cell in cells():
        wanted = {"id", "cell_type", "metadata", "source"}
        assert set(cell) == (wanted | {"execution_count", "outputs"} if cell["cell_type"] == "code" else wanted)
    counts = [cell["execution_count"] for cell in cells() if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    ast.parse(code())


def test_its_links_lead_to_files() -> None:
    text = "".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((NOTEBOOK.parent / link).is_file() for link in links)


@pytest.mark.slow
@pytest.mark.turns
def test_its_cells_print_what_is_stored(tmp_path: Path) -> None:
    """It starts processes itself, which a process of the fork server may not."""
    (tmp_path / "cells.py").write_text(code())
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        timeout=patient(150),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got, want = done.stdout.splitlines(), printed("stdout").splitlines()
    text = slice(0, next(index for index, line in enumerate(want) if line.startswith("step")))  # of this Python
    del got[text], want[text]
    assert [NUMBER.sub("0", line) for line in got] == [NUMBER.sub("0", line) for line in want]
    for line, stored in zip(got, want, strict=True):
        numbers = [float(number) for number in NUMBER.findall(line)]
        assert numbers == pytest.approx([float(number) for number in NUMBER.findall(stored)], rel=0.1), line
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("[hf_ring_attn]"))
    assert said == printed("stderr").strip()
