"""Hooks on weights: what changes an average of gradients as it changes each is exact, anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.models.tiny_models import tiny

Hook = Callable[[Tensor], Any]
WEIGHT = "model.layers.0.mlp.up_proj.weight"
"""None of those whose gradients the self-check compares."""


def clips_long_ones(gradient: Tensor) -> Tensor | None:
    """It returns nothing where it changes nothing."""
    norm = gradient.norm()
    return gradient / norm if norm > 1000 else None


def clips_in_place(gradient: Tensor) -> None:
    gradient.clamp_(-1e-3, 1e-3)


CHANGES: dict[str, Hook] = {
    "clamp": lambda gradient: gradient.clamp(-1e-3, 1e-3),
    "clip_by_norm": clips_long_ones,
    "clip_in_place": clips_in_place,
    "normalise": lambda gradient: gradient / (gradient.norm() + 1e-6),
    "sign": lambda gradient: gradient.sign(),
    "sparse": lambda gradient: gradient * (gradient.abs() > 1e-5),
    "noise": lambda gradient: gradient + 1e-2 * torch.randn_like(gradient),
}


def halves_rows(gradient: Tensor) -> None:
    gradient[:5] *= 0.5


PASSES: dict[str, Hook] = {
    "factor": lambda gradient: -0.5 * gradient,
    "mask": halves_rows,
    "term": lambda gradient: gradient + 0.01,
    "centre": lambda gradient: gradient - gradient.mean(-1, keepdim=True),
    "nan": lambda gradient: gradient.nan_to_num(0.0),
    "reads": lambda gradient: None,
}


def hooked(hook: Hook | None, attention: str | None) -> Any:
    model = tiny("llama", attention).train()
    if hook is not None:
        model.get_parameter(WEIGHT).register_hook(hook)
    return model


def gradient_in_ring(kind: str) -> tuple[Tensor, float]:
    """The weight's gradient, and a random number drawn after it."""
    model = hooked(PASSES[kind], "ring_fp32")
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(3)
    with (sharded := hf_ring_attn.shard(tokens(23))):
        wrapped(**sharded.inputs).loss.backward()
    gradient = model.get_parameter(WEIGHT).grad
    assert gradient is not None
    return gradient, float(torch.rand(()))


@pytest.mark.parametrize("kind", PASSES)
def test_what_passes_through_an_average_is_exact(ranks: Ranks, kind: str) -> None:
    model = hooked(PASSES[kind], None)
    model(**tokens(23)).loss.backward()
    random = float(torch.rand((), generator=torch.Generator().manual_seed(3)))
    for gradient, drawn in ranks(2).run(gradient_in_ring, kind):
        assert relative_error(gradient, model.get_parameter(WEIGHT).grad) < 1e-5
        assert drawn == random


def raised(kind: str) -> str:
    model = hooked(CHANGES[kind], "ring_fp32")

    def step() -> None:
        with (sharded := hf_ring_attn.shard(tokens(23))):
            model(**sharded.inputs)

    error = attempt(step)
    return "" if error is None else ": ".join(error)


@pytest.mark.parametrize("kind", CHANGES)
def test_what_does_not_is_refused(ranks: Ranks, kind: str) -> None:
    """Each rank clipped the gradient of its own tokens, and training went on: no watched weight had the hook."""
    for error in ranks(2).run(raised, kind):
        assert error.startswith("UnsupportedModel: LlamaForCausalLM"), error
        assert f"a hook on the gradient of {WEIGHT} (" in error


def late() -> list[str]:
    """The hook comes after the first batch."""
    model = hooked(None, "ring_fp32")
    said = []
    for _ in range(2):

        def step() -> None:
            with (sharded := hf_ring_attn.shard(tokens(23))):
                model(**sharded.inputs)

        error = attempt(step)
        said.append("" if error is None else error[0])
        model.get_parameter(WEIGHT).register_hook(CHANGES["clamp"])
    return said


def test_a_hook_that_comes_later_is_called_then(ranks: Ranks) -> None:
    assert ranks(2).run(late) == [["", "UnsupportedModel"]] * 2


def collected() -> int:
    """How often a hook on a watched weight, of several kinds of its own, was called in one step."""
    model, seen = tiny("llama", "ring_fp32").train(), list[float]()
    model.lm_head.weight.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    with (sharded := hf_ring_attn.shard(tokens(23))):
        loss = model(**sharded.inputs).loss
    loss.backward()
    sharded.reduce_gradients(model)
    return len(seen)


def test_a_hook_that_collects_has_the_steps_gradients_alone(ranks: Ranks) -> None:
    """Those of the self-check's row were among them."""
    assert ranks(2).run(collected) == [1, 1]
