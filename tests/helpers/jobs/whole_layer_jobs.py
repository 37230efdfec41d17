"""Models of a program's own with layers beside attention that look along the row: convolutions, recurrences."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils.generic import ModelOutput

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.plain_jobs import CHECKPOINTING, Batch, attempt, gradients_of, packed, tokens
from tests.helpers.models.tiny_models import tiny

WIDTH = 32
Call = Callable[[Any, Tensor], Tensor]


class Short(nn.Module):
    """A short causal convolution with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.conv(nn.functional.pad(x.mT, (3, 0))).mT
        return found


class OfTokens(Short):
    """A short convolution over all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4)


class Remembering(Short):
    """Takes a memory [1, 12, C] beside tokens."""

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        found: Tensor = super().forward(x) + memory.sum(1, keepdim=True)
        return found


class OfItself(nn.Conv1d):
    """A convolution that takes [B, T, C]."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 4, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.mT)[..., : x.shape[1]].mT


class Turned(Short):
    """Takes complex numbers that train."""

    def forward(self, x: Tensor, angles: Any = None) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return super().forward(torch.view_as_real(pairs * angles).flatten(-2))


class Started(nn.Module):
    """A recurrence with a learned first state, [1, B, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.state = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.rnn(x, self.state.expand(1, len(x), WIDTH).contiguous())[0]
        return found


class Kept(Short):
    """Keeps a mean over its tokens, which its caller reads."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.mean = found.mean(1, keepdim=True)
        return found


@dataclass
class Found(ModelOutput):
    tokens: Any = None
    other: Any = None


Pair = namedtuple("Pair", ["tokens", "other"])


class Returning(Short):
    """Returns its result in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"dict": {"tokens": y, "other": 3}, "output": Found(y), "pair": Pair(y, 3), "list": [[y], 3],
                "loss": (y, y.square().mean())}[self.kind]  # fmt: skip


class Layer(LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """A decoder layer that calls a module on its result."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        call: Any = self.call
        found: Tensor = call(self.beside, super().forward(hidden_states, *args, **kwargs))
        return found


class Within(nn.Module):
    """An MLP and a module after it."""

    def __init__(self, mlp: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.mlp, self.after = mlp, after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.mlp(x))


def plain(module: Any, x: Tensor) -> Tensor:
    found: Tensor = module(x)
    return found


def remembering(module: Any, x: Tensor) -> Tensor:
    found: Tensor = module(x, torch.linspace(-1, 1, 12 * WIDTH, dtype=x.dtype).view(1, 12, WIDTH).sin())
    return found


def turned(module: Any, x: Tensor) -> Tensor:
    found: Tensor = module(x, torch.polar(torch.ones_like(x[..., ::2]), x[..., ::2]))
    return found


def with_loss(module: Any, x: Tensor) -> Tensor:
    found, loss = module(x)
    scaled: Tensor = found if loss is None else found * (1 + loss)
    return scaled


def with_mean(module: Any, x: Tensor) -> Tensor:
    found: Tensor = module(x) + module.mean
    return found


def recomputed(module: Any, x: Tensor, reentrant: bool = False) -> Tensor:
    found: Tensor = checkpoint(module, x, use_reentrant=reentrant)
    return found


def in_layers(make: Callable[[], nn.Module], call: Call, model: Any) -> None:
    for layer in model.model.layers:
        layer.__class__, layer.beside, layer.call = Layer, make(), call


def in_mlps(make: Callable[[], nn.Module], model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = Within(layer.mlp, make())


def shared(model: Any) -> None:
    """One module of the model, and in each MLP, whose tokens it gets."""
    old, module = dict(model.model._modules), Short()
    model.model._modules.clear()
    model.model.shared = module  # before the layers, by whose names it is found otherwise
    model.model._modules.update(old)
    in_mlps(lambda: module, model)


def adapted(model: Any) -> None:
    """Adapters on convolutions and beside them."""
    in_mlps(OfTokens, model)
    adapters = LoraConfig(r=4, target_modules=["conv", "gate_proj"], init_lora_weights=False)
    inject_adapter_in_model(adapters, model)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a short convolution in MLPs": partial(in_mlps, Short),
    "adapters": adapted,
    "a convolution that takes tokens": partial(in_layers, OfItself, plain),
    "a memory": partial(in_layers, Remembering, remembering),
    "complex inputs": partial(in_layers, Turned, turned),
    "a first state": partial(in_mlps, Started),
    "one module in all MLPs": shared,
    "a checkpoint of the layer alone": partial(in_layers, Short, recomputed),
    "a reentrant checkpoint of it": partial(in_layers, Short, partial(recomputed, reentrant=True)),
    "a dict": partial(in_layers, partial(Returning, "dict"), lambda module, x: module(x)["tokens"]),
    "a ModelOutput": partial(in_layers, partial(Returning, "output"), lambda module, x: module(x).tokens),
    "a named tuple": partial(in_layers, partial(Returning, "pair"), lambda module, x: module(x).tokens),
    "a nested list": partial(in_layers, partial(Returning, "list"), lambda module, x: module(x)[0][0]),
    "a loss beside tokens": partial(in_layers, partial(Returning, "loss"), with_loss),
    "a mean in an attribute": partial(in_layers, Kept, with_mean),
}


def made(change: str, attention: str | None, checkpointing: str = "") -> Any:
    torch.manual_seed(3)
    model: Any = tiny("llama", attention)
    CHANGES[change](model)
    model.to(torch.float64).train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[checkpointing])
    return model


def documents(*lengths: int) -> Batch:
    """Packed documents; the first token of each has no label."""
    batch = packed(*lengths)
    starts = batch["position_ids"] == 0
    return {**batch, "labels": batch["labels"].masked_fill(starts, -100)}


def alone(change: str, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients by transformers' own attention, each document by itself."""
    return by_documents(made(change, None), batch)


def by_documents(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    total = torch.zeros((), dtype=torch.float64)
    positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[1])[None])
    starts = [*torch.nonzero(positions[0] == 0).flatten().tolist(), positions.shape[1]]
    count = batch["labels"][:, 1:].ne(-100).sum()
    for start, stop in itertools.pairwise(starts):
        labels = batch["labels"][:, start:stop]
        loss = model(input_ids=batch["input_ids"][:, start:stop], labels=labels).loss
        total = total + loss * labels[:, 1:].ne(-100).sum() / count
    total.backward()
    return total.detach(), gradients_of(model)


def away(change: str, batches: list[Batch], checkpointing: str = "") -> float:
    """How far losses and gradients in the ring are from one process; all batches are alive before the first
    backward."""
    model, alive = made(change, "ring_fp32", checkpointing), []
    for batch in batches:
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            alive.append((sharded, model(**sharded.inputs).loss, batch))
    found = []
    for sharded, loss, batch in alive:
        loss.backward()
        sharded.reduce_gradients(model)
        gradients, (want, expected) = gradients_of(model), alone(change, batch)
        found.append(relative_error(sharded.reduce(loss.detach()), want))
        found += [relative_error(gradients[name], x) for name, x in expected.items()]
    return max(found)


def refused(change: str, batches: list[Batch], checkpointing: str = "") -> tuple[str, str] | None:
    """What is raised, in a ring or in one process."""
    return attempt(lambda: away(change, batches, checkpointing))


def plain_between() -> float:
    """How far a checkpointed backward of whole rows, after a ring's, is from one process."""
    change, batch = "a short convolution in MLPs", tokens(23)
    model = made(change, "ring_fp32", "recomputed")
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        loss = model(**sharded.inputs).loss
    loss.backward()
    model.zero_grad()
    model(**batch).loss.backward()
    gradients, (_, expected) = gradients_of(model), alone(change, batch)
    return max(relative_error(gradients[name], x) for name, x in expected.items())


EXCHANGES: dict[str, list[Callable[[], nn.Module]]] = {
    "of the same class": [Short, Short],
    "of another class": [Short, OfTokens],
    "that takes tokens": [OfTokens, OfItself],
}
"""The convolutions that a model gets after its first batch, and those that take their places after the second."""


def exchanged(kinds: str, batch: Batch, keeps_old: bool) -> list[float]:
    """How far the losses and gradients of three batches are from one process, with a step after each.

    Args:
        keeps_old: the convolutions that are taken out stay alive.
    """
    ring, own = ready_to_change("ring_fp32"), ready_to_change(None)
    kept: list[Any] = []
    found = []
    for number, make in enumerate([None, *EXCHANGES[kinds]]):
        if make is not None:
            kept += [getattr(layer, "beside", None) for layer in ring.model.layers if keeps_old]
            for model in (ring, own):
                torch.manual_seed(number)
                in_layers(make, plain, model)
                model.double()
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            loss = ring(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(ring)
        gradients, (want, expected) = gradients_of(ring), by_documents(own, batch)
        pairs = [(sharded.reduce(loss.detach()), want), *((gradients[name], x) for name, x in expected.items())]
        found.append(max(relative_error(one, other) for one, other in pairs))
        step(ring, gradients)
        step(own, expected)
    return found


def ready_to_change(attention: str | None) -> Any:
    model: Any = tiny("llama", attention).double().train()
    model.config.use_cache = False
    return model


@torch.no_grad()
def step(model: Any, gradients: dict[str, Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight -= 0.1 * gradients[name]
