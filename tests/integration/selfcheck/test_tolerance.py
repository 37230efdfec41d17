"""The tolerance of the self-check, by what programs set for products in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_ring_attn.integration.selfcheck.tolerance import EXACT, tolerance

GPU, EPS = torch.device("cuda"), torch.finfo(torch.float32).eps


def by_backend() -> None:
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]  # as transformers does for tf32=True


@pytest.mark.parametrize("set_tf32", [by_backend, lambda: torch.set_float32_matmul_precision("high")])
def test_tf32_counts_however_it_was_set(set_tf32: Callable[[], None]) -> None:
    """The getter of the older option raises after the newer one was set: the self-check ended with its error."""
    assert tolerance(EPS, GPU) == EXACT
    try:
        set_tf32()
        assert EXACT < tolerance(EPS, GPU) < 0.01 and tolerance(EPS, torch.device("cpu")) == EXACT
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision = "none"
