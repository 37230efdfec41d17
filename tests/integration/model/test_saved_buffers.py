"""Saved buffers and frozen weights that a program writes to: each rank would write what it saw of its own tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_ring_attn
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.models.tiny_models import tiny


class Balanced(nn.Module):
    """An MLP whose output the program shifts by a buffer."""

    shift: Tensor

    def __init__(self, mlp: nn.Module, saved: bool) -> None:
        super().__init__()
        self.mlp = mlp
        self.register_buffer("shift", torch.zeros(()), persistent=saved)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(x) + self.shift
        return found


def two_steps(reduces: bool, saved: bool = True, trains: bool = True) -> None:
    """After the first step the program moves the buffer by what a hook saw."""
    model = tiny("llama", "ring_fp32").train(trains)
    layer = Balanced(model.model.layers[0].mlp, saved)
    model.model.layers[0].mlp = layer
    seen: list[Tensor] = []
    layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.detach().max()))
    for seed in (1, 2):
        with hf_ring_attn.shard(tokens(23, seed=seed)) as sharded, torch.set_grad_enabled(trains):
            loss = model(**sharded.inputs).loss
        if trains:
            loss.backward()
            sharded.reduce_gradients(model)
            model.zero_grad()
        largest = seen[-1]
        if reduces:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        layer.shift += 0.1 * largest


def raised_by(reduces: bool, saved: bool = True, trains: bool = True) -> tuple[str, str] | None:
    return attempt(partial(two_steps, reduces, saved, trains))


def test_a_buffer_that_ranks_write_differently_is_refused(ranks: Ranks) -> None:
    """The second step was silently wrong."""
    for raised in ranks(2).run(raised_by, False):
        assert raised is not None, "not refused"
        assert raised[0] == "RanksDiffer"
        assert "the same buffers and frozen weights that the program writes (model.layers.0.mlp.shift)" in raised[1]
        assert "reduce them over the ring first (torch.distributed.all_reduce)" in raised[1]


@pytest.mark.parametrize(
    ("reduces", "saved", "trains"), [(True, True, True), (False, False, True), (False, True, False)]
)
def test_others_are_not(ranks: Ranks, reduces: bool, saved: bool, trains: bool) -> None:
    assert ranks(2).run(raised_by, reduces, saved, trains) == [None, None]


class Codebook(nn.Module):
    """An MLP whose output the program shifts by a frozen weight, its own or that of a layer of torch."""

    def __init__(self, mlp: nn.Module, own: bool) -> None:
        super().__init__()
        self.mlp = mlp
        shift = nn.Parameter(torch.zeros(1, 32), requires_grad=False)
        self.shift = shift if own else nn.Embedding(1, 32, _weight=shift, _freeze=True)

    def weight(self) -> Tensor:
        return self.shift.weight if isinstance(self.shift, nn.Embedding) else self.shift

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(x) + self.weight()
        return found


def steps_of_codebook(reduces: bool, own: bool) -> None:
    """After the first step a frozen weight follows the mean of what a hook saw."""
    model = tiny("llama", "ring_fp32").train()
    layer = model.model.layers[0].mlp = Codebook(model.model.layers[0].mlp, own)
    seen: list[Tensor] = []
    layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.detach().mean((0, 1))))
    for seed in (1, 2):
        with hf_ring_attn.shard(tokens(23, seed=seed)) as sharded:
            model(**sharded.inputs).loss.backward()
        mean = seen[-1]
        if reduces:
            dist.all_reduce(mean)
        if own:
            layer.weight().data.lerp_(mean, 0.1)
        else:
            with torch.no_grad():
                layer.weight().lerp_(mean, 0.1)


@pytest.mark.parametrize("own", [True, False])
def test_a_frozen_weight_that_ranks_write_differently_is_refused(ranks: Ranks, own: bool) -> None:
    """The second step was silently wrong."""
    for raised in ranks(2).run(attempt, partial(steps_of_codebook, False, own)):
        assert raised is not None, "not refused"
        assert raised[0] == "RanksDiffer"
        assert "frozen weights that the program writes (model.layers.0.mlp.shift" in raised[1]
    assert ranks(2).run(attempt, partial(steps_of_codebook, True, own)) == [None, None]
