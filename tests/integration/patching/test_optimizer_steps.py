"""Functions are called before each step of any optimizer of torch, once each, until they are forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from hf_ring_attn.integration.patching import optimizer_steps


@pytest.fixture(autouse=True)
def only_ours() -> Iterator[None]:
    optimizer_steps.forget()
    yield
    optimizer_steps.forget()


def an_optimizer() -> SGD:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return SGD([weight], lr=0.5)


def test_each_function_is_called_once_before_the_weights_change() -> None:
    seen: list[tuple[str, Optimizer, float]] = []

    def first(optimizer: Optimizer) -> None:
        seen.append(("first", optimizer, float(optimizer.param_groups[0]["params"][0][0].detach())))

    def second(optimizer: Optimizer) -> None:
        seen.append(("second", optimizer, 0.0))

    for function in (first, second, first):
        optimizer_steps.call_before_each_step(function)
    one, other = an_optimizer(), an_optimizer()
    one.step()
    assert seen == [("first", one, 1.0), ("second", one, 0.0)]
    other.step()
    assert [called for *called, _ in seen[2:]] == [["first", other], ["second", other]]


@pytest.mark.parametrize("closure", [None, lambda: 0.0])
def test_an_error_of_a_function_ends_the_step_before_it(closure: Callable[[], float] | None) -> None:
    def refuse(_optimizer: Optimizer) -> None:
        raise ValueError("not averaged")

    optimizer_steps.call_before_each_step(refuse)
    one = an_optimizer()
    with pytest.raises(ValueError, match="not averaged"):
        one.step(closure)
    assert one.param_groups[0]["params"][0].tolist() == [1.0, 1.0]


def test_what_is_forgotten_is_not_called_and_may_come_again() -> None:
    seen: list[Optimizer] = []
    optimizer_steps.call_before_each_step(seen.append)
    optimizer_steps.forget()
    an_optimizer().step()
    assert not seen
    optimizer_steps.call_before_each_step(seen.append)
    an_optimizer().step()
    assert len(seen) == 1


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_with_a_closure_calls_them_after_it(by_name: bool) -> None:
    """The closure makes the gradients: before it they are those of an earlier step, or a part (Lightning's Trainer)."""
    seen: list[tuple[float, float]] = []

    def look(optimizer: Optimizer) -> None:
        weight = optimizer.param_groups[0]["params"][0]
        seen.append((float(weight[0].detach()), float(weight.grad[0])))

    optimizer_steps.call_before_each_step(look)
    one = an_optimizer()
    weight = one.param_groups[0]["params"][0]

    def closure() -> float:
        weight.grad = torch.full((2,), 3.0)
        return 7.0

    step: Callable[..., Any] = one.step
    assert (step(closure=closure) if by_name else step(closure)) == 7.0
    assert seen == [(1.0, 3.0)] and weight.tolist() == [-0.5, -0.5]
    step(None)
    assert len(seen) == 2


def test_a_closure_may_register_the_first_function() -> None:
    """The first batch of a program is in the closure of its first step."""
    seen: list[Optimizer] = []
    optimizer_steps.watch()
    an_optimizer().step(lambda: optimizer_steps.call_before_each_step(seen.append))
    assert len(seen) == 1


def test_they_are_called_after_each_call_of_a_closure() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    one = torch.optim.LBFGS([weight], max_iter=3)
    seen: list[float] = []
    optimizer_steps.call_before_each_step(lambda _optimizer: seen.append(0.0))
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        one.zero_grad()
        loss = (weight**4).sum()
        loss.backward()
        return loss

    one.step(closure)
    assert calls == len(seen) > 1
