"""Sums, means, last values and cumulative sums of a ring's rows against the same on one device, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_ring_attn import errors
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.layers import rows
from hf_ring_attn.sharding.layout import Layout
from tests.helpers.checks import EXACT, Ranks, distance, worst
from tests.helpers.row_ranks import CASES, in_a_ring, in_one_process

ALONE = (Ring.of(None), Layout(5, 1, 0))
LARGE = torch.tensor([[3, 2**60 + 1, -7, 2**60 + 1, 2**24 + 1], [0, 0, 0, 0, 2**31 + 5]])
SIGNED = torch.tensor([[1.0, 2.0, 3.0, 4.0, -0.0], [1.0, 2.0, 3.0, 4.0, 1e-45]])
SHORT = torch.tensor([[1e-3, 256.0, 1e-3, -256.0, 1e-3]])


@pytest.mark.turns
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_ring_gives_what_one_device_gives(ranks: Ranks, world_size: int) -> None:
    shares = ranks(world_size).run(in_a_ring, CASES)
    for case, *parts in zip(CASES, *shares, strict=True):
        for part in parts:
            found = distance(part, in_one_process(case))
            assert worst(found) < EXACT, (case.why, found)
            assert torch.equal(part["last"], in_one_process(case)["last"])
            assert torch.equal(part["counts"], in_one_process(case)["counts"])


def sums_and_last_values(rows_of_all: list[Tensor]) -> list[Tensor]:
    ring = Ring.of(None)
    layout = Layout(5, ring.size, ring.rank)
    return [
        f(layout.shard(layout.pad(x, 1), 1), ring, layout)
        for x in rows_of_all
        for f in (rows.sum_row, rows.last_of_row)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_large_integers_and_the_sign_of_zero_keep_every_bit(ranks: Ranks, world_size: int) -> None:
    for sums, last, _, signed in ranks(world_size).run(sums_and_last_values, [LARGE, SIGNED]):
        assert sums.tolist() == LARGE.sum(1).tolist()
        assert last.tolist() == LARGE[:, -1].tolist()
        assert torch.equal(signed.view(torch.int32), SIGNED[:, -1].view(torch.int32))


def cumulative_sums(x: Tensor) -> Tensor:
    ring = Ring.of(None)
    layout = Layout(x.shape[1], ring.size, ring.rank)
    return layout.merge(ring.gather(rows.cumsum_row(layout.shard(x, 1), ring, layout)).wait()[0])


@pytest.mark.parametrize("large", [1e9, float("inf")])
def test_a_large_number_is_in_no_cumulative_sum_before_it(ranks: Ranks, large: float) -> None:
    """Tokens of its chunk had lost the chunks before theirs (1 for 5), and beside infinity they were nan."""
    x = torch.ones(1, 16)
    x[0, 7] = large
    assert all(torch.equal(got, x.cumsum(1)) for got in ranks(2).run(cumulative_sums, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_have_the_dtype_of_the_input_and_round_once(dtype: torch.dtype) -> None:
    x = SHORT.to(dtype)
    for found in (rows.sum_row(x, *ALONE), rows.mean_row(x, *ALONE) * 5, rows.cumsum_row(x, *ALONE)[:, -1]):
        assert found.dtype == dtype
        assert abs(float(found) - 3e-3) < 1e-4  # summed in 16 bits it is 0.001


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
def test_counts_are_int64(dtype: torch.dtype) -> None:
    x = torch.ones(2, 5, dtype=dtype)
    assert torch.equal(rows.sum_row(x, *ALONE), torch.tensor([5, 5]))
    assert torch.equal(rows.cumsum_row(x, *ALONE)[0], torch.arange(1, 6))


def test_other_shapes_and_dtypes_are_refused() -> None:
    x, text = torch.ones(2, 5), r"x has shape \(2, 4\), but it must be \[B, 5, ...\]\."
    for reduced in (rows.sum_row, rows.mean_row, rows.last_of_row, rows.cumsum_row):
        with pytest.raises(errors.BadShape, match=text):
            reduced(x[:, :4], *ALONE)
        with pytest.raises(errors.BadShape, match=r"mask has shape \(2, 5, 1\), but it must be \(2, 5\), one entry"):
            reduced(x, *ALONE, x[..., None])
        with pytest.raises(errors.BadOption, match=r"x.dtype=torch.complex64 is not possible"):
            reduced(x.to(torch.complex64), *ALONE)
    with pytest.raises(errors.BadOption, match=r"x.dtype=torch.int64 is not possible"):
        rows.mean_row(x.long(), *ALONE)
    with pytest.raises(errors.BadShape, match="it must have a token at least"):
        rows.last_of_row(x[:, :0], ALONE[0], Layout(0, 1, 0))
