"""What ranks run for tests/integration/gradients/test_fsdp.py: accelerate's own FSDP2, which it gives to GPUs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import Trainer
from transformers.loss import loss_utils
from transformers.trainer_pt_utils import LabelSmoother

import hf_ring_attn
from hf_ring_attn import RingConfig
from tests.helpers.jobs.plain_jobs import Batch
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import launched
from tests.helpers.models.tiny_models import tiny

Way = Literal["a loop", "a loop that names the model", "Trainer"]

Answer = tuple[MixedPrecisionPolicy, Tensor, Tensor]


def _accelerator(chosen: MixedPrecisionPolicy | None = None) -> Accelerator:
    """Accelerate's own FSDP2 over the ring, for mixed_precision "bf16"; call it in `launched`."""
    accelerator = Accelerator(mixed_precision="bf16", parallelism_config=ParallelismConfig(cp_size=2))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", mixed_precision_policy=chosen
    )
    plugin.set_mixed_precision("bf16")  # as AcceleratorState does, where there are GPUs
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def step_in_half(batch: Batch, chosen: MixedPrecisionPolicy | None = None) -> Answer:
    """The policy of a model that accelerate has sharded for mixed_precision "bf16", the loss of one step, a gradient.

    Args:
        chosen: the policy of a user, in place of accelerate's default.
    """
    with launched(Mesh(cp=2)):
        accelerator, made = _accelerator(chosen), tiny("llama", "ring_fp32")
        model, _ = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        gradient = model.model.layers[0].self_attn.q_proj.weight.grad.full_tensor()
        return accelerator.state.fsdp_plugin.mixed_precision_policy, loss.detach(), gradient


def wrapped_layers(kind: str, adapted: bool) -> tuple[set[str], list[str]]:
    """The classes of the modules that accelerate sharded, and what the model calls its layers afterwards."""
    with launched(Mesh(cp=2)):
        made: Any = tiny(kind, "ring_fp32")
        accelerator = _accelerator()
        if adapted:
            made = get_peft_model(made, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
        model, _ = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
        sharded = {type(part).__name__.removeprefix("FSDP") for part in model.modules() if isinstance(part, FSDPModule)}
        return sharded, list(model._no_split_modules)


def sharded_weights(dtype: torch.dtype | None = None, root: bool = True) -> Any:
    """A Llama in float32 whose weights FSDP2 shards over all ranks, to compute in ``dtype``.

    Args:
        root: those beside its layers, too.
    """
    model: Any = tiny("llama", "ring_fp32")
    for part in (*model.model.layers, *([model] if root else ())):
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=MixedPrecisionPolicy(dtype))
    return model


def trainer_with(model: Any, smoother: LabelSmoother | None = None) -> Any:
    """What `Trainer.compute_loss` reads of a Trainer, of one that averages no counts."""
    size, cp = dist.get_world_size(), SimpleNamespace(get_group=lambda: dist.group.WORLD)
    accelerator = SimpleNamespace(
        parallelism_config=SimpleNamespace(cp_size=size, cp_backend="ring", sp_backend="", sp_enabled=False),
        torch_device_mesh={"cp": cp}, unwrap_model=lambda model: model,
    )  # fmt: skip
    return SimpleNamespace(
        args=SimpleNamespace(average_tokens_across_devices=False), compute_loss_func=None, label_smoother=smoother,
        model_accepts_loss_kwargs=True, accelerator=accelerator, model=model,
    )  # fmt: skip


def counts_that_arrive(batch: dict[str, Any], dtype: torch.dtype, way: Way) -> list[float]:
    """By what the loss of each rank's tokens was divided, under FSDP2 that computes in ``dtype``."""
    model, seen = sharded_weights(dtype), []
    original = loss_utils.fixed_cross_entropy

    def spy(source: Tensor, target: Tensor, num_items_in_batch: Any = None, *rest: Any, **more: Any) -> Tensor:
        seen.append(float(num_items_in_batch))
        return original(source, target, num_items_in_batch, *rest, **more)

    sharded = hf_ring_attn.shard(batch, config=RingConfig(self_check=False), model=None if way == "a loop" else model)
    inputs = dict(sharded.inputs)
    with mock.patch.object(loss_utils, "fixed_cross_entropy", spy), sharded:
        if way == "Trainer":
            # Trainer counts the tokens of whole rows, of which `shard` gives a rank's part.
            count = torch.tensor(float(inputs.pop("num_items_in_batch"))) * dist.get_world_size()
            Trainer.compute_loss(trainer_with(model), model, inputs, num_items_in_batch=count)
        else:
            model(**inputs)
    return seen


def smoothed(batch: Batch, wrap: str) -> tuple[Tensor, Tensor]:
    """Trainer's smoothed loss of the gathered logits, and that of the model without a ring or wrappers."""
    smoother, count = LabelSmoother(0.1), batch["labels"][:, 1:].ne(-100).sum()
    model: Any = sharded_weights() if wrap == "FSDP2" else tiny("llama", "ring_fp32")
    if wrap == "compiled":
        model = torch.compile(model, backend="eager")
    with hf_ring_attn.whole_rows(model):
        got = Trainer.compute_loss(trainer_with(model, smoother), model, dict(batch), False, count)
    plain = tiny("llama", "eager")(input_ids=batch["input_ids"])
    assert isinstance(got, Tensor)
    return got.detach(), smoother(plain, batch["labels"], shift_labels=True, num_items_in_batch=count).detach()
