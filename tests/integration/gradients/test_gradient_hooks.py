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


KINDS = ["", "accumulated"]


def add_hook(model: Any, hook: Hook, kind: str) -> None:
    """Adds a hook on the weight's gradient, or one on what the gradient was added to."""
    weight = model.get_parameter(WEIGHT)

    def accumulated(weight: Any) -> None:
        changed = hook(weight.grad)
        weight.grad = weight.grad if changed is None else changed

    weight.register_post_accumulate_grad_hook(accumulated) if kind else weight.register_hook(hook)


def hooked(hook: Hook | None, attention: str | None, kind: str = "") -> Any:
    model = tiny("llama", attention).train()
    if hook is not None:
        add_hook(model, hook, kind)
    return model


def gradient_in_ring(kind: str, hooks: str) -> tuple[Tensor, float]:
    """The weight's gradient, and a random number drawn after it."""
    model = hooked(PASSES[kind], "ring_fp32", hooks)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(3)
    with (sharded := hf_ring_attn.shard(tokens(23))):
        wrapped(**sharded.inputs).loss.backward()
    gradient = model.get_parameter(WEIGHT).grad
    assert gradient is not None
    return gradient, float(torch.rand(()))


@pytest.mark.parametrize("hooks", KINDS)
@pytest.mark.parametrize("kind", PASSES)
def test_what_passes_through_an_average_is_exact(ranks: Ranks, kind: str, hooks: str) -> None:
    model = hooked(PASSES[kind], None, hooks)
    model(**tokens(23)).loss.backward()
    random = float(torch.rand((), generator=torch.Generator().manual_seed(3)))
    for gradient, drawn in ranks(2).run(gradient_in_ring, kind, hooks):
        assert relative_error(gradient, model.get_parameter(WEIGHT).grad) < 1e-5
        assert drawn == random


def raised(kind: str, hooks: str) -> str:
    model = hooked(CHANGES[kind], "ring_fp32", hooks)

    def step() -> None:
        with (sharded := hf_ring_attn.shard(tokens(23))):
            model(**sharded.inputs)

    error = attempt(step)
    return "" if error is None else ": ".join(error)


@pytest.mark.parametrize("hooks", KINDS)
@pytest.mark.parametrize("kind", CHANGES)
def test_what_does_not_is_refused(ranks: Ranks, kind: str, hooks: str) -> None:
    """Each rank clipped the gradient of its own tokens, and training went on: no watched weight had the hook."""
    for error in ranks(2).run(raised, kind, hooks):
        assert error.startswith("UnsupportedModel: LlamaForCausalLM"), error
        assert f"a hook on the gradient of {WEIGHT} (" in error


def stepped(how: str) -> tuple[str, bool]:
    """What an optimizer inside the backward is refused with; and if the weight has its value, and no gradient."""
    model = tiny("llama", "ring_fp32").train()
    weight = model.get_parameter(WEIGHT)
    before, optimizer = weight.detach().clone(), torch.optim.SGD([weight], lr=0.1)

    def by_optimizer(_weight: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def by_data(weight: Any) -> None:
        weight.data.add_(weight.grad, alpha=-0.1)

    def takes(weight: Any) -> None:
        weight.grad = None

    weight.register_post_accumulate_grad_hook({f.__name__: f for f in (by_optimizer, by_data, takes)}[how])

    def batch() -> None:
        with (sharded := hf_ring_attn.shard(tokens(23))):
            model(**sharded.inputs)

    error = attempt(batch)
    return "" if error is None else ": ".join(error), torch.equal(weight, before) and weight.grad is None


@pytest.mark.parametrize("how", ["by_optimizer", "by_data", "takes"])
def test_a_step_inside_the_backward_is_refused(ranks: Ranks, how: str) -> None:
    for error, is_as_before in ranks(2).run(stepped, how):
        assert f"a hook on the gradient of {WEIGHT} (" in error
        assert is_as_before


def late(hooks: str) -> list[str]:
    """The hook comes after the first batch."""
    model = hooked(None, "ring_fp32")
    said = []
    for _ in range(2):

        def step() -> None:
            with (sharded := hf_ring_attn.shard(tokens(23))):
                model(**sharded.inputs)

        error = attempt(step)
        said.append("" if error is None else error[0])
        add_hook(model, CHANGES["clamp"], hooks)
    return said


@pytest.mark.parametrize("hooks", KINDS)
def test_a_hook_that_comes_later_is_called_then(ranks: Ranks, hooks: str) -> None:
    assert ranks(2).run(late, hooks) == [["", "UnsupportedModel"]] * 2


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


# ---- hooks together --------------------------------------------------------------------------------------------------


def scales_by_anothers_norm(model: Any) -> None:
    """It was silent (0.36 of the gradient norm): each hook alone is a factor, or changes nothing."""
    norms: dict[str, Tensor] = {}
    model.lm_head.weight.register_hook(lambda gradient: norms.update(head=gradient.norm()))
    model.get_parameter(WEIGHT).register_hook(lambda gradient: gradient / norms["head"])


def scales_by_the_last_norm(model: Any) -> None:
    """The weight that is measured has its gradient later in a backward."""
    norms = {"first": torch.ones(())}
    model.model.embed_tokens.weight.register_hook(lambda gradient: norms.update(first=gradient.norm()))
    model.get_parameter(WEIGHT).register_hook(lambda gradient: gradient / norms["first"])


def scales_by_an_attribute(model: Any) -> None:
    class Clip:
        norm = 1.0

        def note(self, gradient: Tensor) -> None:
            self.norm = float(gradient.norm())

        def scale(self, gradient: Tensor) -> Tensor:
            return gradient / max(self.norm, 1e-6)

    clip = Clip()
    model.lm_head.weight.register_hook(clip.note)
    model.get_parameter(WEIGHT).register_hook(clip.scale)


def scales_by_anothers_gradient(model: Any) -> None:
    """There is none when the hooks are tried."""
    model.get_parameter(WEIGHT).register_hook(lambda gradient: gradient / model.lm_head.weight.grad.norm())


def logs_and_scales(model: Any) -> None:
    seen: list[float] = []
    for x in model.parameters():
        x.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    model.get_parameter(WEIGHT).register_hook(lambda gradient: 0.5 * gradient)


def warms_up(model: Any) -> None:
    """A factor that grows with its calls."""
    calls = {"count": 0}

    def scale(gradient: Tensor) -> Tensor:
        calls["count"] += 1
        return gradient * min(1.0, calls["count"] / 3)

    model.get_parameter(WEIGHT).register_hook(scale)


def scales_by_a_weights_norm(model: Any) -> None:
    for x in model.parameters():
        x.register_hook(lambda gradient, x=x: gradient * x.detach().norm() / 10)


def scales_each_layer(model: Any) -> None:
    rates = {id(x): 0.9**number for number, x in enumerate(model.parameters())}
    for x in model.parameters():
        x.register_hook(lambda gradient, x=x: gradient * rates[id(x)])


REFUSED = [scales_by_anothers_norm, scales_by_the_last_norm, scales_by_an_attribute, scales_by_anothers_gradient]
EXACT = [logs_and_scales, warms_up, scales_by_a_weights_norm, scales_each_layer]


def gradients_with(add: Callable[[Any], None], in_ring: bool) -> tuple[str, Tensor]:
    model: Any = tiny("llama", "ring_fp32" if in_ring else None).train()
    add(model)

    def step() -> None:
        if not in_ring:
            model(**tokens(23)).loss.backward()
            return
        with (sharded := hf_ring_attn.shard(tokens(23))):
            loss = model(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(model)

    error = attempt(step)
    return "" if error is None else ": ".join(error), torch.tensor(0.0) if error else model.get_parameter(WEIGHT).grad


@pytest.mark.parametrize("add", REFUSED)
def test_hooks_that_clip_together_are_refused(ranks: Ranks, add: Callable[[Any], None]) -> None:
    for error, _ in ranks(2).run(gradients_with, add, True):
        assert "a hook on the gradient of " in error and "with other hooks" in error


@pytest.mark.parametrize("add", EXACT)
def test_hooks_that_log_or_scale_together_are_exact(ranks: Ranks, add: Callable[[Any], None]) -> None:
    _, want = gradients_with(add, False)
    for error, got in ranks(2).run(gradients_with, add, True):
        assert error == "" and relative_error(got, want) < 1e-5
