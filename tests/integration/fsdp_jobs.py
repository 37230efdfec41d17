"""What ranks run for tests/integration/test_fsdp2.py: accelerate's own FSDP2, which it gives to GPUs alone."""

from __future__ import annotations

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import hf_ring_attn
from jobs import launched
from plain_jobs import Batch
from runs import Mesh
from tiny_models import tiny

Answer = tuple[MixedPrecisionPolicy, Tensor, Tensor]


def step_in_half(batch: Batch, chosen: MixedPrecisionPolicy | None = None) -> Answer:
    """The policy of a model that accelerate has sharded for mixed_precision "bf16", the loss of one step, a gradient.

    Args:
        chosen: the policy of a user, in place of accelerate's default.
    """
    mesh = Mesh(cp=2)
    with launched(mesh):
        accelerator = Accelerator(mixed_precision="bf16", parallelism_config=ParallelismConfig(cp_size=mesh.cp))
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", mixed_precision_policy=chosen
        )
        plugin.set_mixed_precision("bf16")  # as AcceleratorState does, where there are GPUs
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        made = tiny("llama", "ring_fp32")
        model, _ = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        gradient = model.model.layers[0].self_attn.q_proj.weight.grad.full_tensor()
        return plugin.mixed_precision_policy, loss.detach(), gradient
