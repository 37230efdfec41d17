"""Modules, hooks and forwards that write to objects of a program, and what they have written after one forward."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import hf_ring_attn
from hf_ring_attn.integration.selfcheck.row import SelfCheckState
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.remote_models import remote
from tests.helpers.models.tiny_models import tiny


class Restless(nn.Module):
    """Changes itself in every way that a forward can."""

    written: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(2))
        self.tensor, self.number, self.items, self.table = torch.zeros(2), 0, [1], {"a": 1}
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        self.written.add_(1)
        self.register_buffer("replaced", torch.ones(5))
        self.register_buffer("added", torch.ones(5))
        self.tensor += 1
        self.number += 1
        self.items.append(self.number)
        self.table["b"] = 2
        self.cache = x
        return self.drop(self.norm(x)) + torch.rand(1)  # type: ignore[no-any-return]


COLLECTED: list[Tensor] = []


class Collector:
    """Collects activations in attributes, as an object with a hook."""

    def __init__(self) -> None:
        self.by_layer: dict[int, list[Tensor]] = {0: [], 1: []}
        self.seen: deque[Tensor] = deque()

    def __call__(self, _module: Any, _args: Any, output: Tensor) -> None:
        self.seen.append(output)

    def note(self, layer: int, _module: Any, _args: Any, output: Tensor) -> None:
        self.by_layer[layer].append(output)


class Stateful:
    """Hooks with states of other kinds than collections."""

    shared = 0

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(())
        self.inner = Collector()
        self.random = torch.Generator().manual_seed(3)

    def note(self, _module: Any, _args: Any, output: Tensor) -> None:
        global TOTAL
        TOTAL += 1
        type(self).shared += 1
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * output.detach().mean())
        self.inner.seen.append(output)
        torch.rand((), generator=self.random)


class Pair(NamedTuple):
    """An object without attributes of its own."""

    outputs: list[Tensor]
    lengths: list[int]


class Probe(nn.Module):
    """A module outside of the model, which counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.first: Any = "none yet"

    def forward(self, x: Tensor) -> None:
        self.calls += len(x)
        vars(self).pop("first", None)


def states_beside() -> list[float]:
    """What hooks have left in tuples, in a module outside of the model, and in an object that must not be changed."""
    model: Any = tiny("llama", "ring_fp32").train()
    pair, probe, output = Pair([], []), Probe(), BaseModelOutput(last_hidden_state=torch.zeros(2))
    seen: list[str] = []

    def hook(_module: Any, _args: Any, x: Tensor) -> None:
        pair.outputs.append(x)
        pair.lengths.append(len(output))
        seen.append(str(getattr(probe, "first", "gone")))
        probe(x)

    model.model.layers[0].register_forward_hook(hook)
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        model(**sharded.inputs)
    assert seen == ["none yet"], seen
    return [len(pair.outputs), len(pair.lengths), float(probe.calls)]


TOTAL = 0


def states() -> list[float]:
    """What hooks have counted, averaged, collected and drawn after one forward."""
    global TOTAL
    model: Any = tiny("llama", "ring_fp32").train()
    stateful, steps = Stateful(), 0
    TOTAL = Stateful.shared = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    outputs: list[Tensor] = []
    model.model.layers[0].register_forward_hook(stateful.note)
    model.model.layers[0].register_forward_hook(count)
    model.model.layers[0].register_forward_hook(lambda _module, _args, output: outputs.append(output.detach()))
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        model(**sharded.inputs)
    drawn = float(torch.rand((), generator=stateful.random))
    fresh = torch.Generator().manual_seed(3)
    expected = [float(torch.rand((), generator=fresh)) for _ in range(2)][1]
    mean = float(stateful.mean) - 0.1 * float(outputs[-1].mean())
    found = [steps, TOTAL, Stateful.shared, stateful.calls, len(stateful.inner.seen)]
    return [*map(float, found), abs(round(mean, 7)), drawn - expected]


class Counts(nn.Module):
    """Counts its calls wherever a module's own code can: in objects, in its class and in a global name."""

    shared = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner: list[Any] = [Stateful()]

    def forward(self, x: Tensor) -> Tensor:
        global TOTAL
        TOTAL += 1
        Counts.shared += 1
        self.inner[0].calls += 1
        if not hasattr(self, "late"):
            self.late = Stateful()
        self.late.calls += 1
        return x


def states_of_forwards() -> list[int]:
    """What a module has counted in objects, in its class and in a global name after one forward."""
    global TOTAL
    model, counts = remote().train(), Counts()
    model.layers[1].mix, TOTAL, Counts.shared = counts, 0, 0
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        model(**sharded.inputs)
    assert sharded.context.state(SelfCheckState).verdict == "passed"
    return [TOTAL, Counts.shared, counts.inner[0].calls, counts.late.calls]


class Codes(nn.Parameter):
    """A frozen weight with codes, as those of 8-bit layers have."""

    codes: Tensor | None


class Holder:
    """What a layer computes with."""

    codes: Tensor | None = None


class Coded(nn.Module):
    """Takes the codes of its weight at its first call, and leaves it none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.holder = Codes(torch.zeros(1), requires_grad=False), Holder()
        self.weight.codes = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.codes is not None:
            self.holder.codes, self.weight.codes = self.weight.codes, None
        assert self.holder.codes is not None, "neither has codes"
        return x * self.holder.codes


def states_that_move() -> list[bool]:
    """If the weight has codes after one forward, and if the layer has."""
    model, coded = remote().train(), Coded()
    model.layers[1].mix = coded
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        model(**sharded.inputs)
    assert sharded.context.state(SelfCheckState).verdict == "passed"
    return [coded.weight.codes is not None, coded.holder.codes is not None]


def collected() -> list[int]:
    """The numbers of activations that hooks collected in one forward: by a closure, a global name and objects."""
    model: Any = tiny("llama", "ring_fp32").train()
    inside: list[Tensor] = []
    callable_object, with_method = Collector(), Collector()
    COLLECTED.clear()
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _module, _args, output: inside.append(output))
        layer.register_forward_hook(lambda _module, _args, output: COLLECTED.append(output))
        layer.register_forward_hook(callable_object)
        layer.register_forward_hook(partial(with_method.note, number))
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        model(**sharded.inputs)
    assert sharded.context.state(SelfCheckState).verdict == "passed"
    noted = [len(outputs) for outputs in with_method.by_layer.values()]
    return [len(inside), len(COLLECTED), len(callable_object.seen), *noted]
