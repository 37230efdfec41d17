"""Kernels where ranks hold other chunks than the zigzag's, dealt at random: the answer is that of one process."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from hf_ring_attn.bench import replay
from hf_ring_attn.bench.replay import Answer, Road
from hf_ring_attn.kernels import KERNELS, Params
from hf_ring_attn.sharding import plan
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.testing import Case, inputs
from tests.kernels import test_flash2, test_flash4
from tests.kernels.test_flash2 import assert_same
from tests.kernels.test_flash4 import EXPRESSIBLE, mask_of, whole

WAYS: list[tuple[int, int, Road]] = [(4, 3, "ring"), (2, 8, "gather"), (4, 4, "sparse")]
"""Ring size, chunks of a rank, and the road of keys and gradients."""
MORE: list[tuple[int, int, Road]] = [(2, 4, "ring"), (8, 2, "ring")]


def reference(case: Case, size: int, road: Road) -> tuple[Answer, Answer]:
    x = inputs(case, torch.float32)
    mask = mask_of(case, x["documents"])
    params = Params(case.head_dim**-0.5 if case.scale is None else case.scale, case.softcap, x["sinks"])
    tensors = x["q"], x["k"], x["v"], x["dout"]
    kernel = KERNELS["reference"]
    got, want = (replay.replay(kernel, *tensors, mask, n, params, torch.float32, road) for n in (size, 1))
    return got, want


def of_flash2(case: Case, size: int, road: Road) -> tuple[Answer, Answer]:
    return test_flash2.answers(case, size, road)[:2]


def of_flash4(case: Case, size: int, road: Road) -> tuple[Answer, Answer]:
    return test_flash4.answers(case, size, road)[:2]


ANSWERS: dict[str, Callable[[Case, int, Road], tuple[Answer, Answer]]] = {
    "reference": reference, "flash2": of_flash2, "flash4": of_flash4,
}  # fmt: skip


@pytest.mark.parametrize("kernel", ANSWERS)
@pytest.mark.parametrize(
    ("size", "chunks", "road"), [*WAYS, *(pytest.param(*way, marks=pytest.mark.full) for way in MORE)]
)
@pytest.mark.parametrize("case", EXPRESSIBLE, ids=lambda case: case.why)
def test_chunks_dealt_at_random(
    case: Case, size: int, chunks: int, road: Road, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = list(range(size)) * chunks
    random.Random(chunks).shuffle(owners)
    made: list[Layout] = []

    def layout(length: int, world_size: int, rank: int) -> Layout:
        made.append(Layout(length, world_size, rank, tuple(owners) if world_size == size else ()))
        return made[-1]

    monkeypatch.setattr(plan, "KEY_BLOCK", 12)  # cases are shorter than the real one
    monkeypatch.setattr(replay, "Layout", layout)
    monkeypatch.setattr(replay, "ranks_of", replay.ranks_of.__wrapped__)
    case = whole(case, size * chunks // 2)
    if case.length == 0:
        pytest.skip("nothing is left of it")
    got, want = ANSWERS[kernel](case, size, road)
    assert any(one.owners for one in made)
    assert_same(got, want)
