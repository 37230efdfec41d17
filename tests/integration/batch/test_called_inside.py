"""Modules that a model calls without containing them, and the hook that finds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hf_ring_attn
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import tokens, told
from tests.helpers.models.tiny_models import tiny


class Scaled(nn.Module):
    """Scales by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def with_another(model: Any) -> Scaled:
    """Makes an MLP of ``model`` call a module that the model does not contain."""
    scaled, mlp = Scaled(), model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: scaled(forward(x))
    return scaled


def loop_that_forgets() -> None:
    """Averages all gradients after the first batch, and only the model's from then on."""
    model = tiny("llama", "ring_fp32").train()
    scaled = with_another(model)
    optimizer = torch.optim.SGD([*model.parameters(), *scaled.parameters()], lr=0.1)
    for step in range(3):
        sharded = hf_ring_attn.shard(tokens(24))
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(nn.ModuleList([model, scaled]) if step == 0 else model)
        optimizer.step()
        optimizer.zero_grad()


def test_a_module_that_a_model_only_calls_is_found_in_each_batch(ranks: Ranks) -> None:
    for texts in ranks(2).run(told, loop_that_forgets):
        assert [text.split(" of 2, but neither")[0] for text in texts] == ["Scaled trained in a ring"]


def hooks_of_each_batch() -> list[tuple[int, bool]]:
    """The hooks before every module that are left inside a model's forward; if a module called after it is found."""
    model, found = tiny("llama", "ring_fp32").train(), []
    left: list[int] = []
    model.model.layers[1].mlp.register_forward_pre_hook(
        lambda *_: left.append(len(torch.nn.modules.module._global_forward_pre_hooks))
    )
    for _ in range(3):
        sharded, head = hf_ring_attn.shard(tokens(24)), Scaled()
        with sharded:
            head(model(**sharded.inputs).loss).backward()
        found.append((left[-1], any(head is one for one in sharded.context.log.models)))
        sharded.reduce_gradients(nn.ModuleList([model, head]))
    return found


def test_no_hook_runs_before_each_module_of_a_known_model(ranks: Ranks) -> None:
    assert ranks(2).run(hooks_of_each_batch) == [[(1, True), (0, True), (0, True)]] * 2
