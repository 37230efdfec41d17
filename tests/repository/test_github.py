"""Files for GitHub and for citations: valid YAML, actions pinned by major version, few rights, the right commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it has no types

import hf_ring_attn

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (REPOSITORY / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
MAJOR = re.compile(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)")


def read(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text())
    return found


def name_of(path: Path) -> str:
    return path.stem


def test_there_are_the_four_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "newest", "publish", "tests"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_pins_its_actions_and_may_only_read(path: Path) -> None:
    workflow = read(path)
    assert workflow["name"] == path.stem and workflow[True], "YAML reads the key on as true"
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60 and job["runs-on"] == "ubuntu-latest"
        assert set(job.get("permissions", {})) <= {"id-token"}, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "uses" not in step or MAJOR.fullmatch(step["uses"]), step
            assert "${{" not in step.get("run", ""), "a name of the event in a script is a way to inject commands"


def commands(name: str) -> str:
    jobs = read(REPOSITORY / f".github/workflows/{name}.yml")["jobs"]
    return "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])


def test_each_workflow_runs_what_the_repository_has() -> None:
    assert "bash .ci/run" in commands("tests")
    assert "mkdocs build --strict" in commands("docs")
    assert "python -m build" in commands("publish") and "twine check --strict" in commands("publish")


def test_the_newest_hosts_are_not_those_of_the_pins(tmp_path: Path) -> None:
    """The workflow's own command keeps the pins of torch and of the tools of tests, and no other."""
    (command,) = (line for line in commands("newest").splitlines() if line.startswith("grep "))
    environment = {**os.environ, "RUNNER_TEMP": str(tmp_path)}
    subprocess.run(["bash", "-c", command], cwd=REPOSITORY, env=environment, check=True)
    left = (tmp_path / "newest.txt").read_text().splitlines()
    assert {line.partition("==")[0] for line in left} == {"torch", "numpy", "pytest", "pytest-xdist", "hypothesis"}
    assert 'CONSTRAINTS="$RUNNER_TEMP/newest.txt" bash tests/run.sh' in commands("newest")


def test_publishing_needs_no_stored_secret() -> None:
    """Trusted publishing: the job that uploads has an identity, and runs nothing of the repository."""
    path = REPOSITORY / ".github/workflows/publish.yml"
    workflow = read(path)
    job = workflow["jobs"]["publish"]
    assert workflow[True] == {"release": {"types": ["published"]}}
    assert job["permissions"] == {"id-token": "write"} and job["environment"] == "pypi"
    assert [step["uses"].partition("@")[0] for step in job["steps"]] == [
        "actions/download-artifact", "pypa/gh-action-pypi-publish",
    ]  # fmt: skip
    assert "secrets." not in path.read_text()


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_an_issue_asks_for_what_doctor_prints(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    ids = [item["id"] for item in form["body"] if item["type"] != "markdown"]
    assert len(ids) == len(set(ids))
    (doctor,) = (item for item in form["body"] if item.get("id") == "doctor")
    assert doctor["attributes"]["label"].startswith("hf-ring-attn doctor") and doctor["validations"]["required"]


def test_the_citation_is_of_this_version() -> None:
    found = read(REPOSITORY / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert str(found["version"]) == hf_ring_attn.__version__ and found["license"] == "Apache-2.0"
