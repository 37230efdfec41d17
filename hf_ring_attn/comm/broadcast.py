"""A tensor of a ring's first rank, for all its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .ring import Ring, following_peers


def tensor_of_first(tensor: Tensor, ring: Ring, doing: str) -> Tensor:
    """Broadcasts the first rank's tensor; the others', of its shape, dtype and device, may hold anything.

    Raises:
        PeerLost: another rank failed, or is late.
    """
    if ring.size == 1 or tensor.numel() == 0:
        return tensor
    sent = tensor.to(ring.small_device(tensor.device) if tensor.device.type == "cpu" else tensor.device).contiguous()
    with following_peers(doing, ring):  # as bytes: backends do not know all dtypes
        dist.broadcast(sent.view(-1).view(torch.uint8), group=ring.group, group_src=0)
    return sent.to(tensor.device)
