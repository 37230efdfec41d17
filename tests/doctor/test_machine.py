"""The machine's lines, on a torch that sees other GPUs than this one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_ring_attn.doctor import machine

OF_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets up so many GPUs, and the pairs that cannot read each other's memory."""

    def make(count: int, apart: tuple[tuple[int, int], ...] = ()) -> None:
        driver = tmp_path / "version"
        driver.write_text(OF_MODULE)
        properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 * 2**30)
        monkeypatch.setattr(machine, "DRIVER", driver)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in apart)

    return make


LIBRARIES = "CUDA 13.0 in torch, driver 570.86.15 (CUDA 12.8 at most), NCCL 2.29.7"
H200 = "NVIDIA H200, compute capability 9.0, 140 GiB"


def test_libraries_gpus_and_peer_access(gpus: Any) -> None:
    gpus(2)
    assert list(machine.lines()) == [
        LIBRARIES, f"cuda:0 {H200}", f"cuda:1 {H200}", "peer access: between all GPUs",
    ]  # fmt: skip


def test_pairs_without_peer_access_are_named(gpus: Any) -> None:
    gpus(3, apart=((0, 2), (2, 1)))  # one direction is enough
    assert list(machine.lines())[-1] == "peer access: not between 0-2, 1-2"
    gpus(2, apart=((1, 0),))
    assert list(machine.lines())[-1] == "peer access: none"
    gpus(1)
    assert list(machine.lines()) == [LIBRARIES, f"cuda:0 {H200}"]


def test_a_driver_too_old_for_torch_shows(gpus: Any) -> None:
    gpus(0)
    assert list(machine.lines()) == [LIBRARIES, "no GPU that torch can use"]


def test_a_torch_without_cuda_says_so(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert list(machine.lines()) == ["no GPU that torch can use: torch is built without CUDA"]
