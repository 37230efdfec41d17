"""What ranks run for the self-check's tests: loops with a planted model, and one step with the check on or off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn import RingAttentionError, RingConfig
from hf_ring_attn.integration import log
from hf_ring_attn.integration.gradients.replicas import bare_of
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
    if bare_of(list(model.parameters()), model, sharded.ring):
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
    hf_ring_attn.configure(model, config)
    compiled = partial(torch.compile, backend="eager")
    wraps: dict[str, Callable[[Any], Any]] = {"DDP": DistributedDataParallel, "FSDP2": shards, "compiled": compiled}
    model = wraps.get(wrap, lambda x: x)(model.train())
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), 0
    try:
        for seed in range(2):
            sharded = hf_ring_attn.shard(batch or tokens(23, seed=seed), model=model)
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


def one_of_two_rings(planted: str) -> tuple[str, str]:
    """What is raised under FSDP2 over four ranks, of whose rings of two the second one alone has an input."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    mine = torch.distributed.get_rank() // 2
    try:
        with hf_ring_attn.shard(
            {**tokens(23), **({"paces": torch.ones(2, 23)} if mine else {})}, groups[mine]
        ) as batch:
            shards(remote(planted).train())(**batch.inputs)
    except RingAttentionError as error:
        return type(error).__name__, str(error)
    return "", ""


def of_a_batch(model: str, batch: Batch) -> str:
    """What came of the check for a batch of this kind."""
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        tiny(model, "ring_fp32").double()(**sharded.inputs)
    return sharded.context.state(SelfCheckState).verdict


def gathered_loss() -> tuple[str, Tensor]:
    """Of a model whose hooks gather its logits, which are there for the user's batch alone."""
    batch, model = tokens(23), tiny("llama", "ring_fp32")
    with hf_ring_attn.whole_rows(model) as rows:
        loss = model(**batch).loss
    assert rows.latest is not None
    return rows.latest.context.state(SelfCheckState).verdict, loss


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
    model = remote()
    hf_ring_attn.configure(model, config)
    with mock.patch.object(log._logger(), "info", lines.append):
        sharded = hf_ring_attn.shard(tokens(23), model=model)
        with sharded:
            model(**sharded.inputs)
    return lines


def planted_trainer_model(model: Any) -> Any:
    """In place of the Trainer's model."""
    return remote("shift")
