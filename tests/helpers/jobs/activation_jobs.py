"""What ranks run to compare steps with less memory (MLPs in chunks, offloading) with plain ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.layers import host_memory as host_memory_file
from hf_ring_attn.layers.host_memory import Buffers, host_memory
from tests.helpers.hosts import checkpoint, stays_float64
from tests.helpers.jobs.chunked_jobs import sharded
from tests.helpers.jobs.plain_jobs import Batch, gradients_of, tokens
from tests.helpers.live_bytes import Ledger, peak_bytes
from tests.helpers.models.tiny_models import tiny

MLP_TOKENS = 3
IN_FLOAT32 = 1e-5
LORA = {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a model of `tiny_models`.

    ``ring``: options that must not change it. ``lora``: what LoraConfig is given; None for a full fine-tuning.
    ``exact``: relative bound; `IN_FLOAT32` for models that compute a part in float32, whatever the dtype.
    ``moved``: hooks around the forward move all that is saved, as TRL's activation_offloading.
    ``checkpointing``: what `hosts.checkpoint` is given; None for none. ``fsdp``: accelerate's FSDP plugin
    checkpoints layers; "offload": and offloads. ``wrap``: "", "DDP", or a way of `chunked_jobs.sharded`.
    """

    why: str
    ring: dict[str, Any] = field(default_factory=lambda: {"mlp_tokens": MLP_TOKENS})
    model: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    batch: Batch = field(default_factory=lambda: tokens(23))
    lora: dict[str, Any] | None = None
    checkpointing: dict[str, Any] | None = None
    fsdp: str = ""
    wrap: str = ""
    dtype: torch.dtype = torch.float64
    exact: float = 1e-12
    autocast: bool = False
    moved: bool = False


@dataclass
class Answer:
    """Of one rank: the loss, gradients by parameter, and the numbers of tensors that were offloaded and prefetched."""

    loss: Tensor
    gradients: dict[str, Tensor]
    offloaded: tuple[int, int]


def model_of(step: Step) -> Any:
    torch.manual_seed(3)
    model: Any = tiny(step.model, "ring_fp32", **step.config)
    model.to(step.dtype)
    if step.checkpointing is not None:
        checkpoint(model, **step.checkpointing)
    if step.lora is not None:
        model = get_peft_model(model, LoraConfig(r=4, **step.lora)).to(step.dtype)
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # it would be 0
                nn.init.normal_(weight, std=0.1)
    model.train()
    if step.fsdp:
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=set())
        plugin = SimpleNamespace(
            auto_wrap_policy=policy, transformer_cls_names_to_wrap=None,
            activation_checkpointing_offload=step.fsdp == "offload",
        )  # fmt: skip
        model = fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)
    if step.wrap == "DDP":
        return DistributedDataParallel(model)
    if step.wrap:
        sharded(model, step.wrap)
    return model


def step_of(step: Step, **options: Any) -> Answer:
    """One rank's step; gradients are averaged over ranks. The backward comes after the context was left."""
    model = model_of(step)
    hf_ring_attn.configure(model, RingConfig(**{"self_check": False, **options}))
    torch.manual_seed(5)
    memory = host_memory(torch.device("cpu"))
    before = memory.stored, memory.fetched_early
    batch = hf_ring_attn.shard(step.batch, model=model)
    moving = saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone) if step.moved else nullcontext()
    with batch, torch.autocast("cpu", torch.bfloat16, enabled=step.autocast), moving:
        loss = model(**batch.inputs).loss
    loss.backward()
    if not step.wrap:
        batch.reduce_gradients(model)
    gradients = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients_of(model).items()}
    gradients = {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in gradients.items()}
    offloaded = memory.stored - before[0], memory.fetched_early - before[1]
    return Answer(loss.detach(), gradients, offloaded)


def both(step: Step) -> tuple[Answer, Answer]:
    """With the options and checkpointing, and with neither."""
    stays = mock.patch.object(Tensor, "float", stays_float64) if step.exact < IN_FLOAT32 else nullcontext()
    with stays:
        return step_of(step, **step.ring), step_of(replace(step, checkpointing=None, fsdp="", moved=False))


def run(model: Any, **options: Any) -> Tensor:
    """The loss of a batch, and its gradients in the model."""
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=False, **options))
    with batch:
        loss: Tensor = model(**batch.inputs).loss
    loss.backward()
    return loss.detach()


def refused_by_parts() -> str:
    """The refusal of a model whose gates FSDP2 shards each by itself."""
    model: Any = tiny("llama", "ring_fp32")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer.mlp.gate_proj, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(mlp_tokens=MLP_TOKENS, self_check=False))
    try:
        with batch:
            model(**batch.inputs)
    except errors.UnsupportedModel as error:
        return str(error)
    return ""


def compiled_gradients(whole: bool) -> dict[str, Tensor]:
    """Of a model that is compiled as a whole, or layer by layer."""
    model = model_of(Step(why=""))
    fast: Any = torch.compile(model, backend="eager") if whole else model
    for layer in [] if whole else model.model.layers:
        layer.compile(backend="eager")
    config = RingConfig(mlp_tokens=MLP_TOKENS, self_check=False)
    batch = hf_ring_attn.shard(tokens(23), config=config, model=fast)
    with batch:
        loss = fast(**batch.inputs).loss
    loss.backward()
    return gradients_of(model)


WIDE = 4096


def peak_of_a_step(mlp_tokens: int | None) -> int:
    """The most bytes of a step of 64 tokens whose MLP is wide; its norms and attention are small."""
    model: Any = tiny("llama", "ring_fp32", intermediate_size=WIDE, num_hidden_layers=1).double()
    for weight in model.model.layers[0].mlp.parameters():
        weight.requires_grad_(False)
    batch = hf_ring_attn.shard(tokens(64, 1), config=RingConfig(self_check=False, mlp_tokens=mlp_tokens))

    def step() -> None:
        with batch:
            loss = model(**batch.inputs).loss
        loss.backward()

    step()  # the trial
    return peak_bytes(step)


def note_tokens(module: nn.Module, rows: list[int]) -> None:
    """Notes the number of tokens of each call. By its class: an MLP with a hook or a forward inside runs whole."""
    kind: Any = type(module)

    def forward(self: Any, x: Tensor) -> Any:
        rows.append(x.shape[1])
        return kind.forward(self, x)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def rows_of_gates(checkpointing: dict[str, Any] | None) -> list[int]:
    """The numbers of tokens with which the gates of MLPs are called in a step."""
    model = model_of(Step(why="", checkpointing=checkpointing))
    rows: list[int] = []
    for layer in model.model.layers:
        note_tokens(layer.mlp.gate_proj, rows)
    run(model, mlp_tokens=MLP_TOKENS)
    return rows


def inputs_alive(options: dict[str, Any]) -> tuple[list[bool], list[int]]:
    """Which inputs of layers are in memory after a forward, and the number of buffers after each of two steps."""
    checkpointing = {"use_reentrant": False}
    model = model_of(Step(why="", checkpointing=checkpointing, config={"num_hidden_layers": 4}))
    seen: list[weakref.ref[Any]] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _module, args: seen.append(weakref.ref(args[0].untyped_storage())))
    memory, buffers = host_memory(torch.device("cpu")), []
    for _ in range(2):
        seen.clear()
        batch = hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=False, **options))
        with batch:
            loss = model(**batch.inputs).loss
        alive = [one() is not None for one in seen]
        loss.backward()
        buffers.append(len(memory.buffers.idle))
    return alive, buffers


CHECKPOINTED: dict[str, Any] = {"use_reentrant": False}


def embeddings_of_a_step(
    prepare: Callable[[Any], object], reentrant: bool = False, **options: Any
) -> tuple[bool, Tensor, dict[str, Tensor]]:
    """If the embeddings that PEFT makes require a gradient are in memory after a forward; the loss, and gradients."""
    checkpointing = {"use_reentrant": reentrant}
    model = model_of(Step(why="", checkpointing=checkpointing, config={"num_hidden_layers": 4}, lora=LORA))
    embedding, seen = model.get_input_embeddings(), []
    prepare(model)
    layer = model.get_base_model().model.layers[0]
    layer.register_forward_pre_hook(lambda _module, args: seen.append(weakref.ref(args[0].untyped_storage())))
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=False, **options))
    with batch:
        loss = model(**batch.inputs).loss
    alive = seen[0]() is not None
    loss.backward()
    if not isinstance(model, FSDPModule):
        batch.reduce_gradients(model)
    assert embedding._forward_hooks, "PEFT's own hook stays"
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients_of(model).items()}
    return alive, batch.reduce(loss), found


def gradient_of_embeddings(**options: Any) -> Tensor:
    """Of embeddings that the program computes, in its second batch."""
    model = model_of(Step(why="", checkpointing=CHECKPOINTED, config={"num_hidden_layers": 4}, lora=LORA))
    for _ in range(2):
        batch = hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=False, **options), model=model)
        with batch:
            ids = batch.inputs.pop("input_ids")
            embeddings: Tensor = model.get_input_embeddings()(ids)
            loss = model(**batch.inputs, inputs_embeds=embeddings).loss
        loss.backward()
    assert embeddings.grad is not None
    return embeddings.grad


def bits(options: dict[str, Any], more: dict[str, Any]) -> bool:
    """Returns True if a step in float32 has the same bits with ``more`` options."""
    step = Step(why="", checkpointing=CHECKPOINTED, config={"num_hidden_layers": 4}, dtype=torch.float32)
    one, other = step_of(step, **options), step_of(step, **options, **more)
    same = [torch.equal(one.gradients[name], x) for name, x in other.gradients.items()]
    return torch.equal(one.loss, other.loss) and all(same) and one.gradients.keys() == other.gradients.keys()


def losses(checkpointing: dict[str, Any] | None, **options: Any) -> list[float]:
    """Losses of the whole batch in three steps of SGD in float32, on a row of 256 tokens."""
    step = Step(why="", checkpointing=checkpointing, config={"num_hidden_layers": 4})
    model = model_of(replace(step, dtype=torch.float32))
    hf_ring_attn.configure(model, RingConfig(self_check=False, **options))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(3):
        with hf_ring_attn.shard(tokens(256, 1), model=model) as batch:
            loss = model(**batch.inputs).loss
        loss.backward()
        batch.reduce_gradients(model)
        found.append(float(batch.reduce(loss)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def bytes_of_a_step(layers: int, **options: Any) -> tuple[int, int]:
    """Bytes of tensors, buffers on the host left out: those held after a forward, and the most in a whole step."""
    model = model_of(Step(why="", checkpointing=CHECKPOINTED, config={"num_hidden_layers": layers}))
    for weight in model.parameters():
        weight.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(True)
    config = RingConfig(self_check=False, **options)

    def step() -> tuple[Any, Ledger]:
        with Ledger() as ledger:
            batch = hf_ring_attn.shard(tokens(23), config=config, model=model)
            with batch:
                loss = model(**batch.inputs).loss
        return loss, ledger

    step()[0].backward()  # makes the buffers
    loss, ledger = step()
    held = ledger.bytes
    with ledger:
        loss.backward()
    return held, ledger.peak


OF_A_LAYER = 3
"""Tensors: its input, its attention's output and log-sum-exp."""


def without_room(rank: int, reserves: bool) -> list[str]:
    """What three batches end with when one rank has host memory for a layer only, in the first: the error, or "".

    ``reserves``: buffers are reserved; else memory runs out in the middle of a forward.
    """
    model = model_of(Step(why="", checkpointing=CHECKPOINTED, config={"num_hidden_layers": 4}))
    hf_ring_attn.configure(model, RingConfig(offload_above=0, save_attention=True))
    full, make, made, found = errors.HostMemoryFull(3 << 30, 1 << 30), Buffers.make, list[int](), list[str]()

    def limited(buffers: Buffers, size: int) -> Tensor:
        made.append(size)
        if len(made) > OF_A_LAYER:
            raise full
        return make(buffers, size)

    with mock.patch.dict(host_memory_file._MEMORY, clear=True):
        for number in range(3):
            with ExitStack() as stack:
                if number == 0 and dist.get_rank() == rank:
                    stack.enter_context(mock.patch.object(Buffers, "make", limited))
                    if not reserves:
                        stack.enter_context(mock.patch.object(Buffers, "reserve"))
                try:
                    with hf_ring_attn.shard(tokens(23), model=model) as batch:
                        loss = model(**batch.inputs).loss
                    loss.backward()
                    found.append("")
                except errors.RingAttentionError as error:
                    found.append(f"{type(error).__name__}: {error}")
    return found


def failing_to_reserve(rank: int) -> list[str]:
    """What three batches end with if the second one's buffers cannot be made on one rank, by an error of torch's."""
    model = model_of(Step(why="", checkpointing=CHECKPOINTED))
    hf_ring_attn.configure(model, RingConfig(offload_above=0))
    found = []
    for number in range(3):
        error = RuntimeError("by hand") if number == 1 and dist.get_rank() == rank else None
        with mock.patch.object(Buffers, "reserve", side_effect=error):
            try:
                with hf_ring_attn.shard(tokens(23), model=model) as batch:
                    model(**batch.inputs).loss.backward()
                found.append("")
            except (RuntimeError, errors.RefusedElsewhere) as raised:
                found.append(f"{type(raised).__name__}: {raised}")
    return found
