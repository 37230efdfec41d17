"""Ranks that a command starts: if one fails, its own words appear, since rank 0 knows only that it lost a rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_ring_attn import command_ranks
from tests.helpers.patience import patient

LOST = 'echo "PeerLost: its traceback is the cause to look at" >&2; exit 2'
RAISES = f"""exec {sys.executable} -c 'for n in range(99): print(n, file=__import__("sys").stderr)
raise ValueError("no room")'"""


def start(place: Path, monkeypatch: pytest.MonkeyPatch, ranks: dict[int, str]) -> int:
    """Starts ranks that each run a line of shell."""
    python = place / "python"
    cases = "".join(f"{rank}) {line};;\n" for rank, line in ranks.items())
    python.write_text(f"#!/bin/sh\ncase $RANK in\n{cases}esac\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return command_ranks.start_ranks(len(ranks), ["verify"])


def test_the_cause_of_a_failed_rank_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It went to /dev/null, and rank 0 said that the cause is to be found there."""
    assert start(tmp_path, monkeypatch, {0: f"sleep 0.5; {LOST}", 1: f"sleep 0.5; {LOST}", 2: RAISES}) == 2
    lines = capfd.readouterr().err.splitlines()
    assert "PeerLost" in lines[0] and lines[-1] == "rank 2: ValueError: no room"
    assert len(lines) == 1 + command_ranks.LAST_LINES and all(line.startswith("rank 2: ") for line in lines[1:])


SAID = {
    "one traceback, not all ranks'": ({0: LOST, 1: RAISES, 2: RAISES}, {"rank 1"}),
    "a rank that a signal ended": ({0: LOST, 1: "echo 'out of memory' >&2; kill -9 $$"}, {"rank 1"}),
    "ranks that come to the same verdict as rank 0": ({0: "exit 1", 1: "echo a warning >&2; exit 1"}, set()),
    "rank 0's own error": ({0: "exit 1", 1: LOST}, set()),
    "no error": ({0: "exit 0", 1: "echo a warning >&2"}, set()),
}


@pytest.mark.parametrize(("ranks", "whose"), SAID.values(), ids=list(SAID))
def test_only_what_rank_0_cannot_know_is_said(
    ranks: dict[int, str], whose: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    start(tmp_path, monkeypatch, ranks)
    lines = capfd.readouterr().err.splitlines()
    assert {line.partition(": ")[0] for line in lines if line.startswith("rank ")} == whose, lines


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ran_out_of_memory_is_said(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 said "exit code -9", and rank 0 nothing."""
    monkeypatch.setattr(command_ranks, "GRACE_SECONDS", 0.2)
    start(tmp_path, monkeypatch, {rank: "kill -9 $$", 1 - rank: "exec sleep 60"})
    assert capfd.readouterr().err == f"rank {rank}: ended by signal 9: the host's memory was probably full\n"


def test_a_rank_that_hangs_after_its_traceback_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """gloo may hang at the end of a program that failed; torch prefixes its tracebacks."""
    monkeypatch.setattr(command_ranks, "GRACE_SECONDS", 0.2)
    hangs = "echo '[rank1]: Traceback (most recent call last):' >&2; echo '[rank1]: no room' >&2; exec sleep 60"
    assert start(tmp_path, monkeypatch, {0: f"sleep 1; {LOST}", 1: hangs}) == 2
    assert capfd.readouterr().err.splitlines()[1:] == ["rank 1: Traceback (most recent call last):", "rank 1: no room"]


def test_words_without_a_traceback_are_said_if_rank_0_waits_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_ranks, "GRACE_SECONDS", 0.2)
    assert start(tmp_path, monkeypatch, {0: "exec sleep 60", 1: "echo no room >&2; exit 2"}) < 0
    assert capfd.readouterr().err == "rank 1: no room\n"


FAILS = """
import sys, time, torch
from hf_ring_attn.command_ranks import world
from hf_ring_attn.errors import BadOption
with world("cpu") as (ring, _):
    ring.gather(torch.ones(3)).wait()
    if ring.rank == 0:
        time.sleep(1000)
    sent = ring.gather(torch.ones(3))  # for which the other rank never comes
    print("measured")
    raise {error}
"""


@pytest.mark.turns
@pytest.mark.parametrize(
    ("error", "code", "last"),
    [("ValueError('no room')", 1, "[rank1]: ValueError: no room"), ("BadOption('x', 1, 'a y')", 2, "x=1 is not")],
    ids=["an error", "a refusal"],
)
def test_a_rank_that_fails_ends_at_once(error: str, code: int, last: str) -> None:
    """It waited at its exit for messages, until it was killed after 30 s: gloo's threads end with what they sent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command, wire = [sys.executable, "-c", FAILS.format(error=error)], subprocess.PIPE
    places = [{**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    both = [subprocess.Popen(command, stdout=wire, stderr=wire, text=True, env=place) for place in places]
    try:
        out, errors = both[1].communicate(timeout=patient(60))
    finally:
        for rank in both:
            rank.kill()
            rank.communicate()
    assert both[1].returncode == code and out == "measured\n"
    assert errors.splitlines()[-1].startswith(last), errors
    assert ("Traceback" in errors) == (code == 1)


def test_a_signal_while_a_rank_starts_comes_once_it_is_known() -> None:
    """The rank ran on: the command did not know of it yet."""
    known = []

    def start() -> None:
        with command_ranks._sigterm_exits() as sigterm:
            with sigterm.later():
                os.kill(os.getpid(), signal.SIGTERM)
                known.append("a rank")
            known.append("nothing")

    with pytest.raises(SystemExit) as ended:
        start()
    assert (ended.value.code, known) == (128 + signal.SIGTERM, ["a rank"])


def test_ranks_end_with_a_command_that_gets_sigterm(tmp_path: Path) -> None:
    """SLURM and `timeout` send it: ranks ran on, on their GPUs."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/$RANK.part\nmv {tmp_path}/$RANK.part {tmp_path}/$RANK\n"
                      "exec sleep 600\n")  # fmt: skip
    python.chmod(0o755)
    program = (
        f"import sys; from hf_ring_attn import command_ranks; sys.executable = {str(python)!r}; "
        "command_ranks.start_ranks(2, ['verify'])"
    )
    files = [tmp_path / str(rank) for rank in range(2)]
    with subprocess.Popen([sys.executable, "-c", program]) as command:
        end = time.monotonic() + patient(60)
        while not all(file.exists() for file in files) and time.monotonic() < end:
            time.sleep(0.05)
        ranks = [int(file.read_text()) for file in files]
        command.terminate()
        assert command.wait(patient(30)) == 128 + signal.SIGTERM
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)
