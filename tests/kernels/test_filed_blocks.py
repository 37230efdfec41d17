"""The block sizes of Ampere and Ada are the fastest that were measured."""

from __future__ import annotations

import pytest

from docs_tools import numbers
from hf_ring_attn.kernels.triton.blocks import TABLE, WITH_BIAS, Row

AMPERE_AND_ADA = [key for key in TABLE if key[0] in numbers.LIKE]


@pytest.mark.parametrize("key", AMPERE_AND_ADA, ids=str)
def test_shipped_blocks_are_the_fastest_filed(key: tuple[str, int, int]) -> None:
    _is_fastest(TABLE[key], numbers.block_times(*key))


@pytest.mark.parametrize("key", [key for key in WITH_BIAS if key[0] in numbers.LIKE], ids=str)
def test_shipped_blocks_for_a_bias_are_the_fastest_filed(key: tuple[str, int, int]) -> None:
    _is_fastest(WITH_BIAS[key], numbers.block_times(*key, bias=True))


def _is_fastest(row: Row, times: dict[str, dict[tuple[int, ...], float]]) -> None:
    keys = {"dk and dv": row.keys} if row.values is None else {"dk": row.keys, "dv": row.values}
    for what, blocks in {"forward": row.forward, "dq": row.queries, **keys}.items():
        if what in times:  # for Ada's heads 512 wide the forward alone was measured
            assert times[what][tuple(blocks)] == min(times[what].values()), (what, blocks)
    assert "forward" in times
