"""The commands for the terminal."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest
import torch

from hf_ring_attn import cli, kernels
from hf_ring_attn.kernels import Request
from hf_ring_attn.kernels.reference import Reference


def test_the_doctor_tells_every_kernel_with_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cpu", "--dtype", "float64", "--head-dim", "64", "--value-dim", "48"]) == 0
    text = capsys.readouterr().out
    assert f"\n  torch          {torch.__version__}" in text
    assert "tested with 5.17 to 5.23" in text
    assert "kernels for 32 heads over 8, 64/48 wide, float64 on cpu:\n" in text
    assert "  flash4     no: needs an NVIDIA GPU, got tensors on cpu\n" in text
    assert "computes in bfloat16 or float16, got torch.float64\n" in text
    assert "  triton     no: " in text
    assert "  flash2     no: needs an NVIDIA GPU, got tensors on cpu\n" in text
    assert "  flex       no: needs a GPU, got tensors on cpu\n" in text
    assert "keys and values must be of one width, got 64 and 48\n" in text
    assert "  reference  yes: float32 sums\n" in text and text.endswith('"auto" takes reference\n')


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
    monkeypatch.setattr("hf_ring_attn.doctor.KERNELS", {"unable": Unable()})
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
    monkeypatch.setattr("hf_ring_attn.doctor.KERNELS", table)
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


def test_without_a_command_it_says_which_there_are() -> None:
    run = subprocess.run([sys.executable, "-m", "hf_ring_attn"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "usage: hf-ring-attn" in run.stderr and "doctor" in run.stderr
