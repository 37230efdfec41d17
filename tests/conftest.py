"""What all tests share: live ranks, one thread a process, and an end to a test that hangs."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ranks share the machine's cores, and sums keep one order

import faulthandler
import subprocess
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import pytest
import torch

from tests.helpers.live_ranks import LiveRanks
from tests.helpers.patience import patient

TEST_SECONDS, GPU_TEST_SECONDS = 240, 400
"""No test takes longer; on a GPU dozens of kernels may be compiled. Ranks that hang are reported before, by name, at
LiveRanks' own limit."""

ROOT = Path(__file__).parent.parent
HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None

_stderr = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the cases that are marked `full`, and all of `turns`")
    parser.addoption("--quick", action="store_true", help="no slow test, and one case of each table")
    parser.addoption("--qlora", action="store_true", help="only what is marked `qlora`, all of it, and none is skipped")
    parser.addoption(
        "--fuzz", type=int, default=500, help="how many random masks tests/sharding/test_mask_fuzz.py tries"
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(TURN, str(_turn_of_commit()))  # before xdist's workers start
    torch.set_num_threads(1)
    config.stash[_stderr] = os.dup(2)  # now, while it is not captured: what hangs must be seen
    if config.getoption("--qlora") and not HAS_BITSANDBYTES:
        raise pytest.UsageError("--qlora needs bitsandbytes; bash tests/run.sh --qlora installs it")


LONG = (
    "kernels/test_triton.py", "integration/attention/test_compiled_models.py", "integration/hosts/test_sft_trainer.py",
    "integration/context/test_shared_kv.py", "integration/hosts/test_trainer.py", "sweep/test_sweep.py",
    "integration/selfcheck/test_check.py", "integration/batch/test_plain_loop.py",
    "integration/model/test_recurrent.py", "commands/test_command_lines.py", "integration/model/test_vision.py",
    "integration/batch/test_balanced.py", "docs/test_blocks.py",
)  # fmt: skip
"""The files that take half a minute or more, with few tests or many. They start first: no process ends alone."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --qlora, leaves out files without its mark: importing all of them takes longer than these tests."""
    if not config.getoption("--qlora") or collection_path.suffix != ".py":
        return None
    return "mark.qlora" not in collection_path.read_text() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not str(item.path).endswith(LONG))
    with_bitsandbytes = [item for item in items if item.get_closest_marker("qlora") is not None]
    if config.getoption("--qlora"):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(with_bitsandbytes)])
        items[:] = with_bitsandbytes
        return
    if not HAS_BITSANDBYTES:
        for item in with_bitsandbytes:
            item.add_marker(pytest.mark.skip(reason="bitsandbytes is not installed"))
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full") is not None]
    left_out += _left_out_by_turns([item for item in items if item not in set(left_out)])
    if config.getoption("--quick"):
        left_out += _left_out_in_haste([item for item in items if item not in set(left_out)])
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


TURN, TURNS = "HF_RING_ATTN_TESTS_TURN", 16


def _turn_of_commit() -> int:
    """The part of the tables marked `turns` that this commit tries: the same one each time it is tested."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    return int(asked.stdout[:8] or "0", 16) % TURNS


def pytest_report_header(config: pytest.Config) -> str:
    tried = "all" if config.getoption("--full") else f"part {int(os.environ[TURN]) + 1} of {TURNS}"
    return f"tables marked `turns`: {tried} ({TURN}=0 to {TURNS - 1} chooses another part, --full all)"


def _left_out_by_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """The rows of tables marked `turns` that are another commit's."""
    tables: dict[str, list[str]] = {}
    parts: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("turns")
        if mark is not None:
            table = item.nodeid.partition("[")[0]
            tables.setdefault(table, []).append(item.nodeid)
            parts[table] = mark.args[0] if mark.args else TURNS
    mine: set[str] = set()
    for table, rows in tables.items():  # mixed, since neighbours in a table are alike
        step = parts[table]
        first = (int(os.environ[TURN]) + crc32(table.encode())) % step  # else tests of one row were all of one part
        mine.update(sorted(rows, key=lambda row: crc32(row.encode()))[first::step])
    return [item for item in items if item.get_closest_marker("turns") is not None and item.nodeid not in mine]


def _left_out_in_haste(items: list[pytest.Item]) -> list[pytest.Item]:
    """Slow tests, and all cases of a table but the first."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    return slow + [item for cases in tables.values() for item in cases[1:] if item not in slow]


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the whole run, with every thread's stack, when a test hangs: nothing softer ends a stuck collective."""
    seconds = TEST_SECONDS if item.get_closest_marker("gpu") is None else GPU_TEST_SECONDS
    faulthandler.dump_traceback_later(patient(seconds), exit=True, file=item.config.stash[_stderr])
    torch.manual_seed(0)  # the same numbers whatever ran before
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], LiveRanks]]:
    """``ranks(world_size)``: the live ranks of that world size, started when first run and shared by all tests."""
    worlds: dict[int, LiveRanks] = {}

    def of_size(world_size: int) -> LiveRanks:
        return worlds.setdefault(world_size, LiveRanks(world_size, timeout_seconds=patient(100)))

    yield of_size
    for world in worlds.values():
        world.close()
