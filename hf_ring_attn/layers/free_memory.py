"""Host memory that can still be had: of the machine, and of the control groups that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

VERSION_2 = "memory.max", "memory.current", "inactive_file"
VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""A control group's files of its limit and of its use, and the line of memory.stat that counts what it only caches."""


def free_bytes(root: str = "") -> int | None:
    """Bytes that this machine, and each control group (of a container, of a job), can still give; None: unknown.

    Args:
        root: the folder in which /proc and /sys are.
    """
    machine = _table(f"{root}/proc/meminfo").get("MemAvailable:")
    found = [] if machine is None else [machine * 1024]
    for folder, (limit, used, cached) in _control_groups(root):
        numbers = ["".join(_lines(f"{folder}/{name}")).strip() for name in (limit, used)]
        if all(number.isdigit() for number in numbers):  # a limit is "max" where there is none
            most, now = map(int, numbers)
            found.append(most - now + _table(f"{folder}/memory.stat").get(cached, 0))
    return min(found, default=None)


def _control_groups(root: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yields the folders of this process's groups and of those around them, which limit it, too, and their files."""
    for line in _lines(f"{root}/proc/self/cgroup"):
        _, controllers, path = line.rstrip("\n").split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, files = ("/memory", VERSION_1) if controllers else ("", VERSION_2)
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield f"{root}/sys/fs/cgroup{mounted}{group}", files


def _table(file: str) -> dict[str, int]:
    """The numbers of a file of lines "name number ..."."""
    return {words[0]: int(words[1]) for line in _lines(file) if len(words := line.split()) > 1 and words[1].isdigit()}


def _lines(file: str) -> list[str]:
    try:
        with open(file) as lines:
            return lines.readlines()
    except OSError:
        return []
