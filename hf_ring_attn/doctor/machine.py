"""The machine's GPUs, driver and libraries, as torch sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def lines() -> Iterator[str]:
    """Yields lines on CUDA, driver, NCCL, each GPU, and peer access between them."""
    count = torch.cuda.device_count()
    built = torch.version.cuda
    if built is None and torch.version.hip is None:
        yield "no GPU that torch can use: torch is built without CUDA"
        return
    found = [f"CUDA {built} in torch" if built else f"ROCm {torch.version.hip} in torch", _driver(), _nccl()]
    yield ", ".join(text for text in found if text)
    if not torch.cuda.is_available():
        yield "no GPU that torch can use"
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index} {properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    if count > 1:
        yield _peer_access(count)


def _driver() -> str:
    """The driver's version, and the newest CUDA that it serves; "" for ROCm."""
    newest = getattr(torch._C, "_cuda_getDriverVersion", None)
    if torch.version.cuda is None or newest is None:
        return ""
    text = DRIVER.read_text(errors="replace") if DRIVER.exists() else ""
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    serves = newest()
    up_to = f" (CUDA {serves // 1000}.{serves % 1000 // 10} at most)" if serves else ""
    return f"driver {version[0] if version else 'of unknown version'}{up_to}" if version or serves else "no driver"


def _nccl() -> str:
    try:
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # this torch has none
        return "no NCCL"


def _peer_access(count: int) -> str:
    """Names the pairs of GPUs that cannot read each other's memory, which transport "pulls" needs."""
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    without = [
        f"{a}-{b}"
        for a, b in pairs
        if not (torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a))
    ]
    if not without:
        return "peer access: between all GPUs"
    return f"peer access: not between {', '.join(without)}" if len(without) < len(pairs) else "peer access: none"
