"""A small attention in a live ring, forward and gradients, beside the same attention in float64 in one process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..attention.function import ring_attention
from ..comm.ring import Ring
from ..config import Backward, RingConfig, Traffic
from ..errors import NoPulls
from ..kernels import KERNELS, Params, Request
from ..kernels.reference import whole
from ..sharding.layout import Layout
from ..sharding.mask import CAUSAL, Mask, tiles
from ..testing import Case, inputs, packed

TOKENS_PER_CHUNK, MOST_KEY_HEADS = 66, 2
LIMITS = {2: 2e-2, 4: 1e-4, 8: 1e-10}
"""Relative error of a wrong attention, by the bytes of an element: bfloat16's rounding makes 0.003."""
NAMES = ("out", "dq", "dk", "dv")


def ways(device: torch.device, gpus_are_shared: bool) -> list[tuple[Traffic, Backward]]:
    """Each transport and backward that such ranks may use. Ranks on one GPU have P2P copies only."""
    messages: list[tuple[Traffic, Backward]] = [("messages", "ring"), ("messages", "gather")]
    pulls: list[tuple[Traffic, Backward]] = [("pulls", "ring"), ("pulls", "gather")]
    if device.type == "cpu":
        return messages
    return pulls if gpus_are_shared else [*messages, *pulls]


def check(
    request: Request, ring: Ring, device: torch.device, gpus_are_shared: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yields a line for each way, and False if the ring's answer is wrong or missing; the same on every rank."""
    length = 2 * ring.size * TOKENS_PER_CHUNK
    kv_heads = min(request.kv_heads, MOST_KEY_HEADS)
    case = Case(
        why="live ranks", length=length, heads=kv_heads * (request.heads // request.kv_heads), kv_heads=kv_heads,
        head_dim=request.head_dim, value_dim=request.value_dim, softcap=3.0 if request.softcap else None,
        sinks=request.sinks, documents=(packed(length // 3, length - length // 3),),
    )  # fmt: skip
    given = inputs(case, request.dtype)
    row = [given[name].to(device) for name in ("q", "k", "v", "dout")]
    documents = torch.arange(length) // 50 % 2 if request.holes else given["documents"]
    sinks = None if given["sinks"] is None else given["sinks"].to(device)
    want = _alone(case, row, documents, sinks)
    layout = Layout(length, ring.size, ring.rank)
    for traffic, backward in ways(device, gpus_are_shared):
        config = RingConfig(traffic=traffic, backward=backward, deterministic=request.deterministic)
        name = f'  {traffic + ",":9s} backward="{backward}":'
        try:
            got = _in_ring(case, layout, row, documents, sinks, config)
            errors = _errors(ring, layout, got, want)
        except NoPulls as refusal:  # all ranks refuse together
            yield f"{name:30s} not possible here: {str(refusal).partition(': ')[2].partition('. ')[0]}", True
            continue
        except Exception as error:  # noqa: BLE001  whatever a transport raises, this way does not work here
            yield f"{name:30s} FAILED: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}", False
            return  # messages of the ranks may no longer match
        right = all(error < LIMITS[request.dtype.itemsize] for error in errors.values())
        figures = "  ".join(f"{which} {error:.1e}" for which, error in errors.items())
        yield f"{name:30s} {figures}  {'ok' if right else 'DIFFERS'}", right


def _alone(case: Case, row: list[Tensor], documents: Tensor | None, sinks: Tensor | None) -> dict[str, Tensor]:
    """The whole row in float64, by the reference kernel."""
    q, k, v, dout = (x.double() for x in row)
    ids = None if documents is None else documents.expand(1, -1)
    mask = Mask.of(CAUSAL, 1, case.length, ids)
    everything = Layout(case.length, 1, 0).whole()
    params = Params(case.head_dim**-0.5, case.softcap, None if sinks is None else sinks.double())
    return whole(KERNELS["reference"], q, k, v, dout, tiles(mask, everything, everything), params)


def _in_ring(
    case: Case, layout: Layout, row: list[Tensor], documents: Tensor | None, sinks: Tensor | None, config: RingConfig
) -> dict[str, Tensor]:
    """This rank's part of the answer."""
    q, k, v, dout = (layout.shard(x, 1).clone() for x in row)  # in a ring of one, shard returns the row itself
    for x in (q, k, v):
        x.requires_grad_()
    out = ring_attention(q, k, v, documents=documents, softcap=case.softcap, sinks=sinks, config=config)
    out.backward(dout)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def _errors(ring: Ring, layout: Layout, got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of each whole row, from the sums over all ranks; nan if a rank has one."""
    pairs = [(got[name].double(), layout.shard(want[name], 1)) for name in NAMES]
    sums = torch.stack([torch.stack([(x - y).square().sum(), y.square().sum()]) for x, y in pairs])
    wrong, size = ring.total(sums.to(ring.small_device(sums.device))).unbind(1)
    return dict(zip(NAMES, (wrong / size).sqrt().tolist(), strict=True))
