"""The site builds without a warning, and its generated parts are those of the package and of recipes/results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_tools import figures, fill, numbers
from hf_ring_attn.integration.patching import changes
from hf_ring_attn.kernels.flash4 import library
from tests.helpers.blocks import PAGES, REPOSITORY

SPELLED = [
    "README.md", "CHANGELOG.md", "CHANGELOG-details.md", "CONTRIBUTING.md", "docs", "docs_tools", "hf_ring_attn",
    "recipes", "examples", "SECURITY.md", "CITATION.cff", "mkdocs.yml", "pyproject.toml", ".github", ".ci",
]  # fmt: skip
MEASURED = re.compile(r"(?<![\w.-])\d[\d,.]*(?:e-\d+)? ?(?:[GM]iB|GB|TFLOP/s|%|ms|times|MFU|s)(?![\w/])")
GENERATED = re.compile(r"<!--([nt]):[\w.]+-->.*?<!--/\1-->|```.*?```|`[^`]*`", re.DOTALL)
NOT_MEASURED_HERE = {
    "1.1 times": "the bound of the balanced layout",
    "40 GiB": "an option's value", "24 GiB": "an option's value", "80 GiB": "what was on the host, of the run's page",
    "2 %": "the self-check's tolerance in 16 bits", "67 GB": "reckoned: tokens x vocabulary x 4 bytes",
    "8 GiB": "reckoned: tokens x width x 2 bytes", "1.6 GB": "the size of an environment", "5.3 GB": "likewise",
    "7 %": "of the page of plan", "12 %": "of the page of plan", "5 %": "bounds of a table", "10 %": "likewise",
    "10 ms": "of the page of biases",
}  # fmt: skip
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


@pytest.mark.parametrize("page", fill.pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_carries_the_numbers_that_were_measured(page: Path) -> None:
    assert fill.filled(page) == page.read_text(), "run python -m docs_tools.fill"


def test_every_generated_part_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in fill.pages())
    assert {*re.findall(r"<!--n:([\w.]+)-->", text)} == numbers.VALUES.keys()
    assert {*re.findall(r"<!--t:([\w.]+)-->", text)} == fill.PARTS.keys()


def test_a_number_that_was_changed_by_hand_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!--n:support_exact-->9999<!--/n-->")
    assert "9999" not in fill.filled(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_measured_number_is_generated(page: Path) -> None:
    """Numbers with a unit stand between markers, or are listed with a reason."""
    found = set(MEASURED.findall(GENERATED.sub("", page.read_text())))
    assert found - NOT_MEASURED_HERE.keys() == set(), "put it into docs_tools.numbers"


def test_a_number_typed_by_hand_is_seen() -> None:
    text = "It takes 3.5 s, <!--n:x-->4 s<!--/n--> and 12 GiB with `offload_above=8 GiB`, 4 steps."
    assert MEASURED.findall(GENERATED.sub("", text)) == ["3.5 s", "12 GiB"]


def test_the_page_of_versions_has_those_that_doctor_calls_tested() -> None:
    text = (REPOSITORY / "docs/support/compatibility.md").read_text().partition("\n\nThe programs")[0]
    rows = dict(re.findall(r"^\| ([\w-]+) \| (.+?) \|", text, re.MULTILINE))
    oldest, newest = changes.TESTED["torch"]
    on_gpus = " to ".join(dict.fromkeys((oldest, changes.NEWEST_ON_GPUS["torch"])))
    assert rows["torch"].startswith(f"{on_gpus}; ") and f"{newest} on CPUs" in rows["torch"]
    for host in changes.TESTED.keys() - {"torch"}:
        assert rows[host] == changes.tested_range(host), host
    assert rows[library.PACKAGE] == ", ".join(library.TESTED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_line_begins_with_a_number(page: Path) -> None:
    """A comment at the start of a line ends a paragraph of Markdown, on GitHub too."""
    assert [line for line in page.read_text().splitlines() if line.lstrip().startswith("<!--n:")] == []


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_drawn_from_what_was_measured(name: str) -> None:
    assert (figures.FOLDER / f"{name}.svg").read_text() == figures.FIGURES[name](), "run python -m docs_tools.figures"


def test_words_are_spelled_right() -> None:
    command = [sys.executable, "-m", "codespell_lib", *SPELLED]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_to_files_lead_to_files(page: Path) -> None:
    """mkdocs checks links between pages, but none that leave docs."""
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "llms.txt").read_text().startswith("# hf_ring_attn")
    assert (tmp_path / "site" / "index.md").is_file()
    twins = list((tmp_path / "site").rglob("*.md"))
    assert {"index.md", "2026-11-23-plan.md"} <= {twin.name for twin in twins}
    links = [(twin, match[1]) for twin in twins for match in LINK.finditer(twin.read_text())]
    assert [
        f"{twin.name}: {link}" for twin, link in links if "://" not in link and not (twin.parent / link).exists()
    ] == []
    from_network = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=.?https?:")
    loaded = [page.name for page in (tmp_path / "site").rglob("*.html") if from_network.search(page.read_text())]
    assert loaded == [], "a page loads something from the network"
