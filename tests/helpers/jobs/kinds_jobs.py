"""Kinds of fine-tuning for live ranks: quantized weights, optimizers, mixed precision, parameters on the host."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import hf_ring_attn
from hf_ring_attn.integration.gradients import fsdp
from tests.helpers.jobs.fsdp2_trainers import under_fsdp2, weights_of
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, trainer_of
from tests.helpers.models.tiny_models import tiny

LORA = {"r": 4, "target_modules": "all-linear"}
NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32,
    "bnb_4bit_use_double_quant": True,
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
"""bitsandbytes quantizes blocks of 64 values, and on a CPU a row must have one at least."""
ON_GPU = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}


@dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """One kind of fine-tuning.

    Args:
        arguments: TrainingArguments. lora: what LoraConfig is given; None trains all weights.
        quantized: what BitsAndBytesConfig is given. fsdp: of FullyShardedDataParallelPlugin, in a ring.
        half: computes in 16 bits, so that a weight's gradient is a sum of rounded shares.
        scaled: the loss is scaled, as accelerate has it for fp16 on a GPU.
    """

    why: str
    arguments: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    quantized: dict[str, Any] | None = None
    fsdp: dict[str, Any] | None = None
    half: bool = False
    scaled: bool = False


@dataclass
class Trained:
    """Of each step the loss and the norm of gradients; the trained weights before and after all.

    ``scale``: of the loss, at the end.
    """

    losses: list[float]
    norms: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    scale: float = 1.0


ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4, "weight_decay": 0.1}
TORCHAO = "adamw_torch_8bit"
INT8 = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
KINDS = [
    Kind(why="AdamW", arguments=ADAM),
    Kind(why="rsLoRA and DoRA, with AdamW", arguments=ADAM, lora={**LORA, "use_rslora": True, "use_dora": True}),
    Kind(why="Adafactor", arguments={"optim": "adafactor", "learning_rate": 1e-3}),
    Kind(why="AdamW in 8 bits", arguments={**ADAM, "optim": "adamw_bnb_8bit"}),
    Kind(why="paged AdamW", arguments={**ADAM, "optim": "paged_adamw_32bit"}),
    Kind(why="paged AdamW in 8 bits, LoRA", lora=LORA, arguments={**ADAM, "optim": "paged_adamw_8bit"}),
    Kind(why="QLoRA in NF4", lora=LORA, quantized=NF4, arguments=ADAM),
    Kind(why="LoRA on 8 bits", lora=LORA, quantized=INT8, arguments=ADAM),
    Kind(why="FSDP2", fsdp={}, arguments=ADAM),
    Kind(why="FSDP2, LoRA", fsdp={}, lora=LORA, arguments=ADAM),
    Kind(why="FSDP2, AdamW in 8 bits", fsdp={}, arguments={**ADAM, "optim": TORCHAO}),
    Kind(why="FSDP2, parameters and optimizer on the host", fsdp={"cpu_offload": True}, arguments=ADAM),
    Kind(
        why="QLoRA under FSDP2", fsdp={}, lora=LORA, arguments=ADAM,
        quantized={**NF4, "bnb_4bit_quant_storage": torch.float32},
    ),
    Kind(why="bf16", half=True, arguments={"bf16": True}),
    Kind(why="fp16: the first step overflows", half=True, scaled=True, arguments={"fp16": True}),
]  # fmt: skip


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights together."""
    return float(torch.stack([(one[name] - x).norm() for name, x in other.items()]).norm())


def quantized(model: Any, config: BitsAndBytesConfig, attention: str, device: str) -> Any:
    """The model as `from_pretrained` quantizes it."""
    auto: Any = AutoModelForCausalLM
    with a_folder(None) as folder:  # of each rank its own
        (Path(folder) / "config.json").write_text(model.config.to_json_string())  # save_pretrained writes on one rank
        save_file(model.state_dict(), Path(folder) / "model.safetensors", {"format": "pt"})
        return auto.from_pretrained(
            folder, quantization_config=config, device_map={"": device}, attn_implementation=attention,
            dtype=torch.float32,
        )  # fmt: skip


def model_of(kind: Kind, mesh: Mesh, device: str = "cpu") -> Any:
    attention = "ring_fp32" if mesh.cp > 1 else "sdpa"
    model: Any = tiny("llama", attention, **(ON_GPU if device != "cpu" else WIDE if kind.quantized else {}))
    if kind.quantized is not None:
        model = quantized(model, BitsAndBytesConfig(**kind.quantized), attention, device)  # type: ignore[no-untyped-call]
        prepare: Any = prepare_model_for_kbit_training
        for part in model.modules():  # on some CPUs its first evaluation, here the self-check's, packs weights for bf16
            if hasattr(part, "support_avx512bf16_for_cpu"):
                part.support_avx512bf16_for_cpu = False
        model = prepare(model, use_gradient_checkpointing=False)
    if kind.lora is not None:
        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(**kind.lora))
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # with zeros the other matrix has no gradient
                torch.nn.init.normal_(weight, std=0.1)
    return model


@contextmanager
def small_tensors_in_8_bits(optimizer: str) -> Iterator[None]:
    """bitsandbytes and torchao leave tensors of less than 4096 values in 32 bits: here all are smaller."""
    changed: Any
    if optimizer == TORCHAO:
        adamw: Any = importlib.import_module("torchao.optim").AdamW8bit

        def buffer(_self: Any, weight: Tensor, signed: bool) -> Any:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            fits = local.numel() >= 16 and local.numel() % 16 == 0
            zeros = adamw._subclass_zeros(local, signed, 16) if fits else torch.zeros_like(local)
            if not isinstance(weight, DTensor):
                return zeros
            placed: Any = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
            return DTensor.from_local(zeros, weight.device_mesh, weight.placements, **placed)

        changed = mock.patch.object(adamw, "_new_buffer", buffer)
    else:
        adamw = importlib.import_module("bitsandbytes.optim").AdamW
        initialized = functools.partialmethod(adamw.__init__, min_8bit_size=16)
        changed = mock.patch.object(adamw, "__init__", initialized)
    with changed:
        yield


def in_8_bits(state: Tensor) -> bool:
    """A state of bitsandbytes, or of torchao, which FSDP2 may have sharded."""
    local = state.to_local() if isinstance(state, DTensor) else state
    return getattr(local, "codes", local).dtype is torch.uint8


def scale_losses(accelerator: Any) -> None:
    """accelerate leaves fp16 out on a CPU, without a word; its code for it runs there as well."""
    assert accelerator.mixed_precision == "fp16" and accelerator.scaler is None
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-20, growth_interval=2)


def trained(
    kind: Kind, mesh: Mesh, saved: str | None = None, resume: str | None = None, device: str = "cpu"
) -> Trained:
    """A run of three steps.

    Args:
        saved: the folder of its checkpoints. resume: the checkpoint that it goes on from.
    """
    on_gpu = device != "cpu"
    arguments = {"eval_strategy": "no", "use_cpu": not on_gpu, **kind.arguments}
    rows = Rows(labelled="answers", length=1001 if on_gpu else 23)
    run = Run(why="", rows=rows, steps=3, arguments=arguments)
    environment = {"ACCELERATE_USE_CPU": "false"} if on_gpu else {}
    with (
        launched(mesh, **environment), a_folder(saved) as folder, ExitStack() as stack,
        warnings.catch_warnings(action="ignore"),
    ):  # fmt: skip
        if "bit" in kind.arguments.get("optim", ""):
            stack.enter_context(small_tensors_in_8_bits(kind.arguments["optim"]))
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # torchao compiles a step for each shape
        trainer = trainer_of(run, mesh, folder, model_of(kind, mesh, device))
        if kind.fsdp is not None and mesh.cp > 1:
            under_fsdp2(trainer, kind.fsdp)
        if kind.scaled:
            scale_losses(trainer.accelerator)
        before = weights_of(trainer.model)
        trainer.train(resume_from_checkpoint=resume)
        optimizer: Any = trainer.optimizer
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        assert any(map(in_8_bits, states)) == ("8bit" in run.arguments.get("optim", ""))
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        return Trained(
            [entry["loss"] for entry in steps], [entry["grad_norm"] for entry in steps], before,
            weights_of(trainer.model), trainer.accelerator.scaler.get_scale() if kind.scaled else 1.0,
        )  # fmt: skip


def failed_in_bitsandbytes(kind: Kind) -> str:
    """What a trainer's run fails with where the ring does not refuse bitsandbytes's optimizers."""
    with mock.patch.object(fsdp, "check_optimizer"):
        try:
            trained(kind, Mesh(cp=2))
        except NotImplementedError as error:
            return str(error)
    return "nothing"


def refused(kind: Kind) -> str:
    """What a trainer's run is refused with."""
    raised = attempt(trained, kind, Mesh(cp=2))
    return "nothing" if raised is None else f"{raised[0]}: {raised[1]}"


def refused_where_weights_are_packed() -> str:
    """What a step of QLoRA is refused with on a CPU that packs 4-bit weights."""
    mesh = Mesh(cp=2)
    kind = Kind(why="", lora=LORA, quantized=NF4)
    with launched(mesh), warnings.catch_warnings(action="ignore"):
        hf_ring_attn.install()
        model = model_of(kind, mesh)
        for part in model.modules():
            if hasattr(part, "support_avx512bf16_for_cpu"):
                part.support_avx512bf16_for_cpu = True
        raised = attempt(one_step, model.train())
    return "nothing" if raised is None else f"{raised[0]}: {raised[1]}"


def one_step(model: Any) -> None:
    sharded = hf_ring_attn.shard(tokens(23), model=model)
    with sharded:
        model(**sharded.inputs)


# ---- float16 with a scaled loss --------------------------------------------------------------------------------------


@dataclass
class Scaled:
    """Of each step the loss, the scale of the loss, and if the optimizer moved; the weights after all."""

    losses: list[float]
    scales: list[float]
    moved: list[bool]
    after: dict[str, Tensor]


def with_scaled_loss(in_ring: bool, wrap: str, overflow: int) -> Scaled:
    """Four steps in float16 under autocast with torch's GradScaler.

    Args:
        wrap: "", "DDP" or "FSDP2".
        overflow: the rank where one row of the embeddings has an infinite gradient in the second step.
    """
    ring, overflows = in_ring, not in_ring or dist.get_rank() == overflow
    model: Any = tiny("llama", "ring_fp32" if ring else "sdpa").train()
    wrapped = model
    if ring and wrap == "DDP":
        wrapped = DistributedDataParallel(model)
    elif ring and wrap == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    found = Scaled([], [], [], {})
    for number in range(4):
        batch: Any = tokens(23, seed=number)
        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.float16))
            if ring:
                sharded = stack.enter_context(hf_ring_attn.shard(batch, model=wrapped))
                batch = sharded.inputs
            if number == 1 and overflows:
                stack.callback(model.model.embed_tokens.register_forward_hook(_overflow).remove)
            loss = wrapped(**batch).loss
        scaler.scale(loss).backward()
        if ring and not wrap:
            sharded.reduce_gradients(wrapped)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
        before = weights_of(model)["model.norm.weight"]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.losses.append(float(sharded.reduce(loss.detach()) if ring else loss))
        found.scales.append(scaler.get_scale())
        found.moved.append(not torch.equal(before, weights_of(model)["model.norm.weight"]))
    found.after = weights_of(model)
    return found


def _overflow(_module: Any, _args: Any, hidden: Tensor) -> None:
    hidden.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([0]), float("inf")))
