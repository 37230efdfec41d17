"""flex on a CPU: what becomes of a function as a graph, and which functions have none that serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.biases import Alibi
from hf_ring_attn.config import RingConfig
from hf_ring_attn.errors import UnsupportedAttention
from hf_ring_attn.kernels import Params, ScoreMod
from hf_ring_attn.kernels.flex import calls
from hf_ring_attn.kernels.flex.graph import Graph
from hf_ring_attn.kernels.flex.leaves import Copies, spread, sum_copies
from hf_ring_attn.kernels.score_mods.score_mod import Unfit
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from tests.helpers.rank_functions import qkv
from tests.kernels.flex_cases import on_cpu

CPU = torch.device("cpu")
HEADS = torch.linspace(-1, 1, 4, requires_grad=True)
PAIRS = torch.linspace(-1, 1, 32).view(4, 8).detach().requires_grad_()
IDS = torch.arange(8)
MASK = Mask.of(CAUSAL, 1, 300)


def graph_of(function: Callable[..., Any], softcap: float | None = None) -> Graph:
    return Graph.of(ScoreMod.of(function, CPU), torch.float32, 0.5, softcap)


def value(function: Callable[..., Any], *at: float) -> float:
    """By its graph, for a product, row, head, query and key."""
    mod = ScoreMod.of(function, CPU).with_values([HEADS], [True])
    found = Graph.of(mod, torch.float32, 0.5, None)
    mod = mod.with_values(mod.captured, [x.requires_grad for x in mod.captured])
    values = found.values(mod.values, CPU)
    leaves = [spread(x, leaf.copies, torch.float32) for leaf, x in zip(found.leaves, values, strict=True)]
    numbers = [torch.tensor(at[0]), *(torch.tensor(int(x), dtype=found.index) for x in at[1:])]
    return float(found.score(*numbers, torch.tensor(5), torch.tensor(6), *leaves).detach())


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda s, b, h, i, j: s + HEADS[h] * (i - j), 1.0 - 1 / 3 * 3),
        (lambda s, b, h, i, j: s * torch.sigmoid(HEADS)[h], 1.0 / (1 + 2.718281828 ** (1 / 3))),
        (lambda s, b, h, i, j: s + PAIRS[h][i], 1.0 + (-1 + 2 / 31 * 13)),
        (lambda s, b, h, i, j: s + PAIRS[:, 2][h], 1.0 + (-1 + 2 / 31 * 10)),
        (lambda s, b, h, i, j: s + PAIRS[h, 2], 1.0 + (-1 + 2 / 31 * 10)),
        (lambda s, b, h, i, j: s + PAIRS[h, IDS[i]] + PAIRS[h, IDS[j]], 1.0 + 2 * (-1 + 2 / 31 * 8) + 7 * 2 / 31),
        (lambda s, b, h, i, j: s + PAIRS.sum() + HEADS[0], 0.0),
        (lambda s, b, h, i, j: torch.where(i > j, s, torch.tensor(2.0) * s), 1.0),
    ],
    ids=["read", "computed before", "row of a table", "column", "fixed place", "twice", "whole tensors", "constant"],
)
def test_a_graph_gives_what_its_function_gives(function: Callable[..., Any], want: float) -> None:
    assert value(function, 2.0, 0, 1, 5, 2) == pytest.approx(want, abs=1e-5)


def test_each_reading_of_a_learned_tensor_has_a_leaf_of_its_own() -> None:
    found = graph_of(lambda s, b, h, i, j: s + PAIRS[h, i] + PAIRS[h, j] + IDS[i] * HEADS.detach()[h])
    assert sorted(leaf.copies is not None for leaf in found.leaves) == [False, False, True, True]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda s, b, h, i, j: s + PAIRS[h].sum(), "reads|vector|whole"),
        (lambda s, b, h, i, j: s + torch.dot(PAIRS[h], PAIRS[b]), "whole tensor|vector"),
        (lambda s, b, h, i, j: s + (HEADS * s).sum(), "whole tensor|vector"),
        (lambda s, b, h, i, j: HEADS.sum() * 2, "all scores one value"),
    ],
)
def test_what_makes_vectors_for_a_score_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(Unfit, match=f"the score_mod .*({reason})"):
        graph_of(function)


def test_positions_are_of_32_bits_unless_they_could_overflow() -> None:
    assert graph_of(lambda s, b, h, i, j: s - (i - j).abs() // 4).index == torch.int32
    assert graph_of(lambda s, b, h, i, j: s - i * 100003 % 7).index == torch.int64


def test_the_text_tells_functions_apart_and_values_not() -> None:
    def scaled(by: float, slopes: Tensor) -> str:
        return graph_of(lambda s, b, h, i, j: s * by + slopes[h]).text

    first = scaled(2.0, HEADS)
    assert first == scaled(2.0, (HEADS.detach() + 1).requires_grad_())
    other = torch.zeros(5, requires_grad=True)
    assert len({first, scaled(3.0, HEADS), scaled(2.0, HEADS.detach()), scaled(2.0, other)}) == 4
    assert graph_of(Alibi(4)).text != graph_of(Alibi(4), softcap=3.0).text


def test_a_table_over_the_row_may_grow() -> None:
    def by_length(length: int) -> str:
        ids = torch.arange(length)
        return graph_of(lambda s, b, h, i, j: s + HEADS[ids[i] % 4]).text

    assert by_length(10) == by_length(11)


def test_copies_take_no_memory_and_their_gradients_are_summed() -> None:
    x = torch.randn(3, 5)
    copies = Copies.of(x.numel())
    assert copies == Copies(128, 64) and Copies.of(2**30) == Copies(1, 1) and Copies.of(2**22) == Copies(1, 2)
    leaf = spread(x, copies, torch.float32)
    assert leaf.shape == (128, 3, 5, 64) and leaf.untyped_storage().nbytes() == 60 and leaf.requires_grad
    gradient = torch.randn(leaf.shape)
    torch.testing.assert_close(sum_copies(gradient), gradient.double().sum((0, 3)))


def test_a_refused_function_is_served_by_the_reference_and_named_where_flex_is_asked_for() -> None:
    def vectors(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + torch.dot(PAIRS[h], PAIRS[b])

    with on_cpu():
        assert isinstance(ring_attention(**qkv(), score_mod=vectors), Tensor)
        with pytest.raises(UnsupportedAttention) as error:
            ring_attention(**qkv(), score_mod=vectors, config=RingConfig(kernel="flex"))
    assert "flex: the score_mod computes with a whole tensor for one score" in str(error.value)


def test_few_queries_need_no_kernel_of_their_own() -> None:
    options = calls.kernel_options()
    assert options["FLOAT32_PRECISION"] == "'ieee'" and len(options) == 2
    assert Params(1.0).score_mod is None
