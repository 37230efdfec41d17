"""With this folder on PYTHONPATH, the ranks of any launched program share one GPU.

NCCL refuses two ranks of one host on one GPU, so each rank tells it another host: they talk over the loopback device,
with the same numbers, slowly. A program that takes gloo for such ranks gets NCCL for the GPU's tensors. The ring's own
copies need the first variable. accelerate and DDP name a GPU by a rank's number, which is not there: they get the GPU
in use.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_ring_attn.command_ranks import OVERLAP

os.environ[OVERLAP] = "1"
os.environ |= {
    "NCCL_HOSTID": f"rank {os.environ.get('RANK', '0')}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
}  # fmt: skip
start = dist.init_process_group


@functools.wraps(start)
def without_device(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
    start("cpu:gloo,cuda:nccl" if backend == "gloo" else backend, *args, **kwargs)


dist.init_process_group = without_device
wait_for_all = dist.barrier


@functools.wraps(wait_for_all)
def without_devices(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
    return wait_for_all(*args, **kwargs)


dist.barrier = without_devices
make = DistributedDataParallel.__init__


@functools.wraps(make)
def on_the_gpu_in_use(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
    here = [torch.cuda.current_device()] if device_ids else None
    make(self, module, here, None if device_ids else output_device, **kwargs)


DistributedDataParallel.__init__ = on_the_gpu_in_use  # type: ignore[method-assign, assignment]
