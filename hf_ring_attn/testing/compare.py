"""Distances between two tensors, computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import BadShape


def relative_error(got: Tensor, want: Tensor) -> float:
    """norm(got - want) / norm(want), over all elements.

    Infinite elements must be the same in both and are left out of the norms; where they are not, or with a nan on
    either side, the error is inf. Where ``want`` is zero throughout, the error is norm(got), an absolute one.

    Raises:
        BadShape: if the shapes differ.
    """
    got, want = _pair(got, want)
    infinite = got.isinf() | want.isinf()
    if got.isnan().any() or want.isnan().any() or not torch.equal(got[infinite], want[infinite]):
        return torch.inf
    got, want = got[~infinite], want[~infinite]
    return float((got - want).norm() / (want.norm() or 1.0))


def mismatch(got: Tensor, want: Tensor) -> float:
    """The share (0 to 1) of elements with abs(got - want) > 1e-5 + 1.3e-6 * abs(want); nan is always one of them.

    The measure is that of TransformerEngine's pull request 821, with torch.testing's bounds for float32.

    Raises:
        BadShape: if the shapes differ.
    """
    got, want = _pair(got, want)
    if not got.numel():
        return 0.0
    return float((~torch.isclose(got, want, rtol=1.3e-6, atol=1e-5)).double().mean())


def _pair(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    if got.shape != want.shape:
        raise BadShape("got", tuple(got.shape), f"what it is compared with has shape {tuple(want.shape)}")
    if got.device != want.device or got.device.type != "cuda":  # other accelerators may lack float64
        got, want = got.cpu(), want.cpu()
    return got.detach().double(), want.detach().double()
