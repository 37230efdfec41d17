"""The ranks of a command: those of a launcher, those that it starts, or this process alone."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, NoReturn

import torch
import torch.distributed as dist

from .comm.ring import Ring
from .config import is_a_launched_rank, ranks_of_machine
from .errors import RingAttentionError

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable that lets ranks on one GPU read each other's memory."""

GRACE_SECONDS = 30.0
"""How long the other ranks may run on after one ended in an error: they end in the same one."""

LAST_LINES = 40
"""How many lines of a failed rank's errors are printed."""


def ranks_per_gpu() -> int:
    """The number of ranks per GPU of this machine if it has fewer GPUs than ranks; else 1."""
    ranks = ranks_of_machine()
    return -(-ranks // max(1, torch.cuda.device_count()))


@contextmanager
def world(device: str | None, may_share: bool = False) -> Iterator[tuple[Ring, torch.device]]:
    """Yields the ring of all launched ranks, or of this process alone, and this rank's device.

    Args:
        device: "cuda" or "cpu"; None: a GPU if there is one.
        may_share: allow several ranks per GPU. P2P copies work there, but slower. NCCL refuses such ranks, and gloo,
            which serves the collectives, has no send/recv between GPUs: P2P copies are the only transport.

    An error inside ends a launched rank at once, with its words: exit code 2 for one of this package, else 1.

    Raises:
        SystemExit: ranks would share a GPU and may not.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not is_a_launched_rank():
        yield Ring.of(None), torch.device(kind)
        return
    mine, shared = torch.device(kind), kind == "cuda" and ranks_per_gpu() > 1
    if shared and not may_share:
        raise SystemExit("the speed of ranks that share a GPU is meaningless: start one rank per GPU")
    if kind == "cuda":
        mine = torch.device(kind, dist.get_node_local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(mine)
    if shared:
        os.environ[OVERLAP] = "1"
    nccl = kind == "cuda" and not shared
    dist.init_process_group("nccl" if nccl else "gloo", device_id=mine if nccl else None)
    try:
        yield Ring.of(None), mine
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must see this one end
        _end_process(error)
    finally:
        dist.destroy_process_group()


def _end_process(error: Exception) -> NoReturn:
    """Prints an error and ends this process, without its exit: gloo would wait for messages that nobody sends."""
    if isinstance(error, RingAttentionError):
        sys.stderr.write(f"{error}\n")
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if isinstance(error, RingAttentionError) else 1)


def start_ranks(count: int, arguments: Sequence[str], seconds: float = math.inf) -> int:
    """Runs ``python -m hf_ring_attn ARGUMENTS`` as ``count`` ranks on this machine; returns the first exit code but 0.

    Only rank 0 prints, and at the end a rank that failed (`_cause`). If one rank ends in an error, or after so many
    seconds, the others are ended; the exit code of a rank that was ended is negative.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as files, _sigterm_exits() as sigterm:
        errors = {rank: files.enter_context(tempfile.TemporaryFile()) for rank in range(1, count)}
        try:
            for rank in range(count):
                own = {key: str(x) for key, x in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
                command = [sys.executable, "-m", "hf_ring_attn", *arguments]
                stdout = None if rank == 0 else subprocess.DEVNULL
                with sigterm.later():
                    ranks.append(
                        subprocess.Popen(command, env={**os.environ, **own}, stdout=stdout, stderr=errors.get(rank))
                    )
            end = time.monotonic() + seconds
            while any(one.poll() is None for one in ranks) and not any(one.poll() for one in ranks):
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
            deadline = min(end, time.monotonic() + GRACE_SECONDS)
            while any(one.poll() is None for one in ranks) and time.monotonic() < deadline:
                time.sleep(0.05)
            ended = [one.poll() for one in ranks]
        finally:
            for one in ranks:
                if one.poll() is None:
                    one.kill()
            codes = [one.wait() for one in ranks]
        sys.stderr.write(_cause(ended, errors) + _signals(ended))
        sys.stderr.flush()
    return next((code for code in codes if code), 0)


class _Sigterm:
    """Ends this process through its `finally` clauses, but not while it starts a rank, of which nobody would know."""

    def __init__(self) -> None:
        self._waits = self._came = False

    def __call__(self, *_given: object) -> None:
        self._came = True
        if not self._waits:
            sys.exit(128 + signal.SIGTERM)

    @contextmanager
    def later(self) -> Iterator[None]:
        """Ends the process at the end of what is inside, if the signal came meanwhile."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
        if self._came:
            self()


@contextmanager
def _sigterm_exits() -> Iterator[_Sigterm]:
    """Inside, SIGTERM ends this process through its `finally` clauses: else its ranks would run on, on their GPUs."""
    handler = _Sigterm()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield handler
        return
    signal.signal(signal.SIGTERM, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _cause(codes: Sequence[int | None], errors: Mapping[int, IO[bytes]]) -> str:
    """The last lines of the first rank that failed, or "" if rank 0 has said as much.

    Args:
        codes: exit codes by rank, None for a rank that had to be ended. errors: what the ranks but 0 wrote to stderr.
    """
    for rank, file in errors.items():
        code = codes[rank]
        if code == 0:
            continue
        file.seek(0)
        lines = [line.removeprefix(f"[rank{rank}]: ") for line in file.read().decode(errors="replace").splitlines()]
        # A refusal or a verdict has no traceback: rank 0 prints its own, unless it waits for the others.
        is_alone = code is not None and (code < 0 or codes[0] is None)
        if is_alone or any(line.startswith("Traceback (") for line in lines):
            return "".join(f"rank {rank}: {line}\n" for line in lines[-LAST_LINES:])
    return ""


def _signals(codes: Sequence[int | None]) -> str:
    """A line for each rank that a signal ended; the system sends SIGKILL if it runs out of memory."""
    hint = {-signal.SIGKILL: ": the host's memory was probably full"}
    return "".join(
        f"rank {rank}: ended by signal {-code}{hint.get(code, '')}\n"
        for rank, code in enumerate(codes)
        if code is not None and code < 0
    )
