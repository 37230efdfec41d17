"""The commands for the terminal."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import ClassVar

import pytest
import torch

import hf_ring_attn
from hf_ring_attn import cli, kernels
from hf_ring_attn.doctor import report
from hf_ring_attn.integration.patching.changes import TESTED, requirement
from hf_ring_attn.kernels import Request
from hf_ring_attn.kernels.reference import Reference


def test_the_doctor_tells_every_kernel_with_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cpu", "--dtype", "float64", "--head-dim", "64", "--value-dim", "48"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"hf-ring-attn {hf_ring_attn.__version__}, python ")
    assert f"\n  torch          {version('torch'):18s} 2.11, on CPUs to 2.15\n" in text
    assert " 5.17 to 5.24\n" in text and "\n  peft " in text and "NOT TESTED" not in text
    assert "kernels for 32 heads over 8, 64/48 wide, float64 on cpu:\n" in text
    assert "  flash4     no: needs an NVIDIA GPU, got tensors on cpu\n" in text
    assert "computes in bfloat16 or float16, got torch.float64\n" in text
    assert "  triton     no: " in text
    assert "  flash2     no: needs an NVIDIA GPU, got tensors on cpu\n" in text
    assert "  flex       no: needs a GPU, got tensors on cpu\n" in text
    assert "keys and values must be of one width, got 64 and 48\n" in text
    assert "  reference  yes: float32 sums\n" in text and text.endswith('"auto" takes reference\n')


def test_an_untested_version_is_marked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"torch": "2.16.0+cu132", "peft": "0.20.9", "trl": "1.16.3", "flash-attn-4": "4.0.0b35", "triton": "9.9"}
    monkeypatch.setattr(report, "version", lambda name: found.get(name, TESTED.get(name, ("", "1"))[1]))
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "   NOT TESTED" in line]
    assert [line.split()[0] for line in said] == ["torch", "peft", "flash-attn-4"]
    assert said[1].endswith(f"NOT TESTED: pip install '{requirement('peft')}'")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hf-ring-attn {hf_ring_attn.__version__}\n"


def test_what_is_asked_for_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cpu", "--softcap", "--sinks", "--holes", "--deterministic"]) == 0
    assert "on cpu, softcap, sinks, deterministic, keys in several runs:" in capsys.readouterr().out


class Unable(Reference):
    def unsupported(self, request: Request) -> list[str]:
        return ["it is tired", "it is Saturday"]


def test_where_no_kernel_can_the_exit_code_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "KERNELS", {"unable": Unable()})
    monkeypatch.setattr("hf_ring_attn.doctor.report.KERNELS", {"unable": Unable()})
    assert cli.main(["doctor", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "  unable     no: it is tired", f"  {'':14s}it is Saturday", "none of them can: see the reasons above",
    ]  # fmt: skip


class Counting(Reference):
    asked: ClassVar[list[int]] = []

    def unsupported(self, request: Request) -> list[str]:
        self.asked.append(request.heads)
        return [] if len(self.asked) == 1 else ["it is asked again"]


def test_every_kernel_is_asked_once_for_the_table_and_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's answer may be slow, and it may change: the table told one, the exit code another."""
    table = {"counting": Counting()}
    monkeypatch.setattr(kernels, "KERNELS", table)
    monkeypatch.setattr("hf_ring_attn.doctor.report.KERNELS", table)
    assert cli.main(["doctor", "--device", "cpu", "--heads", "16"]) == 0
    assert capsys.readouterr().out.endswith('  counting   yes: float32 sums\n"auto" takes counting\n')
    assert Counting.asked == [16]


def test_the_kernel_of_the_environment_alone_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code, last in (("reference", 0, '"auto" takes reference'), ("flash4", 1, "none of them can: see the")):
        monkeypatch.setenv("HF_RING_ATTN_KERNEL", name)
        assert cli.main(["doctor", "--device", "cpu"]) == code
        assert last in capsys.readouterr().out.splitlines()[-1]


BAD_ARGUMENTS = [
    ("doctor --heads 0", "argument --heads: got 0, which must be a whole number from 1 on"),
    ("doctor --heads many", "argument --heads: got many, which must be a whole number from 1 on"),
    ("doctor --kv-heads -8", "argument --kv-heads: got -8"),
    ("doctor --head-dim 0", "argument --head-dim: got 0"),
    ("doctor --value-dim 0", "argument --value-dim: got 0"),
    ("doctor --heads 32 --kv-heads 5", "--heads 32 must be a multiple of --kv-heads 5"),
    ("doctor --heads 4", "--heads 4 must be a multiple of --kv-heads 8"),
    ("doctor --device banana", "argument --device: got banana, which must be cuda or cpu"),
    ("doctor --device cuda", "argument --device: got cuda, but torch finds no GPU here"),
    ("doctor --ranks 0", "argument --ranks: got 0, which must be a whole number from 1 on"),
    ("doctor --dtype float8", "argument --dtype: invalid choice: 'float8'"),
    ("bench --heads-per-gather -1", "argument --heads-per-gather: got -1, which must be a whole number from 0 on"),
    ("bench --tokens 64 0", "argument --tokens: got 0"),
    ("bench --tokens 64 K", "argument --tokens: got K, which must be a whole number from 1 on (128K is 131072)"),
    ("verify --model x --tokens 0K", "argument --tokens: got 0K, which must be a whole number from 32 on"),
    ("bench --heads 6 --kv-heads 4", "--heads 6 must be a multiple of --kv-heads 4"),
    ("bench --window 0", "argument --window: got 0"),
    ("bench --document -1", "argument --document: got -1"),
    ("bench --ring 0", "argument --ring: got 0"),
    ("bench --rings 2 0", "argument --rings: got 0"),
    ("bench --rounds 0", "argument --rounds: got 0"),
    ("bench --kernel flash3", "argument --kernel: invalid choice: 'flash3'"),
    ("bench --device banana", "argument --device: got banana"),
    ("plan --model x --gpus 2 --tokens 8K --overwrite", "--overwrite needs --write FOLDER"),
    ("bench --errors --window 5", "--errors is for one causal document: leave out --window and --document"),
    ("bench --against ulysses", "--against"),
]


@pytest.mark.parametrize(("line", "words"), BAD_ARGUMENTS, ids=[line for line, _ in BAD_ARGUMENTS])
def test_bad_arguments_are_refused_before_anything_runs(
    line: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """doctor approved of no heads at all, and bench measured groups of -1 heads: 3406 % of one device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("hf_ring_attn.bench.speed.measure", lambda *_, **__: pytest.fail("it runs"))
    monkeypatch.setattr("hf_ring_attn.bench.errors.run", lambda *_, **__: pytest.fail("it runs"))
    try:
        code: object = cli.main(line.split())
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("line", ["doctor --device cpu", "bench --tokens 64 --device cpu"])
def test_a_refusal_of_the_package_is_words_and_no_traceback(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_RING_ATTN_KERNEL", "flash3")
    assert cli.main(line.split()) == 2
    assert "HF_RING_ATTN_KERNEL='flash3' is not possible" in capsys.readouterr().err


@pytest.mark.turns
def test_without_a_command_it_prints_the_help() -> None:
    run = subprocess.run([sys.executable, "-m", "hf_ring_attn"], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "error" not in run.stderr
    assert "usage: hf-ring-attn" in run.stderr and "show installed packages and GPUs" in run.stderr
