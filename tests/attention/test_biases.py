"""The ready-made biases are transformers' own, number by number, and a ring trains them as eager T5 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.biases import Alibi, RelativeBias, alibi_slopes, relative_buckets
from hf_ring_attn.errors import BadOption, BadScoreMod
from tests.helpers.checks import Ranks
from tests.helpers.rank_functions import held

LENGTH = 37


def table(bias: Any, heads: int, length: int = LENGTH) -> Tensor:
    """[H, S, S]: the bias of every pair, in float64."""
    numbers = torch.arange(length)
    with torch.no_grad():
        scores: Tensor = bias.double()(
            torch.zeros(heads, length, length, dtype=torch.float64), torch.zeros(1, dtype=torch.int64),
            torch.arange(heads)[:, None, None], numbers[:, None], numbers,
        )  # fmt: skip
    return scores


@pytest.mark.parametrize("heads", [*range(1, 18), 24, 32, 71, 112])
def test_alibi_is_blooms(heads: int) -> None:
    """Bloom counts from the row's first key, so it adds slope * query, which is one number a query."""
    bloom = build_alibi_tensor(torch.ones(1, LENGTH), heads, torch.float32).double()
    ours = table(Alibi(heads), heads)
    numbers = torch.arange(LENGTH)
    seen = numbers[:, None] >= numbers
    moved = ours + alibi_slopes(heads).double()[:, None, None] * numbers[:, None]
    torch.testing.assert_close(moved[:, seen], bloom.expand_as(moved)[:, seen], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 2, 8, 32])
def test_alibi_is_mpts_for_the_last_query(heads: int) -> None:
    mpt = build_mpt_alibi_tensor(heads, LENGTH).double()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(table(Alibi(heads), heads)[:, -1], mpt[:, 0], rtol=1e-6, atol=1e-6)


T5S = [(32, 128), (8, 20), (16, 50), (32, 1000), (4, 3)]


def t5(buckets: int, max_distance: int, bidirectional: bool, heads: int = 3) -> T5Attention:
    config = T5Config(
        d_model=8, d_kv=4, num_heads=heads, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance, is_decoder=not bidirectional,
    )  # fmt: skip
    return T5Attention(config, has_relative_attention_bias=True, layer_idx=0)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), T5S)
def test_the_relative_bias_is_t5s(buckets: int, max_distance: int, bidirectional: bool) -> None:
    theirs = t5(buckets, max_distance, bidirectional)
    ours = RelativeBias(3, buckets, max_distance, bidirectional)
    ours.weight.data.copy_(theirs.relative_attention_bias.weight.detach())
    want = theirs.compute_bias(LENGTH, LENGTH)[0].detach().double()  # type: ignore[no-untyped-call]
    assert torch.equal(table(ours, 3), want)

    distances = torch.arange(-3000, 3000)
    by_them = T5Attention._relative_position_bucket(  # type: ignore[no-untyped-call]
        distances, bidirectional, buckets, max_distance
    )
    assert torch.equal(relative_buckets(distances, buckets, max_distance, bidirectional), by_them)
    far = distances.clamp(-max_distance, max_distance)
    assert torch.equal(ours.bucket_of[far + max_distance], by_them), "what is further away shares a bucket"


def t5_share(state: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """T5's attention of this rank's tokens, without its projections of the output."""
    mine = held(LENGTH, dist.get_rank(), dist.get_world_size())
    bias = RelativeBias(3, 8, 20, bidirectional=False)
    bias.weight.data.copy_(weights["bias"])
    q, k, v = ((state[:, mine] @ weights[name].T).unflatten(2, (3, 4)) for name in ("q", "k", "v"))
    out = ring_attention(q, k, v, scale=1.0, score_mod=bias)
    assert isinstance(out, Tensor)
    (gradient,) = torch.autograd.grad((out.flatten(2) @ weights["o"].T).square().sum(), bias.weight)
    return {"gradient": gradient}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_t5_layer_in_a_ring_trains_its_bias_as_transformers_does(ranks: Ranks, size: int) -> None:
    torch.manual_seed(0)
    layer = t5(8, 20, bidirectional=False).eval()
    state = torch.randn(2, LENGTH, 8)
    hidden = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
    out = layer(state, mask=hidden)[0]
    (want,) = torch.autograd.grad(out.square().sum(), layer.relative_attention_bias.weight)
    weights = {name: getattr(layer, name).weight.detach() for name in ("q", "k", "v", "o")}
    weights["bias"] = layer.relative_attention_bias.weight.detach()
    got = torch.stack([share["gradient"] for share in ranks(size).run(t5_share, state, weights)]).sum(0)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Alibi(0), "heads=0 is not possible: it must be at least 1."),
        (lambda: RelativeBias(2, 7), "buckets=7 is not possible: it must be even and at least 2."),
        (
            lambda: RelativeBias(2, 2, bidirectional=True),
            "buckets=2 is not possible: it must be even and at least 4.",
        ),
        (
            lambda: RelativeBias(2, 32, 16),
            "max_distance=16 is not possible: it must be more than 16, the distances with a bucket of their own.",
        ),
    ],
    ids=["heads", "odd buckets", "few buckets", "near"],
)
def test_numbers_that_make_no_bias_are_refused(make: Any, text: str) -> None:
    with pytest.raises(BadOption) as error:
        make()
    assert str(error.value) == text


def test_too_few_slopes_are_refused_by_name() -> None:
    q, k, v = (torch.rand(1, 8, 4, 8) for _ in range(3))
    with pytest.raises(BadScoreMod) as error:
        ring_attention(q, k, v, score_mod=Alibi(2))
    assert str(error.value).startswith(
        "the score_mod Alibi failed for a block of 1 rows, 4 heads, 8 queries and 8 keys of this attention (index 2 is "
        "out of bounds"
    )


def test_slopes_are_trained_and_saved_only_where_asked() -> None:
    assert [name for name, _ in Alibi(4, learnable=True).named_parameters()] == ["slopes"]
    assert list(Alibi(4).parameters()) == [] and list(Alibi(4).state_dict()) == []
    assert list(RelativeBias(4).state_dict()) == ["weight"]
