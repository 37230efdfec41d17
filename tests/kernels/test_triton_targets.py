"""triton's kernels compile for GPUs that are not at hand, Ampere to Blackwell, and fit their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_ring_attn.kernels.triton.blocks import TABLE
from tests.helpers.patience import patient
from tests.helpers.triton_targets import KERNELS, SHARED_MEMORY

ROWS = sorted({(element_bytes, width) for _, element_bytes, width in TABLE})
COMMON = (2, 128)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.full] * (row != COMMON)) for row in ROWS])
def test_machine_code_for_every_capability_fits(row: tuple[int, int], tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.triton_targets", f"{row[0]}x{row[1]}"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=patient(240),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [one["capability"] for one in found] == [*SHARED_MEMORY]
    for one in found:
        assert one["bytes"].keys() == KERNELS
        assert max(one["bytes"].values()) <= SHARED_MEMORY[one["capability"]] * 1024, one
