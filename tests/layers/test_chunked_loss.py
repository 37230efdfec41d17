"""The cross entropy in chunks against that of all logits, in float64: the loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_ring_attn import errors
from hf_ring_attn.layers import chunked_loss
from hf_ring_attn.layers.chunked_loss import CrossEntropy, LogitsOf, chunked_cross_entropy
from hf_ring_attn.testing import relative_error
from tests.helpers.live_bytes import Largest, peak_bytes

TOKENS, WIDTH, VOCABULARY = 23, 6, 41
EXACT = 1e-12


def softcapped(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return 3 * torch.tanh(functional.linear(hidden, *weights) / 3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``labelled``: the tokens that have labels; ``trained``: which of hidden states, weight and bias are."""

    why: str
    rows: int = 5
    options: CrossEntropy = field(default_factory=lambda: CrossEntropy(reduction="sum"))
    labelled: range = range(3, TOKENS)
    trained: tuple[bool, bool, bool] = (True, True, True)
    logits_of: LogitsOf = lambda hidden, weights: functional.linear(hidden, *weights)


CASES = [
    Case(why="a sum"),
    Case(why="a mean", options=CrossEntropy()),
    Case(why="one chunk", rows=100),
    Case(why="one token a chunk", rows=1),
    Case(why="smoothed", options=CrossEntropy("sum", label_smoothing=0.3)),
    Case(why="a smoothed mean", options=CrossEntropy(label_smoothing=0.3)),
    Case(why="no label in some chunks", labelled=range(14, 15)),
    Case(why="no label at all", labelled=range(0)),
    Case(why="softcapped", logits_of=softcapped),
    Case(why="a frozen head", trained=(True, False, False)),
    Case(why="a head alone", trained=(False, True, True)),
    Case(why="no gradient", trained=(False, False, False)),
]


def answer(case: Case, loss_of: Callable[..., Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The loss and the gradients, of those that are trained."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)]
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    labels = torch.full((TOKENS,), -100)
    where = list(case.labelled)
    labels[where] = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)[where]
    for x, trained in zip(inputs, case.trained, strict=True):
        x.requires_grad_(trained)
    loss = loss_of(case, *inputs, labels)
    if loss.requires_grad:
        (loss * 0.37).backward()
    return [loss.detach(), *(x.grad for x in inputs if x.grad is not None)]


def naive(case: Case, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(case.logits_of(hidden, (weight, bias)), labels, **vars(case.options))


def chunked(case: Case, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return chunked_cross_entropy(case.logits_of, hidden, (weight, bias), labels, case.rows, case.options)


def worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    assert len(got) == len(want)
    return max(
        float((a - b).abs().max()) if not b.any() else relative_error(a, b) for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
def test_chunks_give_the_loss_and_gradients_of_all_logits(case: Case) -> None:
    got = answer(case, chunked)
    assert len(got) == 1 + sum(case.trained)
    assert worst(got, answer(case, naive)) < EXACT


def test_weights_whose_gradients_autograd_gives_as_one_tensor_have_each_its_own() -> None:
    """Terms of a sum. Their float32 sums were one tensor, which each chunk was added to twice."""
    case = Case(why="", logits_of=lambda hidden, weights: functional.linear(hidden, weights[0] + weights[1]))
    generator = torch.Generator().manual_seed(3)
    sizes = [(TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY, WIDTH)]
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    hidden, one, other = inputs
    losses = [loss_of(case, hidden, one, other, labels) for loss_of in (chunked, naive)]
    got, want = (torch.autograd.grad(loss, inputs) for loss in losses)
    assert worst(got, want) < EXACT


def test_a_mean_of_no_labels_is_nan_as_that_of_all_logits() -> None:
    case = Case(why="", labelled=range(0), options=CrossEntropy())
    assert answer(case, chunked)[0].isnan() and answer(case, naive)[0].isnan()


def _ignores_none(logits: Tensor, labels: Tensor, ignore_index: int, **options: Any) -> Tensor:
    return functional.cross_entropy(logits, labels.clamp(min=0), **options)


DEFECTS: dict[str, tuple[str, Any]] = {
    "gradients of one chunk alone": ("add_wide", lambda total, gradient: gradient),
    "the factor of the loss left out": ("_scaled", lambda x, factor, dtype, rows: x.to(dtype)),
    "sums in 16 bits": (
        "add_wide",
        lambda total, gradient: gradient.bfloat16() if total is None else total + gradient.bfloat16(),
    ),
    "a loss that ignores no label": ("cross_entropy", _ignores_none),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_seen(defect: str) -> None:
    name, wrong = DEFECTS[defect]
    with mock.patch.object(chunked_loss, name, wrong):
        assert worst(answer(CASES[0], chunked), answer(CASES[0], naive)) > 1e-4


def test_no_tensor_of_tokens_times_vocabulary_is_made() -> None:
    found = {}
    for loss_of in (naive, chunked):
        with Largest() as largest:
            answer(CASES[0], loss_of)
        found[loss_of.__name__] = largest.values
    assert found == {"naive": TOKENS * VOCABULARY, "chunked": VOCABULARY * WIDTH}  # the head's gradient


def test_the_gradients_of_the_head_are_held_for_one_chunk() -> None:
    """Beside their sum in float32, two units; those of the chunk before were held, too, another unit."""
    hidden, weight = (torch.ones(size, 64, dtype=torch.bfloat16).requires_grad_() for size in (8, 999))
    labels = torch.arange(8)

    def loss() -> Tensor:
        return chunked_cross_entropy(lambda x, head: x @ head[0].T, hidden, [weight], labels, 2, CrossEntropy())

    assert peak_bytes(loss) < 3.5 * weight.nbytes


def test_the_gradient_is_rounded_once_in_sixteen_bits() -> None:
    """Chunks' gradients of the head are added up in float32: else the error grows with their number."""
    case = Case(why="", rows=1, labelled=range(TOKENS))
    exact = answer(case, naive)
    of_chunks, of_all = (
        relative_error(answer(case, loss_of, torch.bfloat16)[2].double(), exact[2]) for loss_of in (chunked, naive)
    )
    assert of_chunks < 1.5 * of_all


def test_offloading_does_not_see_what_a_chunk_saves() -> None:
    """Nor does a checkpoint around the model, which would be recomputed for each chunk."""
    seen: list[int] = []

    def pack(x: Tensor) -> Tensor:
        seen.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        answer(CASES[0], chunked)
    assert max(seen) == VOCABULARY * WIDTH and seen.count(5 * VOCABULARY) == 0


@pytest.mark.parametrize("trained", [(True, False), (False, True), (True, True)])
def test_gradients_are_not_differentiated_again(trained: tuple[bool, bool]) -> None:
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    inputs = [x.requires_grad_() for x, is_trained in zip((hidden, weight), trained, strict=True) if is_trained]
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    loss = chunked_cross_entropy(lambda x, w: functional.linear(x, *w), hidden, [weight], labels, 5, CrossEntropy())
    gradient, *_ = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(errors.SecondGradient):
        gradient.sum().backward()
    loss = chunked_cross_entropy(lambda x, w: functional.linear(x, *w), hidden, [weight], labels, 5, CrossEntropy())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):  # what it saved is freed
        loss.backward()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_batch_without_labels_trains_nothing(reduction: str) -> None:
    """Trainer divides its sum by a count of 0: the loss is nan, gradients of cross_entropy are zeros all the same."""
    inputs = [torch.randn(size, requires_grad=True) for size in ((5, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))]
    hidden, *weights = inputs
    labels, options = torch.full((5,), -100), CrossEntropy(reduction)
    for loss in (
        chunked_cross_entropy(lambda x, own: functional.linear(x, *own), hidden, weights, labels, 2, options),
        functional.cross_entropy(functional.linear(hidden, *weights), labels, reduction=reduction),
    ):
        gradients = torch.autograd.grad(loss / torch.tensor(0.0), inputs)
        assert bool(loss.isnan()) == (reduction == "mean")
        assert not any(bool(x.any()) for x in gradients)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_makes_no_gradients(guard: Callable[[], Any]) -> None:
    """A Function is told that weights need gradients, whatever the mode."""
    with guard(), mock.patch.object(torch.autograd, "grad", side_effect=AssertionError):
        (loss,) = answer(CASES[0], chunked)
    assert relative_error(loss.clone(), answer(CASES[0], naive)[0]) < EXACT
