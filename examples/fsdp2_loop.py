r"""A loop in which FSDP2 shards the parameters and the ring shards sequences, over the same ranks of accelerate's mesh.

    ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/accelerate/cpu_2ranks.yaml \
        examples/fsdp2_loop.py

On GPUs accelerate does this itself (recipes/accelerate/gpu_8_fsdp2.yaml); on CPUs it has no FSDP, so it is called here.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import hf_ring_attn
from small import small_llama
from text import Rows


def main() -> None:
    accelerator = Accelerator()
    if accelerator.torch_device_mesh is None:
        raise SystemExit("started without a ring: use the command at the head of this file")
    mesh = accelerator.torch_device_mesh["cp"]  # the axis "dp_shard_cp" where dp_shard_size > 1
    model = small_llama(attention="ring_fp32")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, batch in enumerate(DataLoader(Rows(4, 1001))):
        sharded = hf_ring_attn.shard(batch)  # over the mesh's "cp" axis
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()  # FSDP averages the gradients
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss:.7f}")  # of the whole batch, on every rank
    accelerator.end_training()


if __name__ == "__main__":
    main()
