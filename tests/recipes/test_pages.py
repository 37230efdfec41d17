"""A page of a recipe says what a step took, from filed rows: seconds, GiB, first loss; or why that was not measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs_tools import fill, numbers, recipes
from tests.recipes.programs_of_recipes import NAMES, RECIPES

PAGES = sorted(path for path in RECIPES.glob("*/README.md") if path.parent != numbers.FILED)
FIELDS = ("s a step", "GiB a GPU", "first loss")
REASON = re.compile(r"^Not measured: seconds a step, GiB a GPU and the first loss\b.* .+", re.MULTILINE)
PART = re.compile(r"^<!--t:recipe\.(\w+)-->\n(.*?)^<!--/t-->$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d.]*( \(.+\))?")


def lacks(text: str) -> list[str]:
    """Fields that a part has neither a number for nor a reason."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    columns = dict(zip(rows[0], zip(*rows[2:], strict=True), strict=True)) if len(rows) > 2 else {}
    without = [name for name in FIELDS if not all(map(NUMBER.fullmatch, columns.get(name, ("",))))]
    return [] if REASON.search(text) and (not rows or not without) else without


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_has_seconds_memory_and_the_first_loss_or_says_why_not(page: Path) -> None:
    text, name = page.read_text(), page.parent.name
    ((found, part),) = PART.findall(text)
    assert found == name.replace("-", "_") and lacks(part) == []
    assert fill.filled(page) == text, "run python -m docs_tools.fill"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("Not measured yet.", [*FIELDS]),
        ("| s a step | GiB a GPU |\n|---|---|\n| 3 | 4.5 |", ["first loss"]),
        ("| s a step | GiB a GPU | first loss |\n|---|---|---|\n| not measured | 4.5 | 12.5 |", ["s a step"]),
        ("| s a step | GiB a GPU | first loss |\n|---|---|---|\n| 3.5 (3.4 to 3.6) | 4.5 | 12.5 |", []),
        ("Not measured: seconds a step, GiB a GPU and the first loss. No machine.", []),
    ],
)
def test_a_missing_field_is_seen(text: str, missing: list[str]) -> None:
    assert lacks(text) == missing


def test_every_recipe_has_a_page_and_no_part_is_left_over() -> None:
    assert (
        {page.parent.name for page in PAGES} == {*NAMES, "long_context_lora"} == {*recipes.RUNS, *recipes.NOT_MEASURED}
    )


def test_a_table_has_the_numbers_of_its_rows() -> None:
    folder, name = numbers.LOSS, "chunked_128K"
    found = numbers.step(folder, name)
    line = next(line for line in recipes.part("lora-128k").splitlines() if folder in line)
    for value in (
        f"{found['seconds_per_step']:.1f}",
        f"{max(found['peak_memory_GiB']):.1f}",
        f"{found['losses'][0]:.3f}",
    ):
        assert f"| {value} |" in line


def test_a_part_without_lines_of_its_own_is_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a page stayed empty where its table should be, and the check passed."""
    monkeypatch.setattr(fill, "REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!--t:steps--><!--/t-->\n")
    with pytest.raises(ValueError, match="must be lines of their own"):
        fill.filled(page)
