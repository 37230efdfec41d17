"""``doctor --ranks``: a live ring beside one process, on CPU ranks; its verdict and its exit code."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_ring_attn import cli, command_ranks
from hf_ring_attn.doctor import command, live
from tests.helpers.programs import start

PROGRAM = """
from pathlib import Path
from hf_ring_attn.cli import main
line = "doctor --device cpu --dtype float32 --heads 4 --kv-heads 2 --head-dim 8 --softcap --sinks --ranks 2"
Path("code.txt").write_text(str(main(line.split())))
"""
ALONE = "doctor --device cpu --dtype float64 --heads 4 --kv-heads 2 --head-dim 8 --value-dim 6 --holes --ranks 1"


def test_two_ranks_agree_with_one_process(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    text = start(tmp_path, script, ranks=2).output()
    first, *ways, last = text.splitlines()
    assert first == "live check: 2 ranks on cpu (gloo), float32, against float64:"
    assert [line.split()[0] for line in ways] == ["messages,", "messages,"]
    assert all(line.endswith("  ok") and "dv " in line for line in ways)
    assert last == "live check: passed"
    assert (tmp_path / "code.txt").read_text() == "0"


@pytest.mark.parametrize("defect", ["none", "out", "dk", "error"])
def test_a_wrong_ring_gives_exit_code_1(
    defect: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend: Any = vars(live)["ring_attention"]

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        if defect == "error":
            raise RuntimeError("NCCL WARN Cuda failure 'peer access is not supported'")
        if defect == "dk":
            k = k + 1e-6 * (k - k.detach())
        out: torch.Tensor = attend(q, k, v, **options)
        return out * (1 + 1e-6) if defect == "out" else out

    monkeypatch.setattr(live, "ring_attention", wrong)
    assert cli.main(ALONE.split()) == (0 if defect == "none" else 1)
    text = capsys.readouterr().out
    assert '"auto" takes reference\n\nlive check: 1 ranks on cpu (gloo), float64' in text
    assert text.endswith(f"live check: {'passed' if defect == 'none' else 'FAILED'}\n")
    assert text.count("DIFFERS") == (2 if defect in ("out", "dk") else 0)
    assert ("FAILED: RuntimeError: NCCL WARN" in text) == (defect == "error")


def test_ranks_on_one_gpu_have_p2p_copies_only() -> None:
    of = torch.device
    assert {traffic for traffic, _ in live.ways(of("cuda"), True)} == {"pulls"}
    assert {traffic for traffic, _ in live.ways(of("cuda"), False)} == {"messages", "pulls"}
    assert {traffic for traffic, _ in live.ways(of("cpu"), False)} == {"messages"}


def test_a_rank_gets_the_same_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[Any] = []

    def start(*what: Any) -> int:
        started.append(what)
        return -9

    monkeypatch.setattr(command, "start_ranks", start)
    line = "doctor --heads 8 --kv-heads 4 --head-dim 16 --value-dim 8 --device cpu --dtype float32 --ranks 3"
    assert cli.main([*line.split(), "--sinks", "--holes"]) == 1
    assert started == [(3, [*line.split(), "--sinks", "--holes"], command.LIVE_SECONDS)]
    assert "live check: FAILED: a rank was ended" in capsys.readouterr().out


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose transport hangs would wait for the backend's time-out: ten minutes by NCCL."""
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hangs))
    began = time.monotonic()
    assert command_ranks.start_ranks(2, ["doctor"], seconds=0.2) < 0
    assert time.monotonic() - began < 20
    assert "LOCAL_RANK" not in os.environ
