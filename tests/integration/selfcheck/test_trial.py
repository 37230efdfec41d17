"""The trial step: of programs that checkpoint by hand; the weights whose gradients it compares."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.selfcheck import trial
from hf_ring_attn.integration.selfcheck.row import SelfCheckState
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens, told
from tests.helpers.jobs.self_check_jobs import shards
from tests.helpers.models.tiny_models import tiny


def checkpointed(attention: str | None) -> Any:
    """A model whose layers are checkpointed by the program, reentrantly."""
    model: Any = tiny("llama", attention).double().train()
    for layer in model.model.layers:
        forward = layer.forward

        def call(hidden: Any, forward: Any = forward, **given: Any) -> Any:
            return checkpoint(partial(forward, **given), hidden, use_reentrant=True)

        layer.forward = call
    return model


def gradients() -> list[torch.Tensor | None]:
    model = checkpointed("ring_fp32")
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        loss = model(**sharded.inputs).loss
    loss.backward()
    sharded.reduce_gradients(model)
    return [x.grad for x in model.parameters()]


def test_a_programs_own_reentrant_checkpoints_are_tried(ranks: Ranks) -> None:
    """The self-check could not run them: their backward refuses autograd.grad."""
    model = checkpointed(None)
    model(**tokens(23), use_cache=False).loss.backward()
    for got in ranks(2).run(gradients):
        for x, weight in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(x, weight.grad, rtol=1e-5, atol=1e-7)


class Balancing(torch.autograd.Function):
    """Adds a loss to the backward, as remote code of experts does: the forward shows nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


class Routed(nn.Module):
    """Two experts whose router gets detached states, and a loss of the mean over a rank's tokens."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.router = mlp, nn.Linear(32, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x.detach()).softmax(-1)
        balance = shares.flatten(0, 1).mean(0).square().sum()
        y: Tensor = Balancing.apply(self.mlp(x), balance) * shares[..., :1]  # type: ignore[no-untyped-call]
        return y


def routed_step(under_fsdp2: bool) -> None:
    torch.manual_seed(0)
    model = tiny("llama", "ring_fp32").train()
    layer = model.model.layers[1]
    layer.mlp = Routed(layer.mlp)
    if under_fsdp2:
        shards(model)
    with hf_ring_attn.shard(tokens(23)) as sharded:
        model(**sharded.inputs)


@pytest.mark.parametrize("under_fsdp2", [False, True], ids=["bare", "FSDP2"])
def test_a_wrong_gradient_of_one_weight_alone_is_seen(ranks: Ranks, under_fsdp2: bool) -> None:
    """Three weights were compared: the router trained with a mean over each rank's tokens, silently."""
    for raised in ranks(2).run(attempt, routed_step, under_fsdp2):
        assert raised is not None, "not refused"
        assert raised[0] == "GradientDiffers"
        assert "the gradients of model.layers.1.mlp.router.weight differ" in raised[1]


def accumulated_under_fsdp2(self_check: bool) -> list[Tensor]:
    """The gradients of two batches, of which FSDP2 reduces none before the second one, whose loss is checked, too."""
    model: Any = shards(tiny("llama", "ring_fp32").train())
    kinds: tuple[tuple[Literal["chunked", "sharded"], bool], ...] = ("chunked", False), ("sharded", True)
    for loss, reduces in kinds:
        model.set_requires_gradient_sync(reduces)
        with hf_ring_attn.shard(tokens(23), config=RingConfig(loss=loss, self_check=self_check)) as sharded:
            model(**sharded.inputs).loss.backward()
        checked = sharded.context.state(SelfCheckState).verdict
        assert checked == ("passed" if self_check else "off")
    return [x.grad.to_local() for x in model.parameters()]


def test_gradients_that_fsdp2_has_not_reduced_yet_stay(ranks: Ranks) -> None:
    for checked, unchecked in zip(
        ranks(2).run(accumulated_under_fsdp2, True), ranks(2).run(accumulated_under_fsdp2, False), strict=True
    ):
        assert all(torch.equal(x, y) for x, y in zip(checked, unchecked, strict=True))


class Around(nn.Module):
    """A model with a head beside it, under FSDP2 as one: the self-check of the model runs inside of its forward."""

    def __init__(self, attention: str | None) -> None:
        super().__init__()
        self.model, self.head = tiny("llama", attention), nn.Linear(97, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        loss: Tensor = self.head(self.model(input_ids).logits).square().mean()
        return loss


def gradients_of_a_model_around(in_ring: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = Around("ring_fp32" if in_ring else None).train()
    if not in_ring:
        model(tokens(23)["input_ids"]).backward()
        return [x.grad for x in model.parameters()]
    for layer in model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with hf_ring_attn.whole_rows(model):
        loss = model(tokens(23)["input_ids"])
    loss.backward()
    return [x.grad.full_tensor() for x in model.parameters()]


def test_a_forward_of_a_larger_model_goes_on_under_fsdp2(ranks: Ranks) -> None:
    """Its embeddings, which FSDP2 had gathered for the larger model, were shards again."""
    want = gradients_of_a_model_around(False)
    for got in ranks(2).run(gradients_of_a_model_around, True):
        assert all(relative_error(x, y) < 1e-4 for x, y in zip(got, want, strict=True))


def test_the_weights_that_are_compared() -> None:
    """The first three in any dtype; then those in float32, as many as are small together."""
    model = nn.ModuleDict({str(n): nn.Linear(256, n, bias=False) for n in (1000, 2, 3, 4, 5)})
    model["6"] = nn.Linear(8, 1).bfloat16()
    with_small = ["2.weight", "5.weight", "6.bias"]
    assert [*trial.watched_weights(model)] == [*with_small, "3.weight", "4.weight", "1000.weight"]
    assert [*trial.watched_weights(model.bfloat16())] == with_small
    model["7"] = nn.Linear(trial.OTHERS, 1, bias=False, device="meta")
    assert "7.weight" not in trial.watched_weights(model.float())


class Noisy(nn.Module):
    """An MLP with noise in training, of dropout or of its own."""

    def __init__(self, mlp: nn.Module, own: bool) -> None:
        super().__init__()
        self.mlp, self.dropout = mlp, nn.Dropout(0.0 if own else 0.5)
        self.size = 0.1 if own else 0.0

    def forward(self, x: Tensor) -> Tensor:
        noise = self.size * torch.randn_like(x) if self.training and self.size else 0.0
        y: Tensor = self.dropout(self.mlp(x)) + noise
        return y


def noisy_step(own: bool) -> list[str]:
    model = tiny("llama", "ring_fp32").train()
    model.model.layers[0].mlp = Noisy(model.model.layers[0].mlp, own)
    sharded = hf_ring_attn.shard(tokens(23))

    def step() -> None:
        with sharded:
            model(**sharded.inputs)

    return [text for text in told(step) if "random" in text]


def test_a_warning_says_that_random_numbers_were_not_tried(ranks: Ranks) -> None:
    """What a program does with them in training could be anything, and nothing was said."""
    for texts in ranks(2).run(noisy_step, True):
        assert [text.partition(" so ")[0] for text in texts] == [
            "LlamaForCausalLM draws random numbers in training, beside its dropout modules,"
        ]
    assert ranks(2).run(noisy_step, False) == [[], []]
