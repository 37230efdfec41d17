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
COMMON, TIGHT = (2, 128), 86
"""The row of most models, and a GPU with little shared memory."""
CASES = [(row, capability) for row in ROWS for capability in SHARED_MEMORY]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("row", "capability"),
    [pytest.param(*case, marks=[pytest.mark.full] * (case != (COMMON, TIGHT))) for case in CASES],
)
def test_machine_code_for_every_capability_fits(row: tuple[int, int], capability: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.triton_targets", f"{row[0]}x{row[1]}", str(capability)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=patient(120),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert found["capability"] == capability and found["bytes"].keys() == KERNELS
    assert max(found["bytes"].values()) <= SHARED_MEMORY[capability] * 1024, found
    assert set(found["times"].values()) == {1}, "a kernel was compiled again for rows of another length"
