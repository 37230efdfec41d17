"""multi-node's run.sh on two nodes, both on this machine: replicas of rings have the losses of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.patience import patient
from tests.helpers.programs import start
from tests.helpers.torchrun import free_port, is_taken
from tests.recipes.programs_of_recipes import RECIPES

LOSS, NORM = 1e-5, 1e-4
"""Relative bounds: the order of float32 sums differs."""


@pytest.mark.slow
@pytest.mark.turns
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_nodes_train_as_one_process(rendezvous: str, tmp_path: Path) -> None:
    """Each node makes a toy of its own: with c10d either one may have the first rank."""
    port = free_port()
    told = {
        "NODES": "2", "GPUS": "2", "HEAD": "127.0.0.1", "PORT": str(port), "RDZV": rendezvous, "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    nodes, end = [], time.monotonic() + patient(110)
    try:
        for rank in range(2):
            command = ["bash", str(RECIPES / "multi-node/run.sh"), "--toy", str(tmp_path / str(rank))]
            with (tmp_path / f"told{rank}").open("w") as told_by:
                environment = {**os.environ, **told, "NODE_RANK": str(rank)}
                nodes.append(subprocess.Popen(command, env=environment, stdout=told_by, stderr=subprocess.STDOUT))
            while not is_taken(port) and nodes[0].poll() is None and time.monotonic() < end:
                time.sleep(0.1)  # accelerate refuses to start the first node's launcher on the port of another
        codes = [node.wait(max(0.0, end - time.monotonic())) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
    text = "".join((tmp_path / f"told{rank}").read_text() for rank in range(2))
    assert codes == [0, 0], text
    assert text.count("ring of 2: ") == 1 and text.count("step 3 of 3: loss") == 1, text

    (alone := tmp_path / "alone").mkdir()
    config, batch = str(RECIPES / "multi-node/config.yaml"), "training.per_device_train_batch_size=2"
    changes = [word for change in ("attention=sdpa", "ring={}", batch) for word in ("--set", change)]
    start(alone, RECIPES / "train.py", config, "--toy", "toy", *changes).output()
    (saved,) = (path for rank in range(2) if (path := tmp_path / f"{rank}/output/recipe.json").exists())
    want = json.loads((alone / "toy/output/recipe.json").read_text())["steps"]
    got = json.loads(saved.read_text())["steps"]
    assert len(want) == 3 and want[2]["loss"] != pytest.approx(want[0]["loss"], rel=1e-3)
    for name, bound in (("loss", LOSS), ("grad_norm", NORM)):
        assert [step[name] for step in got] == pytest.approx([step[name] for step in want], rel=bound), text
