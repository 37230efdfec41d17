"""Where a result comes from: command, date, commit, hardware and versions, as the head of its file."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "accelerate", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "ring-flash-attn")


def facts() -> dict[str, Any]:
    folder = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=folder)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or None,
        "hardware": f"{len(gpus)} x {gpus[0]}" if gpus else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
