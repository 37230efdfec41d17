"""Host memory that can still be had, in folders that stand for /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_ring_attn.layers.free_memory import free_bytes

MACHINE = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 800 kB\n"}
OF_VERSION_2 = {"memory.max": "max\n", "memory.current": "9000\n", "memory.stat": "anon 1\ninactive_file 7\n"}


def version_2(group: str, limit: int) -> dict[str, str]:
    return {
        f"sys/fs/cgroup{group}/{name}": text for name, text in (OF_VERSION_2 | {"memory.max": f"{limit}\n"}).items()
    }


def version_1(group: str, limit: int) -> dict[str, str]:
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": 9000, "memory.stat": "total_inactive_file 7"}
    return {f"sys/fs/cgroup/memory{group}/{name}": f"{text}\n" for name, text in files.items()}


JOB = "/system.slice/slurmstepd.scope/job_7"
CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "nothing is known": ({}, None),
    "no group": (MACHINE, 819200),
    "a container": (MACHINE | {"proc/self/cgroup": "0::/\n"} | version_2("", 10000), 1007),
    "a SLURM job's step": (MACHINE | {"proc/self/cgroup": f"0::{JOB}/step_0\n"} | version_2(JOB, 20000), 11007),
    "version 1": (MACHINE | {"proc/self/cgroup": "5:cpu:/\n4:memory:/a\n0::/\n"} | version_1("/a", 30000), 21007),
    "a container of version 1": (MACHINE | {"proc/self/cgroup": "4:memory:/docker/x\n"} | version_1("", 9100), 107),
    "no limit": (
        MACHINE | {"proc/self/cgroup": "0::/\n"} | {f"sys/fs/cgroup/{file}": x for file, x in OF_VERSION_2.items()},
        819200,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_least_that_a_machine_and_its_groups_can_give(tmp_path: Path, case: str) -> None:
    files, want = CASES[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_bytes(str(tmp_path)) == want


def test_here() -> None:
    found = free_bytes()
    assert found is None or found > 1 << 20
