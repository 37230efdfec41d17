"""What compiled layers keep for each other: theirs are the bits of layers that gather for themselves, whatever a model
does between them, and whatever a compiler does with its memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.attention.call import Call, RingOptions
from hf_ring_attn.attention.op import attend
from hf_ring_attn.comm.ring import LOCAL, Pending, Ring
from hf_ring_attn.kernels import Params
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.traffic import ComparedKV, GatheredKV, LayerRole
from hf_ring_attn.traffic.gathered_kv import COMPARED, LAST, MAKES, TAKES, KVGroup, number_tensor
from tests.attention.test_compile import plan_of, share
from tests.helpers.checks import Ranks

# ---- three layers in one graph ---------------------------------------------------------------------------------------

Between = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def same(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k, v


def copied(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.clone(), v.clone()


def other_keys(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k * 2, v


def other_values(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k, v + 1


def in_place(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.mul_(2), v


def one_token_of_the_last_rank(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    there = dist.get_rank() + 1 == dist.get_world_size()
    return torch.cat([k[:, :1] * (1 + there), k[:, 1:]], 1), v


def layers(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, roles: Sequence[LayerRole | None], between: Between
) -> tuple[Tensor, Tensor]:
    """Two whose outputs the third's queries depend on; their keys and values are computed here, so that their memory
    is the compiler's."""
    k, v = k + 1, v - 1
    for number, role in enumerate(roles):
        if number == 2:
            k, v = between(k, v)
        q, lse = attend(Call(q, k, v, plan, Params(0.3), RingOptions("reference")), role)
        q = torch.nn.functional.pad(q, (0, 2))
    return q, lse


def three(between: Between, backend: str, gradients: bool) -> tuple[bool, list[int], list[int]]:
    """Whether the bits are those without roles, uncompiled; gathers and comparisons of the compiled ones."""
    torch._dynamo.reset()
    received: dict[str, int] = {}
    gather = Ring.gather

    def counting(ring: Ring, x: Tensor, doing: str = "gathered keys and values") -> Pending:
        received[doing] = received.get(doing, 0) + 1
        return gather(ring, x, doing)

    quick = torch.compile(layers, fullgraph=True, backend=backend)
    equal, gathers, comparisons = True, [], []
    for seed, documents in enumerate([[24], [10, 14]]):
        plan, answers = plan_of(documents), []
        compared = ComparedKV()
        roles = [LayerRole(compared.number, number_tensor(role)) for role in (MAKES, TAKES, LAST)]
        for function, told in ((layers, [None] * 3), (quick, roles)):
            leaves = share(seed)
            q, k, v = leaves
            with mock.patch.object(Ring, "gather", counting), torch.set_grad_enabled(gradients):
                received.clear()
                out, lse = function(q, k, v, plan, told, between)
                found = [out, lse]
                if gradients:
                    found += torch.autograd.grad(out.square().sum(), leaves)
            answers.append(found)
        equal &= all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
        gathers.append(received["gathered keys and values"])
        comparisons.append(received[COMPARED])
        assert not compared._made
    return equal, gathers, comparisons


GROUPED = 4
"""Messages of a gather: keys and values of two groups of heads."""

BETWEEN: dict[Between, int] = {
    same: 1, copied: 1, other_keys: 2, other_values: 2, in_place: 2, one_token_of_the_last_rank: 2,
}  # fmt: skip
"""How many of the three must gather."""


CASES = [
    pytest.param(
        between, backend, gradients, id=f"{between.__name__}, {backend}, {'gradients' if gradients else 'none'}",
        marks=[] if backend == ("eager" if between is in_place else "aot_eager") else pytest.mark.full,
    )
    for between in BETWEEN
    for backend, gradients in (("aot_eager", True), ("eager", False), ("inductor", False), ("inductor", True))
    if not (gradients and between is in_place)  # which torch refuses: the backward needs what it overwrites
]  # fmt: skip


@pytest.mark.parametrize(("between", "backend", "gradients"), CASES)
@pytest.mark.turns
def test_a_layer_takes_what_is_the_same_on_every_rank(
    ranks: Ranks, between: Between, backend: str, gradients: bool
) -> None:
    """Without gradients inductor may write what comes between into the memory of the keys themselves."""
    for found in ranks(2).run(three, between, backend, gradients):
        assert found == (True, [GROUPED * BETWEEN[between]] * 2, [2, 2])


# ---- what is the same, and how long ----------------------------------------------------------------------------------

RING, PLAN = Ring(LOCAL), object()


def made(dtype: torch.dtype = torch.float32) -> tuple[ComparedKV, Tensor, Tensor, GatheredKV]:
    """Of one that has gathered: its keys, values and what it kept."""
    compared, k, v = ComparedKV(), torch.randn(2, 3, 2, 4).to(dtype), torch.randn(2, 3, 2, 5).to(dtype)
    k[0, 0, 0, 0] = 0
    kept = compared.find(MAKES, RING, PLAN, k, v)
    assert kept is not None
    list(kept.filling([KVGroup(slice(0, 2), k, v)]))
    return compared, k, v, kept


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_same_bits_are_the_same(dtype: torch.dtype) -> None:
    compared, k, v, kept = made(dtype)
    assert compared.find(TAKES, RING, PLAN, k, v) is kept
    assert compared.find(TAKES, RING, PLAN, k.clone(), v.transpose(1, 2).contiguous().transpose(1, 2)) is kept


def test_other_bits_are_not() -> None:
    compared, k, v, kept = made()
    zero = k.clone()
    zero[0, 0, 0, 0] = -0.0
    assert torch.equal(zero, k)
    others: list[tuple[Any, Tensor, Tensor]] = [
        (PLAN, zero, v), (PLAN, k * 2, v), (PLAN, k, v * 2), (object(), k, v), (PLAN, k.double(), v.double()),
        (PLAN, k[:, :2], v[:, :2]), (PLAN, k, v[..., :4]), (PLAN, k[:, :, :1], v[:, :, :1]),
    ]  # fmt: skip
    assert [compared.find(TAKES, RING, *other) for other in others] == [None] * len(others)
    assert compared.find(TAKES, RING, PLAN, k, v) is kept


@pytest.mark.parametrize("which", ["keys", "values"])
def test_what_was_changed_in_place_is_not(which: str) -> None:
    compared, k, v, _ = made()
    {"keys": k, "values": v}[which].data.mul_(2)  # as a compiler's code does it: no count of changes tells
    assert compared.find(TAKES, RING, PLAN, k, v) is None


def test_what_has_not_come_is_not_taken() -> None:
    compared, k, v = ComparedKV(), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    assert compared.find(TAKES, RING, PLAN, k, v) is None
    assert compared.find(MAKES, RING, PLAN, k, v) is not None  # whose gather an error ended
    assert compared.find(TAKES, RING, PLAN, k, v) is None


def test_it_goes_with_the_last_layer_whatever_that_attends_to() -> None:
    compared, k, v, kept = made()
    gone = weakref.ref(kept)
    del kept
    assert compared.find(LAST, RING, PLAN, k, v) is gone() is not None
    assert gone() is None
    compared, k, v, _ = made()
    assert compared.find(LAST, RING, PLAN, k * 2, v) is None
    assert compared.find(TAKES, RING, PLAN, k, v) is None


def test_it_goes_in_a_backward() -> None:
    compared, k, v, _ = made()
    found: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: found.extend(compared.find(role, RING, PLAN, k, v) for role in (MAKES, TAKES)))
    x.sum().backward()
    assert found == [None, None]
    assert compared.find(TAKES, RING, PLAN, k, v) is None
