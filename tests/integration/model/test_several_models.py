"""A module of a program's own around one language model or several, which may return its loss alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn import RingAttentionError, RingConfig
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.jobs.self_check_jobs import lora
from tests.helpers.models.tiny_models import tiny
from tests.integration.losses.test_own_losses import ONE_PROCESS

RETURNS: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": lambda x, y: x.loss + y.loss,
    "a product": lambda x, y: x.loss * y.loss,
    "the larger": lambda x, y: torch.maximum(x.loss, y.loss),
    "a ratio, by name": lambda x, y: {"loss": x.loss / y.loss.detach(), "logits": y.logits},
}


class Pair(nn.Module):
    """Two models, or one that is called twice. Its losses are no sums over tokens."""

    def __init__(self, attention: str | None, returns: str, first: str) -> None:
        super().__init__()
        self.x: Any = tiny("llama", attention)
        torch.manual_seed(1)
        self.y: Any = self.x if first == "called twice" else tiny("gpt2", attention)
        if first == "LoRA":
            self.x = lora(self.x, from_zero=False)
        self.returns = RETURNS[returns]

    def forward(self, **inputs: Any) -> Any:
        return self.returns(self.x(**inputs), self.y(**inputs))


def loss_of(output: Any) -> Tensor:
    found: Tensor = output["loss"] if isinstance(output, dict) else output
    return found


def step(returns: str, first: str, check: bool) -> tuple[float, list[Tensor]]:
    model = Pair("ring_fp32", returns, first)
    sharded = hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=check))
    with sharded:
        loss = loss_of(model(**sharded.inputs))
    loss.backward()
    sharded.reduce_gradients(model)
    return loss.item(), [x.grad for x in model.parameters() if x.grad is not None]


def alone(returns: str, first: str) -> tuple[float, list[Tensor]]:
    model = Pair(None, returns, first)
    loss = loss_of(model(**tokens(23), use_cache=False))
    loss.backward()
    return loss.item(), [x.grad for x in model.parameters() if x.grad is not None]


@pytest.mark.turns
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("first", ["plain", "LoRA", "called twice"])
@pytest.mark.parametrize("returns", RETURNS)
def test_losses_of_several_calls_are_the_batches(ranks: Ranks, returns: str, first: str, check: bool) -> None:
    """Without the self-check the second model's was that of a rank's part, silently; with it they were refused."""
    loss, gradients = alone(returns, first)
    for got in ranks(2).run(step, returns, first, check):
        assert got[0] == pytest.approx(loss, rel=ONE_PROCESS)
        assert len(got[1]) == len(gradients)
        for mine, want in zip(got[1], gradients, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)


def refused(call: Callable[..., Any], without: str = "") -> tuple[str, str] | None:
    """What a call in a ring is refused with. ``without``: an input that it does not get."""

    def run() -> None:
        with hf_ring_attn.shard(tokens(23)) as sharded:
            call(**{name: x for name, x in sharded.inputs.items() if name != without})

    return attempt(run)


def rolled() -> tuple[str, str] | None:
    """A model whose tokens also see the one before, of the same rank; its loss alone is returned."""
    model = Pair("ring_fp32", "a sum", "plain")
    model.x.get_input_embeddings().register_forward_hook(lambda _module, _args, x: x + x.roll(1, dims=1))
    return refused(model)


def test_a_wrong_model_inside_is_found_though_the_loss_alone_is_returned(ranks: Ranks) -> None:
    for error in ranks(2).run(rolled):
        assert error is not None and error[0] == "SelfCheckFailed"


class Inside(nn.Module):
    """A module that asks a model's ``forward`` for its loss, by fewer names than `shard` gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
        places = {name: others.get(name) for name in ("attention_mask", "position_ids")}
        return self.model.forward(input_ids=input_ids, labels=labels, **places)


def step_by_forward(how: str, attention: str | None) -> tuple[float, Tensor]:
    """The square of a loss that comes from a model's ``forward``, and a gradient of it."""
    model: Any = tiny("llama", attention).train()
    around: Any = Inside(model)
    given = model if "named" in how else None
    sharded = hf_ring_attn.shard(tokens(23), model=given) if attention else None
    with sharded or nullcontext():
        inputs = {**(sharded.inputs if sharded else {**tokens(23), "use_cache": False})}
        call: Any = {"a module": around, "a module's forward": around.forward}.get(how, model.forward)
        if "not shifted" in how:
            inputs = {name: x for name, x in inputs.items() if name not in ("shift_labels", "num_items_in_batch")}
        loss = call(**inputs).loss ** 2
    loss.backward()
    if sharded:
        sharded.reduce_gradients(model)
    return float(loss), model.lm_head.weight.grad


FORWARDS = ["forward", "forward, named", "forward, not shifted", "a module", "a module's forward"]


@pytest.mark.parametrize("how", FORWARDS)
def test_a_loss_of_a_forward_past_the_call_is_the_batches(ranks: Ranks, how: str) -> None:
    """It was that of a rank's part, silently, and labels that nobody had shifted were shifted on each rank."""
    want, gradient = step_by_forward(how, None)
    for loss, got in ranks(2).run(step_by_forward, how, "ring_fp32"):
        assert loss == pytest.approx(want, rel=ONE_PROCESS)
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-5)


def places_missing() -> tuple[str, str] | None:
    """What a ``forward`` without positions is refused with, in a batch whose model nobody named."""
    model: Any = tiny("llama", "ring_fp32")
    return refused(model.forward, without="position_ids")


def test_a_forward_past_the_call_without_positions_is_refused(ranks: Ranks) -> None:
    for error in ranks(2).run(places_missing):
        assert error is not None and error[0] == "OtherInputs"
        assert error[1].startswith("LlamaModel was called in a ring without position_ids")


class Squared(nn.Module):
    """One model. ``power``: of its loss, which is returned."""

    def __init__(self, attention: str | None, power: int) -> None:
        super().__init__()
        self.inner, self.power = tiny("llama", attention), power

    def forward(self, **inputs: Any) -> Any:
        out = self.inner(**inputs)
        return {"loss": out.loss**self.power, "logits": out.logits}


def compiled_step(power: int, part: str) -> tuple[float, str]:
    """The loss, and what is raised. ``part``: what torch.compile gets."""
    model = Squared("ring_fp32", power)
    called: Any = torch.compile(model, backend="eager") if part == "wrapped" else model
    if part != "wrapped":
        (model if part == "in place" else model.inner).compile(backend="eager")
    try:
        with hf_ring_attn.shard(tokens(23), model=called, config=RingConfig(loss="sharded")) as sharded:
            return float(called(**sharded.inputs)["loss"]), ""
    except RingAttentionError as error:
        return 0.0, f"{type(error).__name__}: {error}"


@pytest.mark.turns(4)
@pytest.mark.parametrize("part", ["wrapped", "in place", "inside"])
@pytest.mark.parametrize("power", [1, 2])
def test_a_function_of_the_loss_that_is_compiled_with_its_model(ranks: Ranks, power: int, part: str) -> None:
    """Wrapped, the square's mean over ranks was trained on, silently: the self-check ran what was not compiled."""
    want = float(Squared(None, power)(**tokens(23), use_cache=False)["loss"])
    for loss, error in ranks(2).run(compiled_step, power, part):
        if power == 1 or part == "inside":
            assert not error
            assert loss == pytest.approx(want, rel=ONE_PROCESS)
        else:
            assert error.startswith("LossNotSharded")
            assert part == "in place" or "compiled as a whole (compile the language model inside it)" in error


def changed_between_batches() -> tuple[float, str]:
    """The first loss, and what the second batch raises, in which the loss's square is returned."""
    model = Squared("ring_fp32", 1)
    called: Any = torch.compile(model, backend="eager")
    with hf_ring_attn.shard(tokens(23), model=called, config=RingConfig(loss="sharded")) as sharded:
        first = float(called(**sharded.inputs)["loss"])
    model.power = 2
    try:
        with hf_ring_attn.shard(tokens(23), model=called, config=RingConfig(loss="sharded")) as sharded:
            called(**sharded.inputs)
    except RingAttentionError as error:
        return first, f"{type(error).__name__}: {error}"
    return first, ""


def test_an_attribute_that_changes_what_is_compiled_is_tried_again(ranks: Ranks) -> None:
    """The square's mean over ranks was trained on, silently: the first batch's loss had passed."""
    want = float(Squared(None, 1)(**tokens(23), use_cache=False)["loss"])
    for first, error in ranks(2).run(changed_between_batches):
        assert first == pytest.approx(want, rel=ONE_PROCESS)
        assert error.startswith("LossNotSharded")
        assert "compile the language model inside it" in error
