"""Code blocks of README.md and docs run, or say why not."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  the fork server imports it once for all blocks
import peft  # noqa: F401  the fork server imports it once, too
import pytest
import transformers.trainer  # noqa: F401  the fork server imports it once, too
import trl.trainer.sft_trainer  # noqa: F401  the fork server imports it once, too

from tests.helpers.blocks import PAGES, REPOSITORY, Block, blocks_of, run_blocks

EVERY_TIME = ("README.md", "docs/quickstart.md")
"""The pages that are read first; of the others each commit tries a part."""


def groups() -> list[Any]:
    """Blocks that run, by page and number of processes."""
    found = []
    for page in PAGES:
        blocks = sorted(all_blocks(page), key=lambda block: block.ranks)
        for ranks, group in groupby(blocks, key=lambda block: block.ranks):
            if ranks:
                first, *rest = group
                marks = () if first.page in EVERY_TIME else (pytest.mark.turns,)
                found.append(pytest.param([first, *rest], marks=marks, id=f"{first.page}, {ranks}"))
    return found


def all_blocks(page: Path) -> list[Block]:
    return blocks_of(page.read_text(), str(page.relative_to(REPOSITORY)))


def test_every_block_is_marked_and_parses() -> None:
    faults = [fault for page in PAGES for block in all_blocks(page) if (fault := block.fault())]
    assert faults == []


@pytest.mark.parametrize("blocks", groups())
def test_the_blocks_of_a_page_run(blocks: list[Block], tmp_path: Path) -> None:
    run_blocks(blocks, tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```python\nx\n```", "the line before"),
        ("<!-- run: gpus -->\n```python\nx\n```", "unknown mark"),
        ("<!-- run: gpu -->\n```python\nx(\n```", "never closed"),
        ("<!-- run -->\n```bash\nif\n```", "syntax error"),
        ("```yaml\na: [\n```", "flow"),
        ("```text\nanything\n```", None),
        ("<!-- run: no, an excerpt -->\n```python\n...(\n```", None),
    ],
)
def test_a_faulty_block_is_seen(text: str, fault: str | None) -> None:
    (block,) = blocks_of(text, "page.md")
    found = block.fault()
    assert (fault in found if found else False) if fault else found is None


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "raise SystemExit(1)"),
        ("python", "undefined"),
        ("python", "import torch; assert torch.zeros(1) == 1"),
        ("bash", "false\n"),
        ("bash", "hf-ring-attn plan --model none --gpus 2   # no such model\n"),
        ("bash", "hf-ring-attn plan --no-such-option\n"),
    ],
)
def test_a_block_that_fails_is_seen(language: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page.md:3"):
        run_blocks([Block("page.md", 3, language, "", code)], tmp_path)
