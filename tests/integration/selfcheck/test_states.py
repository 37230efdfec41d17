"""States that a forward leaves behind for the next one: each rank would keep what it saw of its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_ring_attn
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, gradients_of, tokens
from tests.helpers.models.tiny_models import tiny
from tests.integration.losses.test_custom_forward import assert_same_step


class Scaled(nn.Module):
    """Divides by the largest value of earlier forwards, as delayed scaling does. ``where`` it is: see `KEPT`."""

    largest: Tensor

    def __init__(self, mlp: nn.Module, where: str, reduces: bool = False) -> None:
        super().__init__()
        self.mlp, self.where, self.reduces = mlp, where, reduces
        self.register_buffer("largest", torch.ones(()))
        self.value: Any = 1.0
        self.outside: dict[str, Any] = {"value": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        kept = {"buffer": self.largest.clone(), "attribute": self.value, "collection": self.outside["value"]}
        found: Tensor = self.mlp(x / kept[self.where])
        now = found.detach().abs().max()
        if self.reduces and dist.is_initialized():
            dist.all_reduce(now, dist.ReduceOp.MAX)
        if self.where == "buffer":
            self.largest.copy_(now)
        elif self.where == "attribute":
            self.value = float(now)
        else:
            self.outside["value"] = float(now)
        return found


class Largest:
    """An object of the program."""

    value = 1.0


class ScaledByObject(nn.Module):
    """Divides by the largest value of earlier forwards, which an object beside the model holds."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.largest = mlp, Largest()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(x / self.largest.value)
        self.largest.value = float(found.detach().abs().max())
        return found


class Counted(nn.Module):
    """Grows with each forward: the same on every rank."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.calls = mlp, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.mlp(x)
        return found * self.calls


class Kept(nn.Module):
    """Keeps what it returned, for a log."""

    largest: Tensor

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.register_buffer("largest", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(x)
        self.last = found
        self.largest = torch.maximum(self.largest, found.detach().max())
        return found


class Changed(Counted):
    """Counts, and mixes tokens."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found - found.mean(1, keepdim=True)


def of_one_layer(make: Callable[[nn.Module], nn.Module], attention: str | None = "ring_fp32") -> Any:
    model = tiny("llama", attention).train()
    model.model.layers[0].mlp = make(model.model.layers[0].mlp)
    return model


def second_step(what: str, attention: str | None) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the second of two steps, of which no weight changes."""
    model = of_one_layer(EXACT[what], attention)
    for seed in (1, 2):
        model.zero_grad()
        batch = tokens(23, seed=seed)
        if attention is None:
            loss = model(**batch).loss
            loss.backward()
            continue
        with hf_ring_attn.shard(batch) as sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(model)
        loss = sharded.reduce(loss)
    return float(loss.detach()), gradients_of(model)


EXACT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "counted": Counted,
    "kept": Kept,
    "reduced": partial(Scaled, where="buffer", reduces=True),
}
KEPT = {
    "buffer": "(model.layers.0.mlp.largest)",
    "attribute": "(model.layers.0.mlp.value)",
    "collection": "(model.layers.0.mlp.outside)",
}


@pytest.mark.parametrize("what", EXACT)
def test_states_that_are_alike_or_read_by_nobody_train(ranks: Ranks, what: str) -> None:
    assert_same_step(ranks(2).run(second_step, what, "ring_fp32"), second_step(what, None))


def refused(make: Callable[[nn.Module], nn.Module]) -> tuple[str, str] | None:
    model = of_one_layer(make)

    def run() -> None:
        with hf_ring_attn.shard(tokens(23)) as sharded:
            model(**sharded.inputs)

    return attempt(run)


def refused_state(where: str) -> tuple[str, str] | None:
    return refused(partial(Scaled, where=where))


@pytest.mark.parametrize("where", KEPT)
def test_a_state_of_a_ranks_tokens_is_refused(ranks: Ranks, where: str) -> None:
    """The first step was right, and the second one silently wrong."""
    for raised in ranks(2).run(refused_state, where):
        assert raised is not None, "not refused"
        assert raised[0] == "TokensKept"
        assert raised[1].startswith(f"LlamaForCausalLM stores values that depend on tokens {KEPT[where]}")


def refused_object(is_sharded: bool) -> tuple[str, str] | None:
    model = of_one_layer(ScaledByObject)
    if is_sharded:
        for part in (model.model.layers[0].mlp, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def run() -> None:
        with hf_ring_attn.shard(tokens(23), model=model) as sharded:
            model(**sharded.inputs)

    return attempt(run)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "FSDP2"])
def test_a_state_in_an_object_of_the_program_is_refused(ranks: Ranks, is_sharded: bool) -> None:
    """fully_shard gives a module a class of torch's, so that the program's module was not seen."""
    for raised in ranks(2).run(refused_object, is_sharded):
        assert raised is not None, "not refused"
        assert raised[0] == "TokensKept" and "(in an object of the program)" in raised[1]


def refused_change() -> tuple[str, str] | None:
    return refused(Changed)


def test_a_state_that_grows_hides_no_other_difference(ranks: Ranks) -> None:
    """Runs of the check differed by the growth, which then passed for what the model amplifies."""
    for raised in ranks(2).run(refused_change):
        assert raised is not None, "not refused"
        assert raised[0] == "SelfCheckFailed"
