"""Trials of functions of a rank's tokens: they change nothing of the program's, and are made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.integration.losses import trials
from hf_ring_attn.integration.losses.local_logits import LocalLogits
from hf_ring_attn.integration.losses.origins import Origin

called: list[int] = []


@torch.library.custom_op("hf_ring_attn_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    called.append(x.numel())
    return x * 2


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_known", {})


def local(trains: bool = True) -> LocalLogits:
    origin = Origin(Ring.simulated(2, 0), rows=2, tokens=8, padding=[], trains=True)
    return LocalLogits.of(torch.rand(2, 8, 11, requires_grad=trains) * 1, origin)


def test_a_generator_of_the_program_gives_the_same_numbers() -> None:
    drawn, alone = (torch.Generator().manual_seed(1) for _ in range(2))
    torch.bernoulli(local(trains=False), generator=drawn)
    torch.bernoulli(torch.rand(2, 8, 11), generator=alone)
    assert torch.equal(drawn.get_state(), alone.get_state())


def test_torchs_random_numbers_are_the_same() -> None:
    states = []
    for x in (local(), torch.rand(2, 8, 11)):
        torch.manual_seed(1)
        torch.nn.functional.gumbel_softmax(x, dim=-1)
        torch.nn.functional.alpha_dropout(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_custom_operator_is_called_once() -> None:
    """It may count its calls, or talk to other ranks."""
    called.clear()
    doubled(local(trains=False))
    assert called == [176]


@pytest.fixture
def on_another_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.usefixtures("on_another_device")
def test_a_default_device_is_not_that_of_trials() -> None:
    x = torch.rand(2, 8, 11, device="cpu")
    assert trials.tried(torch.softmax, (x, 1), {}, x.shape, 1) == "mixed"
    assert trials.tried(torch.softmax, (x, 2), {}, x.shape, 1) == ""


def test_numbers_that_are_new_in_each_step_need_no_trial() -> None:
    for step in range(1, 4):
        _ = local() * step / (3 * step)
    assert not trials._known


def test_states_as_wide_as_a_rank_has_tokens() -> None:
    x = torch.rand(2, 8, 8)
    assert trials.tried(torch.mean, (x, 1), {}, x.shape, 1) == "summed"
    assert trials.tried(torch.mean, (x, 2), {}, x.shape, 1) == ""
    assert trials.tried(torch.softmax, (x, 1), {}, x.shape, 1) == "mixed"
    assert trials.tried(torch.softmax, (x, 2), {}, x.shape, 1) == ""


@pytest.mark.parametrize("few", [1, 3, 5])
def test_a_row_of_few_tokens_says_nothing_of_a_longer_one(few: int) -> None:
    """What could not be tried was taken for a function of each token by itself, in all rows of up to 64 tokens."""
    for tokens, want in [(few, ""), (32, "mixed"), (few, ""), (40, "mixed")]:
        x = torch.rand(2, tokens, 11)
        assert trials.tried(smoothed, (x,), {}, x.shape, 1) == want


def smoothed(x: Tensor) -> Tensor:
    """A mean over windows of six tokens, of which a row must have one."""
    return torch.nn.functional.pad(x.unfold(1, 6, 1).mean(-1), (0, 0, 5, 0))


def test_arguments_by_name_and_in_lists_are_told_apart() -> None:
    x = torch.rand(2, 8, 11)
    assert trials.tried(torch.softmax, (x,), {"dim": 1}, x.shape, 1) == "mixed"
    assert trials.tried(torch.softmax, (x,), {"dim": 2}, x.shape, 1) == ""
    assert trials.tried(torch.amax, (x, [1]), {}, x.shape, 1) == "reduced"
    assert trials.tried(torch.amax, (x, [2]), {}, x.shape, 1) == ""


def test_a_number_of_tokens_is_noted_once() -> None:
    """Each product of one by itself doubled their number."""
    x: Tensor = local(trains=False)
    x = x - x.mean()
    for _ in range(12):
        x = x * x
    assert len(vars(x)["past"].statistics) == 1


def test_sums_by_index_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    where, sums = torch.tensor([0, 2] * 8), torch.ones(3)
    for call in (torch.index_add, torch.Tensor.index_add_, torch.scatter_add):
        monkeypatch.setattr(trials, "_known", {})
        assert trials.tried(call, (sums, 0, where, torch.rand(16)), {}, torch.Size([16]), 0) == "summed"
    assert trials.tried(torch.Tensor.cumsum_, (torch.rand(16), 0), {}, torch.Size([16]), 0) == "mixed"
    assert trials.tried(torch.Tensor.mul_, (torch.rand(16), torch.rand(16)), {}, torch.Size([16]), 0) == ""
    assert torch.equal(sums, torch.ones(3))
