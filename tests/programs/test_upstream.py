"""The patches of docs/upstream: what another backend can do then, what stays as it was, what of ours they replace."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_ring_attn import integration
from hf_ring_attn.integration.patching import changes
from tests.helpers.jobs import accelerate_ranks, upstream_jobs
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import train
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.patched_hosts import HOSTS, PATCHES, base_of, build, other_versions, touched
from tests.helpers.patience import patient
from tests.helpers.programs import REPOSITORY

PAGE = PATCHES / "index.md"


def test_the_patches_are_for_the_pinned_hosts() -> None:
    """Else the tests below would be skipped in CI, too."""
    pins = (REPOSITORY / "tests/constraints.txt").read_text().splitlines()
    assert [host for host in HOSTS if f"{host}=={base_of(host)}" not in pins] == []


needs_tested_hosts = pytest.mark.skipif(bool(other_versions()), reason="; ".join(other_versions()))


def run_patched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs python on the patched hosts in ``folder``."""
    paths = [str(path) for path in (*build(folder), REPOSITORY)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False,
        timeout=patient(200),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@needs_tested_hosts
def test_the_patches_fit_the_tested_hosts(tmp_path: Path) -> None:
    for host, path in zip(HOSTS, build(tmp_path), strict=True):
        copied = {str(file.relative_to(tmp_path / host)) for file in path.rglob("*.py") if not file.is_symlink()}
        assert copied == {file for file in touched(host) if not file.startswith("tests/")}
        for file in copied:
            compile((tmp_path / host / file).read_text(), file, "exec")


def test_the_page_names_our_patches_that_go() -> None:
    goes = re.findall(r"^\| `([\w.]+)` \| goes", PAGE.read_text(), re.MULTILINE)
    assert sorted(goes) == sorted(key.partition(":")[2] for key in upstream_jobs.UNNECESSARY)


def test_the_page_counts_our_patches() -> None:
    at_import = [change for change in integration.CHANGES if isinstance(change, changes.Patch)]
    text = PAGE.read_text()
    assert f"{len(at_import)} patches" in text
    cells = re.findall(r"^\| (.+?) \| (?:goes|stays?) \|", text, re.MULTILINE)
    words = {"seventeen": 17, "three": 3}
    assert sum(words.get(cell.split()[0]) or cell.count("`") // 2 for cell in cells) == len(at_import)
    of_trainer = [change for change in at_import if change.key.partition(":")[2].startswith("Trainer.")]
    assert len(of_trainer) == 17 + 1


@needs_tested_hosts
@pytest.mark.slow
@pytest.mark.full
def test_on_patched_hosts(tmp_path: Path, ranks: Callable[[int], LiveRanks]) -> None:
    """Everything in one test, since the program takes ten seconds to import its hosts."""
    run_patched(tmp_path, "-m", "tests.helpers.jobs.upstream_jobs", str(tmp_path / "found"))
    found: dict[str, list[Any]] = pickle.loads((tmp_path / "found").read_bytes())
    assert all(place.startswith(str(tmp_path)) for places in found["places"] for place in places)

    # torch's own backend, wrong configs and their errors are as before
    stock = ranks(2).run(upstream_jobs.stock_answers)
    assert found["stock"] == stock
    assert "supported only with SDPA attention, you are using eager" in stock[0]["eager"]
    assert stock[0]["context"].startswith("([[0, 1, 2, 3, 12, 13, 14, 15]], [True, True]")

    # another backend trains with a stock Trainer, without our patches, as one process does
    alone = ranks(2).run(train, upstream_jobs.NO_EVALUATION, Mesh())[0]
    for installed, foreign in found["foreign"]:
        assert installed == []
        for name in ("loss", "grad_norm", "num_input_tokens_seen"):
            want = [entry[name] for entry in alone.log if "loss" in entry]
            assert [entry[name] for entry in foreign.log] == pytest.approx(want, rel=1e-5), name
        for name, parameter in alone.parameters.items():
            torch.testing.assert_close(foreign.parameters[name], parameter, rtol=0, atol=1e-6)

    # our package gives the same numbers, as it is and without the patches that become unnecessary
    trainer = ranks(2).run(upstream_jobs.ring_of_two)
    packed = ranks(2).run(upstream_jobs.packed_in_a_ring)
    assert {*found["ours"][0]["installed"]} - {*found["fewer"][0]["installed"]} == {*upstream_jobs.UNNECESSARY}
    for name in ("ours", "fewer"):
        for rank, ours in enumerate(found[name]):
            lines, outcome = ours["trainer"]
            assert outcome.log == trainer[rank][1].log
            assert outcome.ring_size == 2
            assert rank > 0 or "self-check passed" in lines[0], lines
            assert [entry["loss"] for entry in ours["packed"].steps] == [x["loss"] for x in packed[rank].steps]
            assert ours["packed"].evaluation == packed[rank].evaluation
    assert [ours["named"][1].log for ours in found["ours"]] == [outcome.log for _, outcome in trainer]
    assert {ours["loops"] for ours in found["ours"]} == {len(accelerate_ranks.CHECKS)}


@needs_tested_hosts
@pytest.mark.slow
@pytest.mark.full
def test_the_tests_in_the_patches_pass(tmp_path: Path) -> None:
    (tmp_path / "hosts").mkdir()
    files = [str(tmp_path / "hosts" / host / file) for host in HOSTS for file in touched(host) if "test" in file]
    done = run_patched(tmp_path / "hosts", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert "11 passed" in done.stdout
