"""What the repository promises about itself: two commands, exact pins, a reason for every silenced check."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = [".ci", ".github", "docs", "examples", "hf_ring_attn", "recipes", "tests", "upstream"]
COMMANDS = ["bash examples/run.sh", "bash tests/run.sh"]
FIRST_SCREEN_LINES = 45

# a noqa that lacks its codes, or at least two words of reason after them
NOQA_WITHOUT_REASON = re.compile(r"#\s*noqa\b(?!: [A-Z]+\d+(?:, ?[A-Z]+\d+)*[\s#(-]+[^\W\d_]\S*\s+\S)")
PRIVATE_PLACE = re.compile(r"file://|(?<![\w.~])/(?:root|home|Users)/\w")  # a mirror on a disk, a person's folder
OUR_NAME = r"hf[-_]ring[-_]attn(\[[\w,]*\])?([=<>~!]=?[\d.]+)?(?![-\w./])"
FROM_A_REGISTRY = re.compile(rf"\bpip3? install\b[^#\n]*?[\s'\"]{OUR_NAME}")


def files() -> Iterator[Path]:
    """Every text file of the repository but this one, whose patterns would match themselves."""
    for folder in (REPOSITORY / name for name in FOLDERS):
        yield from (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    yield from (path for path in REPOSITORY.iterdir() if path.is_file())


def lines_that_match(pattern: re.Pattern[str], ending: str = "") -> list[str]:
    return [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in files()
        if path.name.endswith(ending) and path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_stands_in_the_first_screen_of_the_readme_and_ci_runs_it(command: str) -> None:
    first_screen = (REPOSITORY / "README.md").read_text().splitlines()[:FIRST_SCREEN_LINES]
    assert any(re.match(rf"\s*(\$ )?{re.escape(command)}\s*(#|$)", line) for line in first_screen)
    assert re.search(rf"^part .* {re.escape(command)}( |$)", (REPOSITORY / ".ci/run").read_text(), re.MULTILINE)


def test_ci_runs_the_tests_that_need_bitsandbytes_before_all_others() -> None:
    parts = re.findall(r"^part .* bash tests/run\.sh(.*)$", (REPOSITORY / ".ci/run").read_text(), re.MULTILINE)
    assert parts == [" --qlora", ""]


@pytest.mark.parametrize("script", [".ci/run", "examples/run.sh", "tests/run.sh", "tests/setup.sh"])
def test_a_script_has_no_syntax_error(script: str) -> None:
    assert subprocess.run(["bash", "-n", REPOSITORY / script], capture_output=True, text=True).stderr == ""


def test_every_requirement_is_pinned_within_its_range() -> None:
    """flash-attn is the exception: it needs a GPU, so the two commands do not install it."""
    lines = (REPOSITORY / "tests/constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    groups = [project["dependencies"], *(needs for name, needs in extras.items() if name != "flash-attn")]
    for requirement in (Requirement(need) for group in groups for need in group):
        assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_every_silenced_check_names_its_code_and_its_reason() -> None:
    """For ``type: ignore`` mypy itself demands the code."""
    assert lines_that_match(NOQA_WITHOUT_REASON, ".py") == []


@pytest.mark.parametrize(
    ("line", "silent"),
    [
        ("import x  # noqa", True),
        ("import x  # noqa: F401", True),
        ("import x  # noqa: F401, E402  why", True),
        ("import x  # noqa: F401  registers the kernel", False),
        ("import x  # noqa: F401, E402 # registers the kernel", False),
    ],
)
def test_a_missing_reason_is_seen(line: str, silent: bool) -> None:
    assert bool(NOQA_WITHOUT_REASON.search(line)) == silent


def test_no_file_names_a_private_folder_or_mirror() -> None:
    assert lines_that_match(PRIVATE_PLACE) == []


def test_nobody_is_advised_to_install_a_name_that_is_not_ours_yet() -> None:
    """The package is not on PyPI: whoever takes the name first would be installed. Take this out at the release."""
    assert lines_that_match(FROM_A_REGISTRY) == []


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("pip install hf-ring-attn", True),
        ("pip install -U 'hf-ring-attn[plot]'.", True),
        ('uv pip install "hf_ring_attn==0.1.0"', True),
        ("pip install hf_ring_attn-0.1.0-py3-none-any.whl", False),
        ("pip install '.[peft,trl]'     # hf-ring-attn with its hosts", False),
        ("pip install ./hf_ring_attn", False),
    ],
)
def test_such_advice_is_seen(line: str, bad: bool) -> None:
    assert bool(FROM_A_REGISTRY.search(line)) == bad
