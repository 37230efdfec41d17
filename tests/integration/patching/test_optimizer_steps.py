"""Functions are called before each step of any optimizer of torch, once each, until they are forgotten."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_an_error_of_a_function_ends_the_step_before_it() -> None:
    def refuse(_optimizer: Optimizer) -> None:
        raise ValueError("not averaged")

    optimizer_steps.call_before_each_step(refuse)
    one = an_optimizer()
    with pytest.raises(ValueError, match="not averaged"):
        one.step()
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
