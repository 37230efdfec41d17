"""The block sizes of Ampere and Ada are the fastest that were measured."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from docs_tools import numbers
from hf_ring_attn.kernels.triton import blocks
from hf_ring_attn.kernels.triton.blocks import TABLE, WITH_BIAS, Row

AMPERE_AND_ADA = [key for key in TABLE if key[0] in numbers.LIKE]


@pytest.mark.parametrize("key", AMPERE_AND_ADA, ids=str)
def test_shipped_blocks_are_the_fastest_filed(key: tuple[str, int, int]) -> None:
    _is_fastest(TABLE[key], numbers.block_times(*key))


@pytest.mark.parametrize("key", [key for key in WITH_BIAS if key[0] in numbers.LIKE], ids=str)
def test_shipped_blocks_for_a_bias_are_the_fastest_filed(key: tuple[str, int, int]) -> None:
    _is_fastest(WITH_BIAS[key], numbers.block_times(*key, bias=True))


@pytest.mark.parametrize(("values", "width"), [(128, 192), (192, 256)])
def test_heads_192_wide_take_a_row_that_holds_their_values(values: int, width: int) -> None:
    """Values of 192 are padded to 256, and would not fit an A100 with the blocks for 128."""
    with mock.patch.object(blocks, "family_of", return_value="ampere"):
        assert blocks.row_for(torch.device("cuda"), 2, 192, values, descriptors=False) == TABLE["ampere", 2, width]


def _is_fastest(row: Row, times: dict[str, dict[tuple[int, ...], float]]) -> None:
    keys = {"dk and dv": row.keys} if row.values is None else {"dk": row.keys, "dv": row.values}
    for what, chosen in {"forward": row.forward, "dq": row.queries, **keys}.items():
        if what in times:  # for Ada's heads 512 wide the forward alone was measured
            assert times[what][tuple(chosen)] == min(times[what].values()), (what, chosen)
    assert "forward" in times
