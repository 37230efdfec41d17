"""Second derivatives of what ranks do together: refused in words, where torch would take some of them for zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import hf_ring_attn
from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.biases import Alibi
from hf_ring_attn.comm.first_order import first_order_only
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.errors import SecondGradient, UnsupportedTransform
from hf_ring_attn.layers.collectives import gather_sequence, sum_over_ring
from hf_ring_attn.layers.halo import RowShare, compute_with_halo
from hf_ring_attn.layers.head_parallel import compute_by_heads
from hf_ring_attn.sharding.layout import Layout
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt
from tests.helpers.models.tiny_models import tiny

LENGTH = 8


def rows() -> RowShare:
    ring = Ring.of(None)
    return RowShare(ring, Layout(LENGTH, ring.size, ring.rank), None)


def flat(x: Tensor) -> Tensor:
    return x.flatten(2)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ring attention": lambda x: ring_attention(x, x * 2, x, length=LENGTH),
    "ring attention with a score_mod": lambda x: ring_attention(x, x * 2, x, length=LENGTH, score_mod=Alibi(2)),
    "a layer that takes tokens of other ranks": lambda x: compute_with_halo(flat(x).square(), rows(), 1, torch.sin),
    "a layer whose ranks share heads": lambda x: compute_by_heads(rows(), [x], [], [], lambda a, b, c: a[0].square()),
    "a row that was gathered": lambda x: gather_sequence(x, rows().ring, rows().layout).square(),
    "a sum over the ring": lambda x: sum_over_ring(x, rows().ring).square(),
}


def penalty_of(what: str, plain: bool) -> tuple[Tensor, Tensor]:
    """An input, and a penalty on its gradient of a sum, that is linear, or of another loss."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    x = torch.randn(1, LENGTH // size, 2, 4, dtype=torch.float64, requires_grad=True)
    out = FUNCTIONS[what](x)
    (first,) = torch.autograd.grad(out.sum() if plain else out.square().sum(), x, create_graph=True)
    return x, first.square().sum() + x.sum()


WAYS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "backward": lambda x, penalty: penalty.backward(),
    "backward of inputs": lambda x, penalty: penalty.backward(inputs=[x]),
    "grad": lambda x, penalty: torch.autograd.grad(penalty, x),
    "grad with a graph": lambda x, penalty: torch.autograd.grad(penalty, x, create_graph=True),
    "grad of a product": lambda x, penalty: torch.autograd.grad(penalty * 2, [x], grad_outputs=penalty.detach()),
}
"""Ways to ask for a second derivative; torch prunes the graph for those that name their inputs."""


def twice(what: str, plain: bool) -> list[str]:
    """The refusals of a penalty on first gradients, whichever way it is differentiated."""
    texts = []
    for way in WAYS.values():
        try:
            way(*penalty_of(what, plain))
            texts.append("")
        except SecondGradient as error:
            texts.append(str(error))
    return texts


REFUSAL = "was differentiated again (create_graph=True"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_second_derivatives_are_refused(ranks: Ranks, what: str, plain: bool) -> None:
    for refusals in ranks(2).run(twice, what, plain):
        assert [f"a gradient of {what} {REFUSAL}" in text for text in refusals] == [True] * len(WAYS)


ATTENTIONS = [name for name in FUNCTIONS if "attention" in name]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("what", ATTENTIONS)
def test_on_one_device_too(what: str, plain: bool) -> None:
    assert [f"a gradient of {what} {REFUSAL}" in text for text in twice(what, plain)] == [True] * len(WAYS)


@pytest.mark.parametrize("what", ATTENTIONS)
def test_a_gradient_is_not_differentiated_by_the_one_that_came_in_either(what: str) -> None:
    x = torch.randn(1, LENGTH, 2, 4, requires_grad=True)
    out = FUNCTIONS[what](x)
    dout = torch.ones_like(out).requires_grad_()
    (first,) = torch.autograd.grad(out, x, dout, create_graph=True)
    with pytest.raises(SecondGradient):
        torch.autograd.grad(first.sum(), dout)


def test_sinks_and_captured_tensors_are_refused_a_second_derivative_too() -> None:
    x, sinks = torch.randn(1, LENGTH, 2, 4), torch.zeros(2, requires_grad=True)
    out = ring_attention(x, x, x, sinks=sinks)
    (first,) = torch.autograd.grad(out.sum(), sinks, create_graph=True)
    with pytest.raises(SecondGradient):
        torch.autograd.grad(first.sum(), sinks)
    bias = torch.zeros(2, requires_grad=True)
    out = ring_attention(x, x, x, score_mod=lambda score, b, h, i, j: score + bias[h] * (i - j))
    (first,) = torch.autograd.grad(out.square().sum(), bias, create_graph=True)
    with pytest.raises(SecondGradient):
        torch.autograd.grad(first.sum(), bias)


def test_under_checkpointing_too() -> None:
    x = torch.randn(1, LENGTH, 2, 4, requires_grad=True)
    out = checkpoint(FUNCTIONS["ring attention"], x, use_reentrant=False)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(SecondGradient):
        torch.autograd.grad(first.square().sum(), x)


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "dual": dual,
    "dual of a leaf": lambda f, x: dual(f, x.clone().requires_grad_()),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x[None]),
    "forward-mode jacobian": lambda f, x: torch.autograd.functional.jacobian(
        f, x, strategy="forward-mode", vectorize=True
    ),
    "compiled jvp": lambda f, x: torch.compile(
        lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),)), backend="aot_eager"
    )(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("what", ATTENTIONS)
def test_gradients_of_transforms_are_refused(what: str, transform: str) -> None:
    with pytest.raises(UnsupportedTransform, match=r"^ring attention was called inside forward-mode autograd"):
        TRANSFORMS[transform](FUNCTIONS[what], torch.randn(1, LENGTH, 2, 4))


def test_vmap_is_exact() -> None:
    x = torch.randn(3, 1, LENGTH, 2, 4)
    f = FUNCTIONS["ring attention"]
    assert torch.equal(torch.vmap(f)(x), torch.stack([f(one) for one in x]))


def over_documents(mapped: Tensor) -> Any:
    x = torch.ones(1, LENGTH // 2, 2, 4)
    return torch.vmap(lambda ids: ring_attention(x, x, x, documents=ids))(mapped.long())


def over_sinks(mapped: Tensor) -> Any:
    x = torch.ones(1, LENGTH // 2, 2, 4)
    return torch.vmap(lambda sinks: ring_attention(x, x, x, sinks=sinks))(mapped[:, :2])


def with_a_score_mod(mapped: Tensor) -> Any:
    rows = mapped[:, None, : LENGTH // 2, None, None].expand(-1, 1, -1, 2, 4)
    return torch.vmap(lambda x: ring_attention(x, x, x, score_mod=Alibi(2)))(rows)


def of_a_model(mapped: Tensor) -> Any:
    model: Any = tiny("llama", "ring_fp32")
    sharded = hf_ring_attn.shard({"input_ids": torch.ones(2, LENGTH, dtype=torch.int64)})
    inputs = {name: x for name, x in sharded.inputs.items() if name != "input_ids"}
    rows = model.get_input_embeddings()(sharded.inputs["input_ids"])[None].expand(len(mapped), -1, -1, -1)
    with sharded:
        return torch.vmap(lambda x: model(inputs_embeds=x, **inputs).logits)(rows)


def of_gradients(mapped: Tensor) -> Any:
    x = torch.ones(1, LENGTH // 2, 2, 4)
    return torch.func.grad(lambda scale: ring_attention(x * scale, x, x).sum())(mapped[0, 0])


HIDDEN: dict[Callable[[Tensor], Any], str] = {
    over_documents: "ring attention was called with documents inside a transform of torch.func such as vmap.",
    over_sinks: "ring attention was called with sinks inside",
    with_a_score_mod: "ring attention was called with score_mod inside",
    of_a_model: "LlamaForCausalLM was called in a ring inside",
    of_gradients: "ring attention was called inside forward-mode autograd or a gradient transform",
}


def refused(transform: Callable[[Tensor], Any]) -> tuple[str, str] | None:
    return attempt(transform, torch.zeros(3, LENGTH))


@pytest.mark.parametrize("transform", HIDDEN, ids=lambda transform: transform.__name__)
def test_a_transform_that_hides_values_is_refused_on_every_rank(ranks: Ranks, transform: Any) -> None:
    for raised in ranks(2).run(refused, transform):
        assert raised is not None and raised[1].startswith(HIDDEN[transform])


@pytest.mark.parametrize("strategy", ["hvp", "hessian"])
def test_second_derivatives_of_autograd_functional_are_refused(strategy: str) -> None:
    x = torch.randn(1, LENGTH, 2, 4)
    given = (x, x) if strategy == "hvp" else (x,)
    with pytest.raises(SecondGradient):
        getattr(torch.autograd.functional, strategy)(lambda x: FUNCTIONS["ring attention"](x).sum(), *given)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, _number: int, y: Tensor) -> Tensor:
        return 2 * x + 3 * y

    @staticmethod
    @first_order_only("a test")
    def backward(ctx: object, _saved: tuple[()], gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        return 2 * gradient, None, 3 * gradient


def test_first_gradients_are_as_they_were_with_a_graph_too() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    for graph in (False, True):
        out: Tensor = Doubled.apply(x, 1, y)  # type: ignore[no-untyped-call]
        dx, dy = torch.autograd.grad(out.square().sum() / 2, (x, y), out.new_tensor(0.2), create_graph=graph)
        assert torch.equal(dx, torch.full((3,), 2.0)) and torch.equal(dy, torch.full((3,), 3.0))
        assert dx.requires_grad == graph == dy.requires_grad
