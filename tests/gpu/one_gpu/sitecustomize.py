"""With this folder on PYTHONPATH, the ranks of any launched program share one GPU.

NCCL refuses such ranks, so gloo serves the collectives. It moves tensors of a GPU through the host: slow, with the same
numbers. The ring's own copies need the variable below.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_ring_attn.bench.world import OVERLAP

os.environ[OVERLAP] = "1"
start = dist.init_process_group


@functools.wraps(start)
def with_gloo(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
    start("gloo", *args, **kwargs)


dist.init_process_group = with_gloo
wait_for_all = dist.barrier


@functools.wraps(wait_for_all)
def without_devices(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
    """accelerate names the GPU of a rank's number, which is not there."""
    return wait_for_all(*args, **kwargs)


dist.barrier = without_devices
make = DistributedDataParallel.__init__


@functools.wraps(make)
def on_the_gpu_in_use(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
    """It is named by a rank's number here, too."""
    here = [torch.cuda.current_device()] if device_ids else None
    make(self, module, here, None if device_ids else output_device, **kwargs)


DistributedDataParallel.__init__ = on_the_gpu_in_use  # type: ignore[method-assign, assignment]
