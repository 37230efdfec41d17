"""Ranks that stay alive between tests: processes in a gloo world that run one function after another.

Measured on two cores: eight spawned ranks take 4 s to start, each because it imports torch; eight ranks forked from a
server that has imported it take 0.06 s and a fifth of the memory. So ranks come from multiprocessing's forkserver, each
world size has its own world, and ranks that failed are stopped and replaced.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from hf_ring_attn.errors import RingAttentionError
from tests.helpers.stacks import stack_of, write_on_signal

P = ParamSpec("P")
R = TypeVar("R")

PRELOAD = {
    **{name: name for name in ("pytest", "transformers.trainer", "accelerate", "peft", "trl.trainer.sft_trainer")},
    "torch._dynamo.testing": "torch._inductor.compile_fx",  # which the first graph imports, in 1.3 s
}
"""Slow imports: the fork server does them once for all ranks, if this process has imported the first of a pair."""
LAST = "tests.helpers.frozen_imports"

GRACE_SECONDS = 5.0
"""Time in which the other ranks may still answer once one has failed; they are probably waiting for it."""


MOST_GROUPS = 12
"""Most process groups that a run may leave behind; after more, new ranks are started (0.1 s). Gloo's threads wake up a
hundred times a second: with 85 groups in each of four ranks and 44 in four others, two cores spent half their time."""


class LiveRanks:
    """A world of processes on this machine, alive until they fail or are closed.

    Starting is lazy: the processes come with the first `run`. They end with this process, even if it is killed, and
    even if they hang. They see the environment as it was when this process first started ranks, and, being daemons,
    cannot start processes through multiprocessing themselves (a DataLoader in them has no workers).

    Args:
        world_size: number of ranks.
        timeout_seconds: how long one `run` may take, and every collective in it.
    """

    def __init__(self, world_size: int, *, timeout_seconds: float = 100.0) -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self._world: _World | None = None

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call ``function(*args, **kwargs)`` on every rank and return what each rank returned, in the ranks' order.

        On a rank, the default process group is the world of these ranks (gloo), torchrun's environment variables are
        set, torch has one thread, and its random generator is seeded anew at each run.

        Args:
            function: a function of a module that the ranks can import. It, its arguments and its results travel
                through pickle; the tensors of a result come back on the CPU, by value, without their graph.

        Raises:
            RanksFailed: if a rank raised, ended or did not answer in time, with each one's traceback. The ranks are
                stopped then, since messages may be under way between them; the next run starts new ones.
        """
        request = pickle.dumps((function, args, kwargs))
        if self._world is None:
            self._world = _World(self.world_size, self.timeout_seconds)
        try:
            answers = self._world.ask(request)
        except BaseException:  # a failed rank, or Ctrl-C in the middle of a run: their state is unknown
            self.close()
            raise
        if max(answer.groups for answer in answers) > MOST_GROUPS:
            self.close()
        return [pickle.loads(answer.result) for answer in answers]

    def close(self) -> None:
        """Stop the processes, if any are running. A later `run` starts new ones."""
        world, self._world = self._world, None
        if world is not None:
            world.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RanksFailed(RingAttentionError, RuntimeError):
    """A run on live ranks that failed on some of them.

    ``failures``: rank -> a traceback or an exit code, the first to fail first. ``silent``: rank -> the stack of a rank
    that did not answer in time, the innermost call first ("" if unknown).
    """

    def __init__(self, world_size: int, failures: dict[int, str], silent: dict[int, str], seconds: float) -> None:
        self.failures, self.silent = failures, silent
        lines = [f"{len(failures) + len(silent)} of {world_size} ranks failed, the first to fail first:"]
        lines += [f"rank {rank} {text.rstrip()}" for rank, text in failures.items()]
        for rank, stack in silent.items():
            where = f"; it was here:\n{stack.rstrip()}" if stack else "."
            lines.append(f"rank {rank} did not answer within {seconds:.1f} s and was stopped{where}")
        super().__init__("\n".join(lines) + "\nAll ranks of this world were stopped; the next run starts new ones.")


@dataclass(frozen=True)
class _Answer:
    """A rank's answer to a request: a pickled result, or the text of its error."""

    result: bytes = b""
    failure: str = ""
    groups: int = 0
    """Process groups that the rank has after the request."""


@dataclass(frozen=True)
class _Member:
    process: ForkServerProcess
    wire: Connection

    def receive(self) -> _Answer:
        try:
            return _Answer(*pickle.loads(self.wire.recv_bytes()))
        except (EOFError, OSError):  # the other end is gone
            self.process.join(GRACE_SECONDS)
            return _Answer(failure=f"ended with exit code {self.process.exitcode}, without an answer")


class _World:
    """The processes of one world, from their start to their end."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.folder = tempfile.TemporaryDirectory(prefix="live_ranks_")
        self.members: list[_Member] = []
        context = multiprocessing.get_context("forkserver")
        start_fork_server()
        for rank in range(size):
            mine, theirs = context.Pipe()
            what = (theirs, rank, size, self.folder.name, timeout_seconds)
            process = context.Process(target=_serve, args=what, name=f"rank {rank} of {size}", daemon=True)
            process.start()
            theirs.close()
            self.members.append(_Member(process, mine))

    def ask(self, request: bytes) -> list[_Answer]:
        """Every rank's answer, or `RanksFailed`."""
        for member in self.members:
            with suppress(OSError):  # it has ended, as `receive` will find
                member.wire.send_bytes(request)
        answers: dict[int, _Answer] = {}
        started = time.monotonic()
        deadline = started + self.timeout_seconds
        while len(answers) < len(self.members) and (left := deadline - time.monotonic()) > 0:
            waiting = {member.wire: rank for rank, member in enumerate(self.members) if rank not in answers}
            for wire in connection.wait(list(waiting), left):
                assert isinstance(wire, Connection)
                rank = waiting[wire]
                answers[rank] = self.members[rank].receive()
                if answers[rank].failure:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure}
        silent = [rank for rank in range(len(self.members)) if rank not in answers]
        if failures or silent:
            raise RanksFailed(len(self.members), failures, self._stacks(silent), time.monotonic() - started)
        return [answers[rank] for rank in range(len(self.members))]

    def _stacks(self, silent: list[int]) -> dict[int, str]:
        """The stack of each rank that does not answer, if it can be had."""
        return {rank: stack_of(self.members[rank].process.pid, self.folder.name) for rank in silent}

    def stop(self) -> None:
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.join()
            member.wire.close()
        self.folder.cleanup()


def start_fork_server() -> None:
    """Starts the fork server with the slow imports done, and without threads, which a fork would lose."""
    imports = [slow for imported, slow in PRELOAD.items() if imported in sys.modules]
    forkserver.set_forkserver_preload([__name__, "torch.distributed", *imports, LAST])
    only_for_it = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    before = {name: os.environ.get(name) for name in only_for_it}
    os.environ.update(only_for_it)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(wire: Connection, rank: int, world_size: int, folder: str, timeout_seconds: float) -> None:
    """The main loop of a rank: joins the world, then answers requests until the connection closes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    write_on_signal(folder)
    failure = _attempt(_join_world, rank, world_size, folder, timeout_seconds).failure
    while True:
        try:
            request = wire.recv_bytes()
        except EOFError:
            return
        answer = _Answer(failure=failure) if failure else _attempt(_call, request)
        wire.send_bytes(pickle.dumps((answer.result, answer.failure, _groups())))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # from a thread, and also out of a collective that will never end


def _join_world(rank: int, world_size: int, folder: str, timeout_seconds: float) -> bytes:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
    }  # fmt: skip
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name may lead nowhere
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return b""


def _groups() -> int:
    import torch.distributed as dist

    return len(dist.distributed_c10d._world.pg_map)


def _call(request: bytes) -> bytes:
    torch.manual_seed(0)
    function, args, kwargs = pickle.loads(request)
    buffer = io.BytesIO()
    _ByValue(buffer).dump(function(*args, **kwargs))
    return buffer.getvalue()


def _attempt(function: Callable[..., bytes], *args: Any) -> _Answer:
    try:
        return _Answer(result=function(*args))
    except BaseException:  # noqa: BLE001 - pytest.fail, sys.exit and Ctrl-C too: the caller gets the error, and decides
        return _Answer(failure="raised:\n" + traceback.format_exc())


class _ByValue(pickle.Pickler):
    """Pickles tensors by value: no shared memory, no device, no graph, and only the visible part of a storage."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
