"""Modules that a model calls without containing them, its parts that a program calls, and the hook that finds both."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.jobs.self_check_jobs import lora
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


def scale_of_a_loop(in_ring: bool) -> float:
    """The weight of a module that a model calls, after three steps whose loop reduces the model's gradients alone."""
    model = tiny("llama", "ring_fp32" if in_ring else None).train()
    scaled = with_another(model)
    optimizer = torch.optim.SGD([*model.parameters(), *scaled.parameters()], lr=0.1)
    for _ in range(3):
        batch = tokens(24)
        if in_ring:
            sharded = hf_ring_attn.shard(batch)
            with sharded:
                loss = model(**sharded.inputs).loss
            loss.backward()
            sharded.reduce_gradients(model)
        else:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return scaled.scale.item()


def test_a_module_that_a_model_only_calls_is_found_in_each_batch(ranks: Ranks) -> None:
    want = scale_of_a_loop(False)
    assert abs(want - 1) > 1e-5
    assert ranks(2).run(scale_of_a_loop, True) == pytest.approx([want, want], abs=1e-7)


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


def gradient_of_a_second(in_ring: bool, at_address: bool = False) -> tuple[bool, float]:
    """The gradient of a module beside a model that takes the place of another one in memory."""
    model = tiny("llama", "ring_fp32" if in_ring else None).train()
    batch: Any = tokens(24)
    sharded = hf_ring_attn.shard(batch) if in_ring else None
    inputs = batch if sharded is None else sharded.inputs
    scaled = Scaled()
    with sharded or nullcontext():
        scaled(model(**inputs).loss).backward()
    if sharded is not None:
        sharded.reduce_gradients(nn.ModuleList([model, scaled]))
    address, others = id(scaled.scale), []
    del scaled
    for _ in range(20_000):
        others.append(Scaled())
        if not at_address or id(others[-1].scale) == address:
            break
    with sharded or nullcontext():
        others[-1](model(**inputs).loss).backward()
    assert others[-1].scale.grad is not None
    return id(others[-1].scale) == address, others[-1].scale.grad.item()


@pytest.mark.parametrize("at_address", [False, True])
def test_a_module_in_the_memory_of_one_that_is_gone_is_averaged(ranks: Ranks, at_address: bool) -> None:
    """Its weight passed for the other's if Python put it at the same address, and nothing was said."""
    _, want = gradient_of_a_second(False)
    for _, got in ranks(2).run(gradient_of_a_second, True, at_address):
        assert got == pytest.approx(want, rel=1e-5)


# ---- parts -----------------------------------------------------------------------------------------------------------


def by_itself(known_by: str, adapted: bool, names: list[str]) -> tuple[tuple[str, str] | None, Tensor | None]:
    """What a program raises, or gets, that calls the decoder of a known model with these inputs of a batch."""
    model: Any = lora(tiny("llama", "ring_fp32"), from_zero=True) if adapted else tiny("llama", "ring_fp32")
    decoder = model.base_model if adapted else model.model
    found: list[Tensor] = []

    def run() -> None:
        batch = {"input_ids": tokens(23)["input_ids"]}
        sharded = hf_ring_attn.shard(batch, model=model if known_by == "shard" else None)
        with sharded:
            if known_by == "a call":
                model(**sharded.inputs)
            out = decoder(**{name: sharded.inputs[name] for name in names})
        found.append(sharded.gather(out[0]).detach())

    return attempt(run), next(iter(found), None)


PLACES = ["position_ids", "attention_mask"]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("known_by", ["shard", "a call"])
def test_a_part_that_is_called_by_itself_gets_the_inputs_of_the_batch(
    ranks: Ranks, known_by: str, adapted: bool
) -> None:
    """Inside a known model nothing was looked at, and each rank numbered its own tokens from 0, silently."""
    alone = tiny("llama", None)
    want = (alone if adapted else alone.model)(tokens(23)["input_ids"])[0]
    for raised, got in ranks(2).run(by_itself, known_by, adapted, ["input_ids", *PLACES]):
        assert raised is None and got is not None
        assert relative_error(got, want) < 1e-5
    for missing in PLACES[:1], PLACES:
        names = ["input_ids", *(name for name in PLACES if name not in missing)]
        for raised, got in ranks(2).run(by_itself, known_by, adapted, names):
            if adapted:  # the whole model, which gets what the call leaves out
                assert raised is None and got is not None and relative_error(got, want) < 1e-5
                continue
            assert raised is not None and raised[0] == "OtherInputs"
            assert f"was called in a ring without {' and '.join(missing)}" in raised[1]
