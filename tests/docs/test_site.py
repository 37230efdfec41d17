"""The site builds without a warning, and its generated parts are those of the package and of recipes/results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_tools import fill
from tests.helpers.blocks import PAGES, REPOSITORY

LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_carries_the_numbers_that_were_measured(page: Path) -> None:
    assert fill.filled(page) == page.read_text(), "run python -m docs_tools.fill"


def test_a_number_that_was_changed_by_hand_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!--n:support_exact-->9999<!--/n-->")
    assert "9999" not in fill.filled(page)


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
