"""The package as it is released: the wheel's contents and metadata, and its installation by plain pip."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import hf_ring_attn
from hf_ring_attn.autoload import switch
from tests.helpers.patience import patient

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "hf_ring_attn"


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
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert (found.name, str(found.version)) == ("hf-ring-attn", hf_ring_attn.__version__)
    assert {str(need) for need in found.requires_dist or [] if not need.marker} == set(project["dependencies"])
    assert str(found.requires_python) == project["requires-python"]
    assert (found.license_expression, found.description_content_type) == ("Apache-2.0", "text/markdown")
    assert message_from_bytes(text)["Metadata-Version"] == "2.4"


def test_every_classifier_is_one_that_registries_know() -> None:
    from trove_classifiers import classifiers

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(project["classifiers"]) <= classifiers


@pytest.mark.slow
def test_plain_pip_installs_it_into_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """Its hosts come from this environment, by a path file, so that nothing is downloaded."""
    place = tmp_path / "empty"
    command(sys.executable, "-m", "venv", "--without-pip", place, where=tmp_path)
    python = place / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    command(*pip, "install", "--no-deps", "--no-index", wheel, where=tmp_path)
    site = Path(command(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", where=tmp_path).strip())
    (site / "hosts.pth").write_text(sysconfig.get_path("purelib") + "\n")
    switch.enable(switch.find(PathDistribution(next(site.glob("hf_ring_attn-*.dist-info")))))
    assert command(place / "bin" / "hf-ring-attn", "--version", where=tmp_path) == (
        f"hf-ring-attn {hf_ring_attn.__version__}\n"
    )
    command(*pip, "uninstall", "--yes", "hf-ring-attn", where=tmp_path)
    assert not [path for path in site.iterdir() if path.name.startswith("hf_ring_attn")], "autoload's files go too"


def test_the_release_notes_are_short_and_have_the_version() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert titles[0] == "Unreleased" and hf_ring_attn.__version__ in titles
    notes = text.partition(f"## [{hf_ring_attn.__version__}]")[2].partition("\n## ")[0]
    assert "### Numerics" in notes and len(notes.splitlines()) <= 30
