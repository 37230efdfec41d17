"""Writes measured numbers and generated parts into README.md, docs and the pages of recipes.

    python -m docs_tools.fill            # write
    python -m docs_tools.fill --check    # exit code 1 if a page carries anything else

``<!--n:ID-->words<!--/n-->`` holds a phrase of `numbers.VALUES`. A line ``<!--t:ID-->`` begins one of `PARTS`, which ends at a
line ``<!--/t-->``.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from . import index, more_tables, numbers, recipes, reference

REPOSITORY = Path(__file__).resolve().parents[1]
PHRASE = re.compile(r"<!--n:([\w.]+)-->(.*?)<!--/n-->", re.DOTALL)
PART = re.compile(r"^<!--t:([\w.]+)-->\n(.*?)^<!--/t-->$", re.DOTALL | re.MULTILINE)
PARTS = {**numbers.TABLES, **more_tables.MORE, **reference.PARTS, **recipes.PARTS, **index.PARTS}


def pages() -> list[Path]:
    """Every page whose numbers are generated. The index of results, which tells of links in the others, is the last."""
    docs, folders = (REPOSITORY / "docs").rglob("*.md"), set((REPOSITORY / "recipes").glob("*/README.md"))
    results = REPOSITORY / "recipes/results/README.md"
    return [REPOSITORY / "README.md", *sorted(docs), *sorted(folders - {results}), results]


def filled(page: Path) -> str:
    """The text of a page with all that is generated in it.

    Raises:
        KeyError: an unknown ID. ValueError: a part has no line of its own for its begin, or for its end.
    """
    given = page.read_text()
    if len(PART.findall(given)) != given.count("<!--t:"):
        raise ValueError(f"{page.relative_to(REPOSITORY)}: <!--t:ID--> and <!--/t--> must be lines of their own")
    home = os.path.relpath(REPOSITORY, page.parent)

    def part(match: re.Match[str]) -> str:
        text = PARTS[match[1]]().replace("{results}", f"{home}/recipes/results").replace("{home}", home)
        return f"<!--t:{match[1]}-->\n\n{text}\n\n<!--/t-->"

    text = PART.sub(part, given)
    return PHRASE.sub(lambda match: f"<!--n:{match[1]}-->{numbers.VALUES[match[1]]()}<!--/n-->", text)


def main() -> int:
    """Returns the exit code."""
    check, stale = "--check" in sys.argv, 0
    for page in pages():
        text = filled(page)
        if text == page.read_text():
            continue
        stale += 1
        if check:
            sys.stderr.write(f"{page.relative_to(REPOSITORY)}: run python -m docs_tools.fill\n")
        else:
            page.write_text(text)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
