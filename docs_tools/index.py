"""The index of recipes/results: one row a folder, from the title of its page and the dates of its runs."""

from __future__ import annotations

import re
from functools import cache

from hf_ring_attn.bench import results

from .numbers import FILED, table

PLACES = {
    "README": ["README.md"],
    "docs": ["docs"],
    "recipes": ["recipes"],
    "changelog": ["CHANGELOG.md", "CHANGELOG-details.md"],
    "code": ["hf_ring_attn"],
}
"""Where a result may be linked, and the files or folders of each place."""


@cache
def _text(place: str) -> str:
    """All pages and modules of a place, without the results themselves."""
    paths = [FILED.parents[1] / name for name in PLACES[place]]
    files = [file for path in paths for file in (path.rglob("*.*") if path.is_dir() else [path])]
    read = [file for file in files if file.suffix in {".md", ".py"} and not file.is_relative_to(FILED)]
    return "\n".join(file.read_text() for file in read)


def linked_from(folder: str) -> str:
    """The places that link a folder of results."""
    link = re.compile(rf"results/{re.escape(folder)}(?![\w-])")
    return ", ".join(place for place in PLACES if link.search(_text(place))) or "-"


def index() -> str:
    """The table, the newest folder first."""
    rows = []
    for file in sorted(FILED.glob(f"*/{results.FILE}"), reverse=True):
        page = (file.parent / "README.md").read_text()
        question = page.partition("\n")[0].removeprefix("# ")
        dates = sorted({run.head["date"] for run in results.read(file)})
        rows.append((f"[{question}]({file.parent.name})", ", ".join(dates), linked_from(file.parent.name)))
    return table("question | date | linked from", rows)


PARTS = {"index": index}
