"""flex on a CPU: the trial that finds what a function's graph does not tell."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_ring_attn.attention.kernel_choice import part_of
from hf_ring_attn.biases import Alibi
from hf_ring_attn.errors import UnsupportedAttention
from hf_ring_attn.kernels import Request, ScoreMod, asking, choose
from hf_ring_attn.kernels import flex as room
from hf_ring_attn.kernels.flex.leaves import sum_copies
from hf_ring_attn.kernels.flex.mask_table import MaskTable
from hf_ring_attn.sharding.mask import CAUSAL, Band, Mask
from tests.helpers.score_mods import Scaled
from tests.kernels.flex_cases import on_cpu
from tests.kernels.test_flex import REQUEST
from tests.kernels.test_flex_graph import CPU, HEADS, PAIRS

MASK = Mask.of(CAUSAL, 1, 300)


class Lying(Scaled):
    """A gradient of its own, which a graph does not know."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        of_score, of_factor = Scaled.backward(ctx, *gradients)
        return of_score, of_factor * 2


def lying(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    scaled: Tensor = Lying.apply(score, HEADS[h])  # type: ignore[no-untyped-call]
    return scaled


def reasons(function: Callable[..., Any], tried: bool = True, dtype: torch.dtype = torch.float32) -> list[str]:
    mod = ScoreMod.of(function, CPU)
    request = replace(REQUEST, device="cpu", dtype=dtype, heads=4, kv_heads=2, head_dim=6, value_dim=5)
    with on_cpu(tried) as flex:
        asked = asking(request, mod, 0.4, None, partial(part_of, MASK, 1, 300))
        assert asked.asked is not None
        return flex.unsupported(asked)


def test_a_function_that_flex_gets_right_passes_its_trial() -> None:
    assert reasons(lambda s, b, h, i, j: s + PAIRS[h, i % 8] - HEADS[h] * (i - j)) == []


def test_a_gradient_that_a_function_makes_itself_is_found() -> None:
    (reason,) = reasons(lying)
    assert reason.startswith("a small attention with this score_mod came out wrong here: captured 0 by ")
    assert reasons(lying, tried=False) == []


ALIKE = torch.zeros(4, requires_grad=True)
"""A number for each head, the same for all keys: a softmax does not see it, but where a sink takes part."""


class Doubled(torch.autograd.Function):
    """The same with twice the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(x, marks=pytest.mark.full) for x in (torch.float16, torch.float32))]
)
@pytest.mark.turns
def test_what_a_softmax_does_not_see_is_tried_too(dtype: torch.dtype, every: int) -> None:
    """Its gradient all but cancels, so that rounding alone could be taken for a fault, or a fault for rounding."""

    def alike(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + ALIKE[h] * (q_idx % every == 0)

    def doubled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        twice: Tensor = Doubled.apply(ALIKE[h] * (q_idx % every == 0))  # type: ignore[no-untyped-call]
        return score + twice

    assert reasons(alike, dtype=dtype) == []
    (reason,) = reasons(doubled, dtype=dtype)
    assert "came out wrong here: captured 0 by " in reason


def one_key_too_many(*at: Any) -> MaskTable | None:
    found = made(*at)
    return None if found is None else replace(found, last=found.last + 1)


made = MaskTable.of


@pytest.mark.parametrize(
    ("where", "name", "defect"),
    [
        (room, "sum_copies", lambda x: sum_copies(x) / 2),
        (MaskTable, "of", one_key_too_many),
        (ScoreMod, "of_heads", lambda mod, heads: mod),
        (room, "accumulate_dtype", lambda dtype: torch.float32),
    ],
    ids=["captured gradients halved", "a key too many", "other heads", "none"],
)
@pytest.mark.turns
def test_a_planted_defect_fails_the_trial(where: Any, name: str, defect: Any, request: pytest.FixtureRequest) -> None:
    with mock.patch.object(where, name, defect):
        found = reasons(Alibi(4, learnable=True))
    assert bool(found) == ("none" not in request.node.name), found


def test_blocks_become_smaller_until_they_fit() -> None:
    taken: list[int] = []

    def tried(kernel: room.Flex, *_: Any) -> tuple[str, ...]:
        taken.append(max(kernel._calls._level.values(), default=0))
        return ("failed: OutOfMemoryError: out of resource: Required: 409600",) if len(taken) < 3 else ()

    with mock.patch.object(room, "failures_of", tried):
        assert reasons(Alibi(4)) == []
    assert taken == [0, 1, 2]
    with mock.patch.object(room, "failures_of", return_value=("No valid triton configs",)):
        assert reasons(Alibi(4)) == ["No valid triton configs"]


def test_a_trial_asks_about_pairs_that_are_seen_and_no_others() -> None:
    """A function's tensors may end where its mask does: on a GPU reading beyond them ends the process."""
    documents = torch.tensor([[-1] * 7 + [0] * 40 + [1] * 3 + [2] * 350, [-1] * 9 + [0] * 391])
    mask = Mask.of(Band(0, 11), 3, 400, torch.cat((documents, documents[:1])))
    part = part_of(mask, 3, 390)
    assert (part.rows, part.queries, part.keys) == (2, 200, 320)
    table = torch.cat((part.forward, *(table for _, _, table in part.backward)))
    first, last = table[:, 3], table[:, 3] + table[:, 2]
    assert first.min() == 7 and last.max() == 207 and table[:, 8].eq(11).all() and table[:, 0].max() == 1

    only = torch.zeros(12)
    counts = torch.zeros(50)
    mod = ScoreMod.of(lambda s, b, h, i, j: s + only[i - j] + counts[(j - 7).clamp(max=49)], CPU)
    request = replace(REQUEST, device="cpu", dtype=torch.float32, heads=4, kv_heads=2, head_dim=6, value_dim=5)
    with on_cpu(tried=True) as flex:
        assert flex.unsupported(asking(request, mod, 0.4, None, partial(part_of, mask, 3, 390))) == []


def test_short_rows_and_rows_of_padding_have_a_part_too() -> None:
    for length in (1, 2, 100):
        part = part_of(Mask.of(CAUSAL, 1, length), 1, length)
        assert part.queries == part.keys == length and len(part.forward) == 1
    empty = part_of(Mask.of(CAUSAL, 1, 8, torch.full((1, 8), -1)), 1, 8)
    assert not len(empty.forward)


def test_a_function_is_tried_once_and_asked_about_by_its_graph() -> None:
    count = mock.Mock(return_value=())
    bias = Alibi(4, learnable=True)
    with on_cpu(tried=True) as flex, mock.patch.object(room, "failures_of", count):
        for length in (8, 12):
            with torch.no_grad():
                bias.slopes.mul_(0.9)
            request = replace(REQUEST, device="cpu", dtype=torch.float32)
            mod = ScoreMod.of(bias, CPU)
            assert choose("flex", asking(request, mod, 0.4, None, partial(part_of, MASK, 1, length))) is flex
    assert count.call_count == 1


SLOPES = torch.linspace(0.5, 2, 16, requires_grad=True)


def honest(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * SLOPES[h] + SLOPES[h]


def half_hidden(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """The same graph, and another gradient."""
    with torch.no_grad():
        scaled = score * SLOPES[h]
    return scaled + SLOPES[h]


def test_a_function_of_the_same_graph_and_other_code_is_tried_too() -> None:
    def asked(function: Callable[..., Any]) -> Request:
        mods.append(ScoreMod.of(function, CPU))
        request = replace(REQUEST, device="cpu", dtype=torch.float32)
        found: Request = asking(request, mods[-1], 0.4, None, partial(part_of, MASK, 1, 8))
        return found

    mods: list[ScoreMod] = []
    with on_cpu(tried=True) as flex:
        one, other = asked(honest), asked(half_hidden)
        assert one.asked is not None and other.asked is not None and one.asked.graph == other.asked.graph
        assert choose("flex", one) is flex
        with pytest.raises(UnsupportedAttention, match="came out wrong here"):
            choose("flex", other)
        assert asked(honest) == one


def test_a_request_holds_nothing_of_a_call_that_is_over() -> None:
    """Requests are cached for the life of a process; a mask of many documents takes megabytes."""
    mask = Mask.of(CAUSAL, 1, 8)
    gone = weakref.ref(mask)
    with on_cpu(tried=False):
        mod = ScoreMod.of(Alibi(4), CPU)
        request = replace(REQUEST, device="cpu", dtype=torch.float32)
        asked = asking(request, mod, 0.4, None, partial(part_of, mask, 1, 8)).asked
    del mod, mask
    gc.collect()
    assert asked is not None and asked.mod() is None and gone() is None
