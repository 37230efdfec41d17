"""The head of every file of results, and benchmarks that compare: they must see what is wrong."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from hf_ring_attn import RingConfig
from hf_ring_attn.bench import provenance, results
from hf_ring_attn.bench.workload import Workload
from hf_ring_attn.sharding.layout import Layout
from tests.helpers.live_ranks import LiveRanks

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "recipes/benchmarks"

PROGRAM = BENCHMARKS / "why.py"
LAUNCHED = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", provenance.COMMIT)


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ``python recipes/benchmarks/why.py --save "a b"``, and by no launcher."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--save", "a b"])


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, "python"),
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}, "torchrun --nproc_per_node 2"),
        ({"LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}, "torchrun --nnodes 2 --nproc_per_node 8"),
    ],
)
def test_the_command_can_be_typed_again(
    environment: dict[str, str], launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert provenance.command() == f"{launcher} recipes/benchmarks/why.py --save 'a b'"


def test_the_command_names_no_place_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["why.py", "--save", str(REPOSITORY / "recipes/results/support")])
    assert provenance.command() == "python recipes/benchmarks/why.py --save recipes/results/support"


@pytest.mark.parametrize("program", [REPOSITORY / "hf_ring_attn/__main__.py", Path("bin/hf-ring-attn")])
def test_the_command_bench_can_be_typed_again(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file of the package it would not find its own modules; torchrun looks for no script on PATH."""
    monkeypatch.setattr(sys, "argv", [str(program), "bench", "--errors"])
    assert provenance.command() == "python -m hf_ring_attn bench --errors"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert provenance.command() == "torchrun --nproc_per_node 8 -m hf_ring_attn bench --errors"


def test_a_head_holds_what_a_result_must() -> None:
    head = provenance.facts()
    assert set(head) == {
        "command", "date", "commit", "uncommitted_changes", "hardware", "load_average_at_start", "versions",
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", head["date"])
    assert {"processor", "cores", "memory_GiB"} <= set(head["hardware"])
    assert head["versions"]["torch"] == version("torch")
    assert {"python", "transformers", "accelerate"} <= set(head["versions"])


def test_a_copy_without_git_is_told_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that is sent the files alone: asking git there failed."""
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    head = provenance.facts()
    assert head["commit"] is None and head["uncommitted_changes"] is None
    monkeypatch.setenv(provenance.COMMIT, "0123abc")
    assert provenance.facts()["commit"] == "0123abc"


def test_a_repository_around_an_installed_package_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in an environment inside somebody's checkout: git would tell that one's commit."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "REPOSITORY", folder)
    assert provenance.facts()["commit"] is None
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    assert provenance.facts()["commit"]


def test_gpus_are_told_with_driver_and_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU torch's answers and nvidia-smi are put in place; the keys are those of a machine with GPUs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    head = provenance.facts()
    assert head["hardware"]["gpus"] == ["GPU 0", "GPU 1"]
    assert head["hardware"]["driver"] == "580.65.06"
    assert head["versions"]["cuda"] == "13.0" and head["versions"]["nccl"] == "2.28.9"
    assert set(provenance.GPU_PACKAGES) <= set(head["versions"])
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert provenance.facts()["hardware"]["driver"] is None


def test_no_benchmark_makes_a_head_of_its_own() -> None:
    programs = sorted(BENCHMARKS.glob("*.py"))
    assert programs
    for program in programs:
        text = program.read_text()
        assert "from hf_ring_attn.bench.provenance import" in text and "facts()" in text, program.name
        assert not re.search(r"rev-parse|cpuinfo|python_version|date\.today", text), program.name


def errors_of_a_long_row(tokens: int, head_of_dk: int) -> dict[str, float]:
    """What recipes/benchmarks/long_row.py says on this rank, with a head of dk taken for another if that is not 0."""
    sys.path.insert(0, str(BENCHMARKS))
    from long_row import probe

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    work = Workload(tokens, torch.device("cpu"), 4, 2, 16, 16, torch.float64)
    real = torch.autograd.grad

    def grad(*args: Any) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = real(*args)
        return dq, dk.roll(head_of_dk, 2), dv

    with mock.patch("torch.autograd.grad", grad):
        return probe(work, Layout(tokens, size, rank), RingConfig())


@pytest.mark.parametrize(("head", "wrong"), [(0, set()), (1, {"dk"})])
def test_a_long_row_is_compared_with_float64(ranks: Callable[[int], LiveRanks], head: int, wrong: set[str]) -> None:
    for errors in ranks(2).run(errors_of_a_long_row, 240, head):
        assert {name for name, error in errors.items() if not error < 1e-10} == wrong, errors


def test_the_time_of_a_ring_is_spent_once() -> None:
    """In attention first, whatever runs beside it; then in other work, in NCCL, in waits."""
    sys.path.insert(0, str(BENCHMARKS))
    import where

    attention = "cutlass_FlashAttention{}Sm90_tensor"
    events = [
        (attention.format("Forward"), (0.0, 2.0)), (attention.format("Forward"), (1.0, 3.0)),
        (attention.format("Backward"), (5.0, 6.0)), ("Memcpy", (2.5, 4.0)), ("wait_signal_kernel", (3.5, 5.0)),
        ("ncclDevKernel", (6.0, 7.0)), ("postprocess", (7.5, 8.0)),
    ]  # fmt: skip
    spent = where.spent(events, 1)
    assert spent == where.Spent(total=8, forward=3, backward=1, other=1.5, nccl=1, waiting=1.5)
    with pytest.raises(RuntimeError, match="no attention kernels were found among Memcpy"):
        where.spent([("Memcpy", (0.0, 1.0))], 1)


def parity_of_a_ring(kernel: str) -> list[str]:
    """What recipes/benchmarks/logprob_parity.py complains of, on this rank of a ring of two."""
    sys.path.insert(0, str(BENCHMARKS))
    from logprob_parity import failures, measured

    sizes = {"rows": 4, "batch": 2, "shortest": 20, "longest": 60, "ratios": 1}
    given = argparse.Namespace(rings=[2], kernels=[kernel], size="tiny", **sizes)
    rank = int(os.environ["RANK"])
    found = measured(given, torch.device("cpu"), rank)
    return failures(found) if rank == 0 else []


def test_log_probabilities_of_another_kernel_order_are_seen(ranks: Callable[[int], LiveRanks]) -> None:
    """The reference adds in an order that depends on the ring, so its bits differ."""
    complaints = ranks(2).run(parity_of_a_ring, "reference")[0]
    assert any("attention of" in text for text in complaints)
    assert any("at a fixed height" in text for text in complaints)
    assert not any("ratio" in text for text in complaints)


def test_a_ring_without_differences_is_praised() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    from logprob_parity import failures

    steady, off = {"same_bits": 1.0, "largest": 0.0, "mean": 0.0}, {"same_bits": 0.5, "largest": 0.1, "mean": 0.01}
    row = {
        "kernel": "triton", "ring": 2, "attention_rows_that_differ": 0, "ratio_off_one": 0.0, "log_probs": off,
        "fixed_height": steady, "batches_of_half": off, "batches_of_one": off,
    }  # fmt: skip
    assert failures([row, {"modules_that_round": {}}]) == []
    assert len(failures([{**row, "ratio_off_one": 1e-7, "batches_of_half": steady, "batches_of_one": steady}])) == 2


@pytest.mark.turns
def test_whole_steps_are_run_saved_and_compared(tmp_path: Path) -> None:
    command = [sys.executable, "recipes/benchmarks/whole_steps.py", "--toy", "--steps", "3", "--save", str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, "--only", "ring_8K", "own"], cwd=REPOSITORY, env=environment, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (saved,) = results.read(tmp_path / results.FILE)
    assert saved.name == "ring_8K" and len(saved.rows[0]["losses"]) == 3 and "--tokens 64" in saved.head["command"]
    assert "losses 5." in done.stdout


def test_the_error_of_a_whole_step_is_one_of_this_package_too() -> None:
    lines = ["Traceback (most recent call last):", "hf_ring_attn.errors.core.HostMemoryFull: offload_above needs",
             "torch.OutOfMemoryError: CUDA out of memory", "step 1: loss 5.0, 1 s"]  # fmt: skip
    sys.path.insert(0, str(BENCHMARKS))
    from whole_steps import is_error

    assert [is_error(line) for line in lines] == [False, True, True, False]


@pytest.mark.full
def test_of_a_whole_step_that_takes_too_long_no_rank_is_left(tmp_path: Path) -> None:
    name, value = "TEST_OF_WHOLE_STEPS", str(tmp_path)  # every process that the run starts has it
    command = [sys.executable, "recipes/benchmarks/whole_steps.py", "--toy", "--steps", "20000"]
    ended = subprocess.run([*command, "--only", "ring_32K", "--seconds", "60"], cwd=REPOSITORY, capture_output=True,
                           env={**os.environ, "HF_HUB_OFFLINE": "1", name: value},
                           text=True, timeout=180, check=False)  # fmt: skip
    assert ended.returncode == 1 and re.search(r"ring_32K +failed after \d+ s: ended after 60 s", ended.stdout)
    assert re.search(r"60 s; step 1: loss 5\.\d+, \d+\.\d+ s; step 2: ", ended.stdout), "its steps are lost"
    left = [one.cmdline() for one in psutil.process_iter() if carries(one, name, value)]
    assert not left


def carries(process: psutil.Process, name: str, value: str) -> bool:
    """Whether a process has this variable in its environment, as far as it lets itself be read."""
    try:
        return bool(process.environ().get(name) == value)
    except psutil.Error:
        return False


@pytest.mark.turns
def test_the_time_of_the_host_is_measured_by_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += ["recipes/benchmarks/host_time.py", "--device", "cpu", "--tokens", "256", "--heads", "4", "2"]
    command += ["--width", "16", "--rounds", "2", "--profile", "--save", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (saved,) = results.read(tmp_path / results.FILE)
    first, *rows = saved.rows
    assert saved.name == "host_2" and first["first_call_s"] > 0
    assert [row["contender"] for row in rows] == ["ring", "ring, gathers", "ring, heads split", "one device"]
    assert all(row["host_ms"] > 0 and len(row["rounds"]) == 2 for row in rows)
    assert "hf_ring_attn/traffic/messages.py" in done.stdout


SMALL = {
    "guards": ["guards.py", "--layers", "1", "--steps", "2", "--tokens", "32", "--lora"],
    "self_check": ["self_check.py", "--tokens", "32", "--rounds", "2"],
    "why": ["why.py", "--length", "64", "--heads", "2", "1", "--width", "16", "--rings", "1", "2"],
    "traffic": ["traffic.py", "--length", "1024", "--rings", "2"],
}
BY_RANKS = {"guards", "self_check"}
IN_TURNS = [pytest.param(name, marks=pytest.mark.turns) for name in SMALL if name != "guards"]


@pytest.mark.parametrize("name", [pytest.param("guards", marks=pytest.mark.full), *IN_TURNS])
def test_a_benchmark_runs_and_files_its_numbers(name: str, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"] if name in BY_RANKS else []
    command = [
        sys.executable,
        *launch,
        f"recipes/benchmarks/{SMALL[name][0]}",
        *SMALL[name][1:],
        "--save",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for saved in results.read(tmp_path / results.FILE):
        measured = [value for row in [saved.head, *saved.rows] for value in row.values()]
        assert saved.head["commit"] and len(measured) > 8, saved
