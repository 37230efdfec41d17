"""A training loop of your own: shard each batch, run the model in the ring, average the gradients over it.

    torchrun --nproc_per_node 2 examples/plain_loop.py

Every rank is given the same whole batch. The ring pads rows of 1001 tokens by itself.
"""

from __future__ import annotations

import torch
from torch import distributed
from torch.utils.data import DataLoader

import hf_ring_attn
from small import small_llama
from text import Rows


def main() -> None:
    distributed.init_process_group("gloo")
    model = small_llama(attention="ring_fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, batch in enumerate(DataLoader(Rows(4, 1001))):
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(model)  # neither DDP nor FSDP does it here
        optimizer.step()
        optimizer.zero_grad()
        if distributed.get_rank() == 0:
            print(f"step {step}: loss {loss:.7f}")  # of the whole batch, on every rank
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
