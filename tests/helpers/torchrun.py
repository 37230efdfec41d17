"""Several torchrun agents on this machine, as several nodes would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.patience import patient
from tests.helpers.programs import REPOSITORY

SECONDS = 110


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_taken(port: int) -> bool:
    """Returns True if a program listens at the port."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def on_nodes(count: int, folder: Path, command: Sequence[str]) -> list[tuple[int, str]]:
    """Runs a command of torchrun in a folder, with one rank a node; returns each node's exit code and output."""
    launch = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", *command,
    ]  # fmt: skip
    told = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **told, "PYTHONPATH": str(REPOSITORY)}
    nodes = [
        subprocess.Popen(
            launch, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(count)
    ]
    try:
        said = [node.communicate(timeout=patient(SECONDS))[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
    return [(node.returncode, text) for node, text in zip(nodes, said, strict=True)]
