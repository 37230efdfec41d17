"""What ranks run for the self-check's tests: loops with a planted model, and one step with the check on or off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import BaseModelOutput

import hf_ring_attn
from hf_ring_attn import RingAttentionError, RingConfig
from hf_ring_attn.integration import log
from hf_ring_attn.integration.context.whole_batch import LOSS_INPUTS
from hf_ring_attn.integration.hosts.gathered_loss import gathered
from hf_ring_attn.integration.model.replicas import averages_gradients
from hf_ring_attn.integration.selfcheck.row import SelfCheckState
from tests.helpers.jobs.plain_jobs import CHECKPOINTING, Batch, padded, tokens
from tests.helpers.models.remote_models import remote
from tests.helpers.models.tiny_models import SIZES, build, tiny

OFF = RingConfig(self_check=False)


def shards(model: Any, dtype: torch.dtype | None = None) -> Any:
    """The model under FSDP2, over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in next(part.layers for part in model.modules() if "layers" in part._modules):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def lora(model: Any, from_zero: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=from_zero))


def checkpointed(kind: str) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[kind])
        return model

    return change


NAMES = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "dynamic rope", "longrope")
MIXTRAL: dict[str, Any] = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
GOOD: dict[str, Callable[[], Any]] = {
    **{name: partial(tiny, name, "ring_fp32") for name in NAMES},
    "remote code": remote,
    "dropout beside attention": lambda: tiny("gpt2", "ring_fp32", resid_pdrop=0.3, embd_pdrop=0.3),
    "experts": lambda: build("MixtralForCausalLM", **MIXTRAL),
    "experts, bfloat16": lambda: build("MixtralForCausalLM", **MIXTRAL).bfloat16(),
    "bfloat16": lambda: tiny("llama", "ring_fp32").bfloat16(),
    "autocast": lambda: tiny("llama", "ring_fp32"),
    "LoRA": lambda: lora(tiny("llama", "ring_fp32")),
    "LoRA from zero": lambda: lora(tiny("llama", "ring_fp32"), from_zero=True),
    "recomputed": lambda: checkpointed("recomputed")(tiny("llama", "ring_fp32")),
    "reentrant": lambda: checkpointed("reentrant")(tiny("llama", "ring_fp32")),
    "DDP": lambda: DistributedDataParallel(tiny("llama", "ring_fp32")),
    "DDP of LoRA": lambda: DistributedDataParallel(lora(tiny("llama", "ring_fp32")), find_unused_parameters=True),
    "FSDP2": lambda: shards(tiny("llama", "ring_fp32")),
    "FSDP2 of remote code": lambda: shards(remote()),
    "FSDP2 of LoRA from zero": lambda: shards(lora(tiny("llama", "ring_fp32"), from_zero=True)),
    "FSDP2, bfloat16": lambda: shards(tiny("llama", "ring_fp32"), torch.bfloat16),
    "FSDP2, recomputed": lambda: shards(checkpointed("recomputed")(tiny("llama", "ring_fp32"))),
}
"""Models that a ring trains exactly."""


@dataclass
class Trained:
    """Two steps: what the check said in each, all that a step changes, and how often each step called the model."""

    verdicts: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    bits: list[Tensor] = field(default_factory=list)
    attributes: list[Any] = field(default_factory=list)


def trained(kind: str, self_check: bool) -> Trained:
    """Two steps of a good model, of 23 tokens and of 41."""
    model = GOOD[kind]()
    model.train()
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    calls = SimpleNamespace(count=0)  # the check restores lists that hooks write to
    inner.register_forward_pre_hook(lambda *_: vars(calls).update(count=calls.count + 1))
    found = Trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for length in (23, 41):
        sharded = hf_ring_attn.shard(tokens(length), config=RingConfig(self_check=self_check))
        calls.count = 0
        with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext(), sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        found.verdicts.append(sharded.context.state(SelfCheckState).verdict)
        found.calls.append(calls.count)
        gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
        found.bits += [loss.detach(), torch.rand(3), *gradients, *(x.clone() for x in model.buffers())]
        average(sharded, model)
        optimizer.step()
        optimizer.zero_grad()
        found.attributes.append([plain(module) for module in model.modules()])
    return found


def average(sharded: hf_ring_attn.Sharded, model: nn.Module) -> None:
    """Averages gradients where no wrapper does."""
    if not averages_gradients(model):
        sharded.reduce_gradients(model)


def local(x: Tensor) -> Tensor:
    return getattr(x, "_local_tensor", x).clone()


def plain(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes that can be compared."""
    return {name: x for name, x in vars(module).items() if isinstance(x, (bool, int, float, str, type(None)))}


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(
    planted: str, dtype: torch.dtype = torch.float32, batch: Batch | None = None, config: RingConfig = RingConfig(),
    wrap: str = "",
) -> tuple[str, str, int]:  # fmt: skip
    """What the first of two steps raised, its text, and the number of optimizer steps made until then."""
    model: Any = remote(planted).to(dtype)
    compiled = partial(torch.compile, backend="eager")
    wraps: dict[str, Callable[[Any], Any]] = {"DDP": DistributedDataParallel, "FSDP2": shards, "compiled": compiled}
    model = wraps.get(wrap, lambda x: x)(model.train())
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), 0
    try:
        for seed in range(2):
            named = model if wrap == "compiled" else None
            sharded = hf_ring_attn.shard(batch or tokens(23, seed=seed), config=config, model=named)
            with sharded:
                out = model(**sharded.inputs)
            out.loss.backward()
            average(sharded, model)
            optimizer.step()
            steps += 1
    except RingAttentionError as error:
        return type(error).__name__, str(error), steps
    return "", "", steps


def two_rings(planted: str) -> tuple[list[str], str]:
    """FSDP2 over four ranks, rings of two whose batches are padded in turn: the verdicts, and what was raised."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    mine = torch.distributed.get_rank() // 2
    model, verdicts = shards(remote(planted).train()), []
    try:
        for turn in range(3):
            batch = padded(23, left=4 * ((turn + mine) % 2), right=3)
            sharded = hf_ring_attn.shard(batch, groups[mine])
            with sharded:
                loss = model(**sharded.inputs).loss
            loss.backward()
            verdicts.append(sharded.context.state(SelfCheckState).verdict)
    except RingAttentionError as error:
        return verdicts, f"{type(error).__name__}: {error}"
    return verdicts, ""


def of_a_batch(model: str, batch: Batch) -> str:
    """What came of the check for a batch of this kind."""
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        tiny(model, "ring_fp32").double()(**sharded.inputs)
    return sharded.context.state(SelfCheckState).verdict


def gathered_loss() -> tuple[str, Tensor]:
    """Of a model whose hooks gather its logits, which are there for the user's batch alone."""
    batch, model = tokens(23), tiny("llama", "ring_fp32")
    sharded = hf_ring_attn.shard(batch, config=RingConfig(loss="gathered"))
    inputs = {name: x for name, x in sharded.inputs.items() if name not in LOSS_INPUTS}
    with sharded, gathered(model, sharded):
        loss = model(**inputs, labels=batch["labels"]).loss
    return sharded.context.state(SelfCheckState).verdict, loss


def with_other_weights() -> tuple[str, str]:
    """Rank 1 has seeded otherwise."""
    model = remote()
    if torch.distributed.get_rank() == 1:
        torch.manual_seed(7)
        model.apply(model._init_weights)
    sharded = hf_ring_attn.shard(tokens(23))
    try:
        with sharded:
            model(**sharded.inputs)
    except RingAttentionError as error:
        return type(error).__name__, str(error)
    return "", ""


def said(config: RingConfig) -> list[str]:
    """The line at start, on the first rank."""
    lines: list[str] = []
    log._said.clear()
    with mock.patch.object(log._logger(), "info", lines.append):
        sharded = hf_ring_attn.shard(tokens(23), config=config)
        with sharded:
            remote()(**sharded.inputs)
    return lines


def planted_trainer_model(model: Any) -> Any:
    """In place of the Trainer's model."""
    return remote("shift")


# ---- a part of the check alone ---------------------------------------------------------------------------------------


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
