"""The package as it is released: contents and metadata of the wheel, and what plain pip makes of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version

import hf_ring_attn
from hf_ring_attn.autoload import switch
from tests.helpers.patience import patient

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "hf_ring_attn"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CUDA = ("nvidia-", "cuda-", "triton")
"""Beginnings of names that only a build of torch for CUDA needs."""


def test_badges_are_true() -> None:
    """Those of the README say what the package requires, and its license."""
    badges = re.findall(
        r"^!\[(.+?)\]\(https://img\.shields\.io/badge/(.+)-blue\)$", (REPOSITORY / "README.md").read_text(), re.M
    )
    required = [f"Python {PROJECT['requires-python']}", *PROJECT["dependencies"]]
    wanted = [re.sub(r" ?>=(.+)", r" \1+", words) for words in required] + [f"license {PROJECT['license']}"]
    assert [words for words, _ in badges] == wanted
    assert [
        url.replace("--", "~").replace("-", " ").replace("~", "-").replace("%2B", "+") for _, url in badges
    ] == wanted


def command(*words: str | Path, where: Path) -> str:
    """Runs a command in a folder outside the checkout; its output."""
    found = subprocess.run(
        [str(word) for word in words], cwd=where, capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and an sdist, built by the backend that pip and build call."""
    folder = tmp_path_factory.mktemp("dist")
    command(sys.executable, "-m", "hatchling", "build", "--directory", folder, where=REPOSITORY)
    return folder


@pytest.fixture
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


def source_files() -> set[str]:
    return {
        path.relative_to(REPOSITORY).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_names_carry_the_version(built: Path) -> None:
    names = sorted(path.name for path in built.iterdir())
    version = hf_ring_attn.__version__
    assert names == [f"hf_ring_attn-{version}-py3-none-any.whl", f"hf_ring_attn-{version}.tar.gz"]


def test_the_wheel_holds_the_package_and_its_license(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == source_files()
    assert "hf_ring_attn/py.typed" in names
    info = {name.partition(".dist-info/")[2] for name in wheel.namelist()} - {""}
    assert info == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_sdist_holds_what_builds_and_tests_it(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert source_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/run.sh", "PKG-INFO"} <= names
    assert not [name for name in names if name.startswith((".venv", ".git/", "dist/", "build/"))]


def test_metadata_is_valid_and_says_what_is_needed(wheel: zipfile.ZipFile) -> None:
    text = next(wheel.read(name) for name in wheel.namelist() if name.endswith("/METADATA"))
    found = Metadata.from_email(text, validate=True)
    assert (found.name, str(found.version)) == ("hf-ring-attn", hf_ring_attn.__version__)
    assert {str(need) for need in found.requires_dist or [] if not need.marker} == set(PROJECT["dependencies"])
    assert str(found.requires_python) == PROJECT["requires-python"]
    assert (found.license_expression, found.description_content_type) == ("Apache-2.0", "text/markdown")
    assert message_from_bytes(text)["Metadata-Version"] == "2.4"


def test_every_classifier_is_one_that_registries_know() -> None:
    from trove_classifiers import classifiers

    assert set(PROJECT["classifiers"]) <= classifiers


def test_twine_finds_no_fault_in_wheel_and_sdist(built: Path) -> None:
    files = sorted(built.iterdir())
    said = command(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files, where=built)
    assert said.count("PASSED") == len(files) == 2, said


@pytest.mark.turns
@pytest.mark.slow
def test_plain_pip_installs_it_into_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """With its hosts, at the pinned versions; then two ranks attend there.

    torch is lent by the environment of the tests, and pip gets a stand-in with its version and needs: no gigabytes of
    it and of CUDA are downloaded.
    """
    place = tmp_path / "empty"
    command(sys.executable, "-m", "venv", "--without-pip", place, where=tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin/python"), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--constraint", str(REPOSITORY / "tests/constraints.txt")]
    probe = [*install, "--dry-run", "--no-deps", "--no-cache-dir", "--retries", "0", "--timeout", "10", "accelerate"]
    if subprocess.run(probe, capture_output=True, timeout=patient(120), check=False).returncode:
        pytest.skip("pip finds no package index: there is no network")
    command(*install, next(built.glob("*.whl")), stand_in(tmp_path, "torch", pinned("torch")), where=tmp_path)
    chosen = {each["name"].lower(): Version(each["version"]) for each in json.loads(
        command(*pip, "list", "--format", "json", where=tmp_path))}  # fmt: skip
    assert chosen["hf-ring-attn"] == Version(hf_ring_attn.__version__)
    for need in map(Requirement, PROJECT["dependencies"]):
        assert chosen[need.name] in need.specifier, need
    assert not [name for name in chosen if name.startswith(CUDA)], "what only a GPU needs is not for everybody"
    site = Path(
        command(place / "bin/python", "-c", "import site; print(site.getsitepackages()[0])", where=tmp_path).strip()
    )
    for name in ("torch", "torchgen"):
        (site / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    switch.enable(switch.find(PathDistribution(next(site.glob("hf_ring_attn-*.dist-info")))))
    ours = place / "bin" / "hf-ring-attn"
    assert command(ours, "--version", where=tmp_path) == f"hf-ring-attn {hf_ring_attn.__version__}\n"
    said = command(ours, "doctor", "--device", "cpu", "--ranks", "2", where=tmp_path)
    assert said.endswith("live check: passed\n"), said
    command(*pip, "uninstall", "--yes", "hf-ring-attn", where=tmp_path)
    assert not [path for path in site.iterdir() if path.name.startswith("hf_ring_attn")], "autoload's files go too"


def pinned(name: str) -> str:
    """The version of a package in tests/constraints.txt."""
    pins = (REPOSITORY / "tests/constraints.txt").read_text()
    found = re.search(rf"^{name}==(.+)$", pins, re.MULTILINE)
    assert found, f"{name} is not pinned"
    return found[1]


def stand_in(folder: Path, name: str, version: str) -> Path:
    """A wheel without code; it needs what the installed package of that name needs, apart from CUDA."""
    needs = [need for need in distribution(name).requires or [] if not need.startswith(CUDA)]
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {x}" for x in needs)]
    files = {"METADATA": "\n".join(lines) + "\n", "RECORD": ""}
    files["WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{name}-{version}.dist-info/{file}", text)
    return wheel


LINES = 15
"""Of text for a release: more than that is not read, and belongs into CHANGELOG-details.md."""


def test_the_release_notes_are_short_and_have_the_version() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    parts = re.split(r"^## \[(.+?)\].*$", text, flags=re.MULTILINE)[1:]
    notes = dict(zip(parts[::2], parts[1::2], strict=True))
    details = (REPOSITORY / "CHANGELOG-details.md").read_text()
    assert next(iter(notes)) == "Unreleased" and hf_ring_attn.__version__ in notes
    for version, note in notes.items():
        assert "### Numerics" in note and f"## {version}\n" in details, version
        lines = [line for line in note.splitlines() if line and not line.startswith("#")]
        assert len(lines) <= LINES, f"{version}: {len(lines)} lines"
