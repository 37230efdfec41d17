r"""accelerate's documented loop for context parallelism, unchanged but for the import and "ring_fp32".

    ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/accelerate/cpu_2ranks.yaml \
        examples/accelerate_loop.py

`maybe_context_parallel` shards tensors in place and cannot pad them: their length must be a multiple of 2 * cp_size.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import hf_ring_attn  # noqa: F401  registers "ring_fp32"
from small import small_llama
from text import Rows


def main() -> None:
    accelerator = Accelerator()
    model = small_llama(attention="ring_fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, total_iters=3)
    loader = DataLoader(Rows(4, 1000))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for step, batch in enumerate(loader):
        buffers = list(batch.values())
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        whole = accelerator.reduce(loss.detach(), "mean")  # in a ring loss is that of whole rows already
        accelerator.print(f"step {step}: loss {whole:.7f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
