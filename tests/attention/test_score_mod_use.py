"""score_mod as people use it: where its tensors may come from, what is refused, and in which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.attention.kernel_choice import agree_on_scores
from hf_ring_attn.biases import Alibi, RelativeBias
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.config import RingConfig
from hf_ring_attn.errors import BadScoreMod, RanksDiffer, RefusedElsewhere, ScoreModChanged, UnsupportedAttention
from hf_ring_attn.kernels import ScoreMod
from tests.helpers.checks import Ranks
from tests.helpers.rank_functions import held, qkv
from tests.helpers.score_mods import places

PLACES = list(places())


def out_of(*args: Any, **kwargs: Any) -> Tensor:
    out = ring_attention(*args, **kwargs)
    assert isinstance(out, Tensor)
    return out


def double() -> dict[str, Tensor]:
    return {name: x.double() for name, x in qkv().items()}


# ---- where tensors come from -------------------------------------------------------------------------------------


def gradient_of(place: str) -> Tensor:
    function, source = places()[place]
    mine = held(8, dist.get_rank(), dist.get_world_size())
    out = out_of(**{name: x[:, mine] for name, x in double().items()}, score_mod=function)
    (gradient,) = torch.autograd.grad(out.square().sum(), source)
    return gradient


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_captured_tensors_may_come_from_anywhere(ranks: Ranks, size: int, place: str) -> None:
    x, slopes = double(), places()["closure"][1].detach().requires_grad_()
    (want,) = torch.autograd.grad(out_of(**x, score_mod=lambda s, b, h, i, j: s * slopes[h]).square().sum(), slopes)
    scores = torch.einsum("bthd,bshd->bhts", x["q"], x["k"].repeat_interleave(2, 2)) * 6**-0.5 * slopes[:, None, None]
    hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("bhts,bshd->bthd", weights, x["v"].repeat_interleave(2, 2))
    (by_hand,) = torch.autograd.grad(out.square().sum(), slopes)
    torch.testing.assert_close(want, by_hand, rtol=1e-12, atol=0)

    got = torch.stack(ranks(size).run(gradient_of, place)).sum(0) / (2 if place == "computed from a parameter" else 1)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_gradients_are_for_those_who_ask() -> None:
    x, slopes, table = qkv(), torch.rand(4), torch.rand(16, requires_grad=True)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * slopes[h] + table[q_idx + kv_idx]

    out_of(**x, score_mod=mod).square().sum().backward()
    assert slopes.grad is None and table.grad is not None
    with torch.no_grad():
        assert not out_of(**x, score_mod=mod).requires_grad
    with torch.inference_mode():
        inferred = out_of(**x, score_mod=mod)
    assert torch.equal(inferred, out_of(**x, score_mod=mod).detach())
    assert not out_of(**x, score_mod=Alibi(4)).requires_grad


@pytest.mark.parametrize("batch", [0, 2])
def test_rows_of_no_tokens_have_gradients_of_zero(batch: int) -> None:
    bias = RelativeBias(4, 8, 12)
    out = out_of(**qkv(0, batch=batch), score_mod=bias)
    assert out.shape == (batch, 0, 4, 5)
    (gradient,) = torch.autograd.grad(out.sum(), bias.weight)
    assert gradient.shape == (8, 4) and not gradient.any()


def test_a_parameter_that_is_changed_before_backward_is_noticed() -> None:
    bias = RelativeBias(4, 8, 12)
    out = out_of(**qkv(), score_mod=bias)
    with torch.no_grad():
        bias.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def again() -> list[bool]:
    """Backward twice, in a checkpoint, and under autocast: the bits of the first time."""
    mine = held(8, dist.get_rank(), dist.get_world_size())
    bias = RelativeBias(4, 8, 12)
    leaves = {name: x[:, mine].requires_grad_() for name, x in qkv().items()}
    wanted = [*leaves.values(), bias.weight]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return out_of(q, k, v, score_mod=bias).square().sum()

    loss = layer(**leaves)
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    others = [torch.autograd.grad(loss, wanted)]
    for reentrant in (False, True):
        total: Tensor = checkpoint(layer, *leaves.values(), use_reentrant=reentrant)
        for x in wanted:
            x.grad = None
        total.backward()
        others.append(tuple(x.grad for x in wanted if x.grad is not None))
    with torch.autocast("cpu", torch.bfloat16):
        others.append(torch.autograd.grad(layer(**leaves), wanted))
    return [all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) for other in others]


@pytest.mark.parametrize("size", [1, 2])
def test_backward_again_checkpoints_and_autocast_give_the_same_bits(ranks: Ranks, size: int) -> None:
    assert ranks(size).run(again) == [[True] * 4] * size


@pytest.mark.turns
def test_under_a_compiler_the_graph_breaks_and_the_numbers_stay() -> None:
    bias = RelativeBias(4, 8, 12)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.silu(out_of(q * 2, k, v, score_mod=bias, length=8))

    x, answers = qkv(), []
    torch._dynamo.reset()
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        out = function(**x)
        answers.append([out, *torch.autograd.grad(out.sum(), bias.weight)])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_deterministic_reaches_the_function() -> None:
    seen = []

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return score

    x = {name: value.requires_grad_() for name, value in qkv().items()}
    for deterministic in (True, False):
        out_of(**x, score_mod=mod, config=RingConfig(deterministic=deterministic)).sum().backward()
        assert set(seen) == {deterministic}
        seen.clear()
    assert not torch.are_deterministic_algorithms_enabled()


# ---- refusals ------------------------------------------------------------------------------------------------------

NEED = (
    "It must be made of torch functions of five scalars (score, b, h, q_idx, kv_idx), as in FlexAttention, without if, "
    "float() or .item() on them, and return one floating-point number."
)
TABLE = torch.rand(4, 5, requires_grad=True)


def row_of_a_table(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + TABLE[h]


def a_number(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
    return 1.0


def a_truth(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def branching(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score if q_idx >= kv_idx else -score


def reading(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + float(h)


def drawing(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return nn.functional.dropout(score, 0.5)


def four(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
    return score


def writing(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    TABLE.detach()[0].copy_(score)
    return score


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (row_of_a_table, "returned torch.float64 (5,) for one score"),
    (a_number, "returned float for one score"),
    (a_truth, "returned torch.bool () for one score"),
    (branching, "cannot be run for many scores at once (.*control flow"),
    (reading, "cannot be run for many scores at once (.*item"),
    (drawing, "cannot be run for many scores at once (.*random"),
    (writing, "cannot be run for many scores at once (.*inplace"),
    (four, "cannot be run for many scores at once (four() takes 4 positional arguments but 5 were given)"),
]


@pytest.mark.parametrize(("function", "text"), REFUSED, ids=[row[0].__name__ for row in REFUSED])
def test_what_is_no_function_of_one_score_is_refused(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(BadScoreMod) as error:
        ring_attention(**qkv(), score_mod=function)
    told = " ".join(str(error.value).split())
    assert told.startswith(f"the score_mod {function.__name__} ")
    assert told.endswith(NEED)
    assert re.search(re.escape(text).replace(r"\.\*", ".*"), told), told


@pytest.mark.parametrize("learned", [True, False])
def test_a_gradient_that_would_be_lost_is_refused(learned: bool) -> None:
    factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=learned)

    def hiding(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # as compiled code and extensions do
            return score * factor

    if not learned:
        assert torch.equal(out_of(**qkv(), score_mod=hiding), out_of(**qkv(), score_mod=lambda s, *_: s * factor))
        return
    with pytest.raises(BadScoreMod) as error:
        ring_attention(**qkv(), score_mod=hiding)
    assert str(error.value) == (
        "the score_mod test_a_gradient_that_would_be_lost_is_refused.<locals>.hiding uses a tensor of shape () that "
        "requires a gradient inside something that cannot be looked into (such as compiled code), or not in every "
        f"call. {NEED}"
    )


def test_a_function_that_takes_another_tensor_later_is_refused() -> None:
    first, second = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    calls: list[int] = []

    def changing(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        calls.append(1)
        return score * (first if len(calls) < 5 else second)[h]

    out = out_of(**qkv(), score_mod=changing)
    assert len(calls) == 4, "to see what it uses, that it has gradients, its graph, forward"
    with pytest.raises(ScoreModChanged, match="changing changed between forward and backward: it uses"):
        torch.autograd.grad(out.sum(), first)


class Reads(nn.Module):
    """A function of what may be changed after the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.factor, self.places = nn.Parameter(torch.rand(4)), 2.0, torch.arange(8)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - self.slopes[h] * self.factor * (q_idx - self.places[kv_idx])


CHANGES: dict[str, tuple[Callable[[Reads], object], str]] = {
    "a number": (lambda mod: setattr(mod, "factor", 3.0), "it computes something else"),
    "numbers in place": (lambda mod: mod.places.add_(1), "a tensor of shape (8,) that it uses was written"),
    "another tensor": (lambda mod: setattr(mod, "places", torch.arange(1, 9)), "it uses other tensors"),
    "another parameter": (lambda mod: setattr(mod, "slopes", nn.Parameter(torch.rand(4))), "it uses other tensors"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_function_that_changed_before_the_backward_is_refused(what: str) -> None:
    """The backward runs it again: with what it is by then, gradients would be those of another attention."""
    change, text = CHANGES[what]
    mod = Reads()
    out = out_of(**qkv(), score_mod=mod)
    change(mod)
    with pytest.raises(ScoreModChanged) as error:
        out.sum().backward()
    assert str(error.value).startswith(
        f"the score_mod Reads changed between forward and backward: {text}. The backward runs it again, "
    )


def test_a_tensor_made_anew_with_the_same_numbers_is_no_change() -> None:
    mod = Reads()
    out = out_of(**qkv(), score_mod=mod)
    mod.places = torch.arange(8)
    assert torch.autograd.grad(out.sum(), mod.slopes)[0].any()


@pytest.mark.parametrize("kernel", ["flash4", "flash2"])
def test_a_kernel_without_score_mod_says_so(kernel: str) -> None:
    with pytest.raises(UnsupportedAttention) as error:
        ring_attention(**qkv(), score_mod=Alibi(4), config=RingConfig(kernel=kernel))
    assert "it has no score_mod" in str(error.value)


def called_differently() -> str:
    mine = held(8, dist.get_rank(), dist.get_world_size())
    mod = Alibi(4, learnable=dist.get_rank() == 1)
    try:
        ring_attention(**{name: x[:, mine] for name, x in qkv().items()}, score_mod=mod)
    except RanksDiffer as error:
        return str(error)
    return ""


def test_ranks_with_other_functions_all_say_so(ranks: Ranks) -> None:
    first, second = ranks(2).run(called_differently)
    assert first == second
    assert first.startswith("the ranks of one ring must hold the same score_mod, but got rank 0: ")


def broken_on_the_second() -> str:
    """A function whose second rank raises an error that is no refusal, once gradients are asked for."""

    def function(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if dist.get_rank() == 1 and torch.is_grad_enabled():
            raise ZeroDivisionError("by hand")
        return score

    mine = held(8, dist.get_rank(), dist.get_world_size())
    with pytest.raises((ZeroDivisionError, RefusedElsewhere)) as raised:
        ring_attention(**{name: x[:, mine] for name, x in qkv().items()}, score_mod=function)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_any_error_of_a_rank_before_its_attention_ends_all_ranks(ranks: Ranks) -> None:
    """Only refusals reached the other ranks; for another error they waited until the time-out."""
    first, second = ranks(2).run(broken_on_the_second)
    assert second == "ZeroDivisionError: by hand"
    assert first.startswith("RefusedElsewhere: ") and "rank 1: ZeroDivisionError: by hand" in first


class Shifted:
    """A score_mod as a method: each access makes another object, equal to those before."""

    def __init__(self) -> None:
        self.by = torch.tensor(0.5)

    def score(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.by


def collectives_of_a_method() -> list[int]:
    """How many messages each of three comparisons of a method takes on this rank; the first one keeps the graphs."""
    shifted, ring, kept, sent = Shifted(), Ring.of(None), [], list[int]()
    with mock.patch.object(Ring, "agree", return_value=[]) as agree:
        for _ in range(3):
            mod = ScoreMod.of(shifted.score, torch.device("cpu"))
            agree_on_scores(ring, mod, torch.device("cpu"))
            sent.append(agree.call_count)
            kept += [mod] if dist.get_rank() == 0 else []
            del mod
    return sent


def test_ranks_compare_a_method_as_often_whatever_one_of_them_keeps(ranks: Ranks) -> None:
    """A rank that held the graph of a loss found the method known, and the others waited for it."""
    assert ranks(2).run(collectives_of_a_method) == [[1, 1, 1]] * 2
