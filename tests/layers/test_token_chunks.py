"""Functions of tokens over chunks: values, gradients, random numbers, second-order gradients, memory of a recompute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_ring_attn import errors
from hf_ring_attn.layers.token_chunks import run_in_chunks
from tests.helpers.live_bytes import peak_bytes


class Function:
    """Two linear layers with dropout between them; the second output is a number of each token."""

    name = "a function"

    def __init__(self, dropout: float = 0.0) -> None:
        self.checked, self.dropout, self.rows = False, dropout, list[int]()

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.rows.append(len(x))
        first, second = weights
        y = nn.functional.dropout((x @ first).tanh(), self.dropout)
        return y @ second, y.argmax(-1)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 3), (3, 5), (5, 2))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def result(function: Function, x: Tensor, *weights: Tensor) -> Tensor:
    return run_in_chunks(function, x, weights, 3)[0]


def test_values_and_gradients_are_those_of_all_tokens() -> None:
    x, *weights = inputs()
    got, want = run_in_chunks(Function(), x, weights, 3), Function().run(x, weights)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    found, expected = (torch.autograd.grad(y.sin().sum(), (x, *weights)) for y in (got[0], want[0]))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("weights_of", [lambda a, b: a + b, lambda a, b: a.sum() * b], ids=["terms", "a total"])
def test_gradients_that_autograd_gives_as_one_tensor_or_expanded_are_added_up(weights_of: Any) -> None:
    """Terms of a sum got later chunks twice; a weight of which the total is used ended in a RuntimeError."""

    class OfTwo(Function):
        def run(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return ((x @ weights_of(*weights)).tanh(),)

    x, first, _ = inputs()
    weights = [first, first.detach().flip(0).requires_grad_()]
    got, want = run_in_chunks(OfTwo(), x, weights, 3)[0], OfTwo().run(x, weights)[0]
    found, expected = (torch.autograd.grad(y.sin().sum(), (x, *weights)) for y in (got, want))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_frozen_weights_and_inputs_have_no_gradient() -> None:
    x, first, second = inputs()
    for frozen in ((x,), (first,), (x, second)):
        for one in (x, first, second):
            one.requires_grad_(all(one is not other for other in frozen))
        trained = [one for one in (x, first, second) if one.requires_grad]
        got = torch.autograd.grad(result(Function(), x, first, second).sum(), trained)
        want = torch.autograd.grad(Function().run(x, (first, second))[0].sum(), trained)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


def test_the_backward_draws_what_the_forward_drew() -> None:
    x, first, second = inputs()

    def loss(shift: float = 0.0) -> Tensor:
        torch.manual_seed(3)
        return result(Function(0.5), x, first, second + shift).square().sum()

    plain = loss()
    before = torch.get_rng_state()
    (gradient,) = torch.autograd.grad(plain, second)
    assert torch.equal(before, torch.get_rng_state()), "the program's next number is another one"
    slope = float(loss(1e-6) - loss(-1e-6)) / 2e-6
    assert float(gradient.sum()) == pytest.approx(slope, rel=1e-7)


def test_a_checkpoint_does_not_run_the_function_for_its_output() -> None:
    x, *weights = inputs()
    function = Function()
    y = checkpoint(lambda x: result(function, x, *weights), x, use_reentrant=False)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert function.rows == [2, 3, 3, 1, 2, 3, 3, 1], "a sample of two before each time"


def test_a_backward_holds_the_gradients_of_one_chunk() -> None:
    """Beside their sums in float32, two units; it held those of the chunk before, too, another unit."""
    sizes = ((8, 64), (64, 900), (900, 64))
    x, first, second = (torch.ones(size, dtype=torch.bfloat16).requires_grad_() for size in sizes)
    y = result(Function(), x, first, second).sum()
    assert peak_bytes(y.backward) < 3.5 * (first.nbytes + second.nbytes)


def test_a_second_gradient_is_refused() -> None:
    x, *weights = inputs()
    (gradient,) = torch.autograd.grad(result(Function(), x, *weights).square().sum(), x, create_graph=True)
    with pytest.raises(errors.SecondGradient, match="layers in chunks of tokens"):
        gradient.sum().backward()


def test_a_weight_that_was_not_given_is_refused() -> None:
    x, first, second = inputs()

    class Captures(Function):
        def run(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return super().run(x, (weights[0], second))

    y = run_in_chunks(Captures(), x, (first,), 3)[0]
    with pytest.raises(errors.HiddenWeight, match="a trained tensor of shape"):
        y.sum().backward()


def test_a_weight_that_changed_since_the_forward_is_refused() -> None:
    x, first, second = inputs()
    y = result(Function(), x, first, second)
    with torch.no_grad():
        first += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
