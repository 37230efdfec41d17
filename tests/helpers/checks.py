"""How far the ring is from the oracle: the measurements that tests hold to a bound, and planted defects must break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hf_ring_attn.config import RingConfig
from hf_ring_attn.sharding.plan import SPARSE_SHARE
from hf_ring_attn.testing import Case, relative_error
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.oracle import gradient_oracle, oracle
from tests.helpers.rank_functions import Answer, accumulated, attentions, narrow_inputs, whole

Ranks = Callable[[int], LiveRanks]
Errors = dict[str, float]

EXACT = 1e-12
"""Bound of the relative error in float64."""

UNROUNDED = 2e-6
"""Bound of the relative error of float32 sums, from inputs of any dtype: the oracle is given the same ones."""


@cache
def exact_answer(case: Case) -> Answer:
    return oracle(case)


@cache
def narrow_answer(case: Case, dtype: torch.dtype) -> Answer:
    """The answer in float64 to the case's inputs as they are in ``dtype``."""
    return oracle(case, narrow_inputs(case, dtype))


def distance(got: Answer, want: Answer) -> Errors:
    """The relative error of every entry of ``want``."""
    return {name: relative_error(got[name], value) for name, value in want.items()}


def worst(errors: Errors) -> float:
    return max(errors.values())


def float64_errors(
    ranks: Ranks, world_size: int, case: Case, configs: Sequence[RingConfig], defect: str | None = None,
    share: float = SPARSE_SHARE,
) -> list[Errors]:  # fmt: skip
    """For each config, how far out, lse and gradients in float64 are from the oracle's, relatively."""
    answers = ranks(world_size).run(attentions, case, configs, defect, share)
    return [distance(whole(shares, case.length), exact_answer(case)) for shares in zip(*answers, strict=True)]


class Narrow(NamedTuple):
    """A case in a narrow dtype: the relative errors of all that is kept in float32 (lse, dsinks, and dq, dk, dv before
    they are rounded), the answer, and its dq, dk, dv before they were rounded."""

    errors: Errors
    answer: Answer
    unrounded: Answer


@cache
def narrow(
    ranks: Ranks, world_size: int, case: Case, dtype: torch.dtype, config: RingConfig, defect: str | None = None
) -> Narrow:
    """Measured against an oracle in float64 that is given the same rounded q, k, v, dout and out."""
    pairs = ranks(world_size).run(accumulated, case, dtype, config, defect)
    answer, unrounded = (whole(shares, case.length) for shares in zip(*pairs, strict=True))
    want = gradient_oracle(case, narrow_inputs(case, dtype), answer["out"]) | {"lse": narrow_answer(case, dtype)["lse"]}
    return Narrow(distance(answer | unrounded, want), answer, unrounded)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype and values, nan being nan and 0 being -0."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
