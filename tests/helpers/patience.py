"""Limits of time that grow with the machine's load: a test is stopped because it hangs, not because others run."""

from __future__ import annotations

import os


def patient(seconds: float) -> float:
    """``seconds`` of an idle machine, times the number of processes that wait for each core."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
