"""Biases on scores by the distance of query and key, for use as `ring_attention`'s ``score_mod``.

They are modules, so their parameters are trained, saved and moved with the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .errors import BadOption


class Alibi(nn.Module):
    """Attention with linear biases (Press, Smith and Lewis 2021, arXiv:2108.12409)::

        score - slopes[h] * abs(q_idx - kv_idx)

    For a causal mask this is Bloom's and MPT's bias up to a constant per query, which softmax ignores.

    Args:
        heads: query heads (H).
        learnable: the slopes are a parameter; otherwise a buffer.

    Attributes:
        slopes: [H] float32, at first `alibi_slopes`.

    Raises:
        BadOption: less than one head.
    """

    slopes: Tensor

    def __init__(self, heads: int, learnable: bool = False) -> None:
        super().__init__()
        if learnable:
            self.slopes = nn.Parameter(alibi_slopes(heads))
        else:
            self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - self.slopes[h] * (q_idx - kv_idx).abs()


def alibi_slopes(heads: int) -> Tensor:
    """The paper's slopes [H], float32: the powers of 2 ** (-8 / H) where H is a power of two; else those of the power
    of two below, and then every other one of the power of two above, as in the authors' own code.

    Raises:
        BadOption: less than one head.
    """
    if heads < 1:
        raise BadOption("heads", heads, "at least 1")
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * n / below) for n in range(1, below + 1)]
    between = [2 ** (-4 * n / below) for n in range(1, 2 * below + 1, 2)]
    return torch.tensor([*slopes, *between][:heads], dtype=torch.float32)


class RelativeBias(nn.Module):
    """T5's learnable relative position bias (Raffel et al. 2019, arXiv:1910.10683, section 2.1)::

        score + weight[bucket(kv_idx - q_idx), h]

    with a bucket for each small distance and, up to ``max_distance``, buckets whose width grows with the distance. The
    weight is that of transformers' ``relative_attention_bias``; T5 does not scale its scores (``scale=1.0``).

    Args:
        heads: query heads (H).
        buckets: rows of the weight; even, at least 4 where ``bidirectional``.
        max_distance: all pairs that are further apart share a bucket. It must be larger than the number of buckets that
            hold one distance each.
        bidirectional: half of the buckets are for later keys, as in encoders; else later keys share bucket 0.

    Attributes:
        weight: [buckets, H] float32, normally distributed as nn.Embedding's.
        bucket_of: [2 * max_distance + 1] int64, the bucket of each distance -max_distance to max_distance.

    Raises:
        BadOption: for numbers that make no buckets.
    """

    bucket_of: Tensor

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = False) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.randn(buckets, heads))
        distances = torch.arange(-max_distance, max_distance + 1)
        self.register_buffer("bucket_of", relative_buckets(distances, buckets, max_distance, bidirectional), False)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (kv_idx - q_idx).clamp(-self.max_distance, self.max_distance)
        return score + self.weight[self.bucket_of[distance + self.max_distance], h]


def relative_buckets(
    distances: Tensor, buckets: int = 32, max_distance: int = 128, bidirectional: bool = False
) -> Tensor:
    """T5's bucket of each distance, key position less query position: whole numbers in, numbers below ``buckets`` out.

    The logarithm is taken in float32, as transformers takes it: at the edges of buckets its rounding decides.

    Raises:
        BadOption: for numbers that make no buckets.
    """
    if buckets < (4 if bidirectional else 2) or buckets % 2:
        raise BadOption("buckets", buckets, f"even and at least {4 if bidirectional else 2}")
    each = buckets // 2 if bidirectional else buckets
    single = each // 2
    if max_distance <= single:
        raise BadOption("max_distance", max_distance, f"more than {single}, the distances with a bucket of their own")
    if bidirectional:
        first, far = (distances > 0).long() * each, distances.abs()
    else:
        first, far = torch.zeros_like(distances), (-distances).clamp(min=0)
    grown = torch.log(far.clamp(min=1).float() / single) / math.log(max_distance / single) * (each - single)
    shared = (single + grown.long()).clamp(max=each - 1)
    return first + torch.where(far < single, far, shared)
