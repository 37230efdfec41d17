"""The measures at their edges: zeros, infinities, nan, nothing at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_ring_attn.errors import BadShape
from hf_ring_attn.testing import mismatch, relative_error

NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([3.0, 4.0], [0.0, 0.0], 5.0),
        ([-INF, 4.0], [-INF, 5.0], 0.2),
        ([-INF, -INF], [-INF, -INF], 0.0),
        ([-INF, 4.0], [INF, 4.0], INF),
        ([-INF, 4.0], [3.0, 4.0], INF),
        ([3.0, 4.0], [-INF, 4.0], INF),
        ([NAN, 4.0], [3.0, 4.0], INF),
        ([NAN, 4.0], [NAN, 4.0], INF),
        ([], [], 0.0),
    ],
)
def test_relative_error(got: list[float], want: list[float], error: float) -> None:
    assert relative_error(torch.tensor(got), torch.tensor(want)) == pytest.approx(error)


@pytest.mark.parametrize(
    ("got", "want", "share"),
    [
        ([1.0, 1.0], [1.0, 1.0], 0.0),
        ([1.0, 1.0 + 1.2e-5], [1.0, 1.0], 0.5),
        ([1.0, 1.0 + 1.1e-5], [1.0, 1.0], 0.0),
        ([100.0, 100.0 + 1.3e-4], [100.0, 100.0], 0.0),
        ([0.0, 1.1e-5, 0.9e-5, 0.0], [0.0] * 4, 0.25),
        ([-INF, NAN, INF, 1.0], [-INF, NAN, -INF, INF], 0.75),
        ([], [], 0.0),
    ],
)
def test_mismatch(got: list[float], want: list[float], share: float) -> None:
    assert mismatch(torch.tensor(got).double(), torch.tensor(want).double()) == share


def test_measures_see_what_bfloat16_loses() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert 5e-4 < relative_error(x.bfloat16(), x) < 4e-3
    assert mismatch(x.bfloat16(), x) > 0.9


@pytest.mark.parametrize("measure", [relative_error, mismatch])
def test_measures_do_not_broadcast(measure: Callable[[Tensor, Tensor], float]) -> None:
    with pytest.raises(BadShape, match=r"got has shape \(2, 1\), but what it is compared with has shape \(2,\)"):
        measure(torch.zeros(2, 1), torch.zeros(2))
