"""What ranks and one process compute of layers that look along the row: a convolution, and a recurrence by heads."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import conv1d

from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.layers import halo, head_parallel
from hf_ring_attn.layers.halo import RowShare
from hf_ring_attn.sharding.layout import Layout
from tests.helpers.defects import planted
from tests.helpers.rank_functions import Answer

KEY, VALUE, WIDTH, CHANNELS = 3, 2, 4, 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """Two rows of ``length`` tokens, each of documents of these lengths; () for one document.

    ``heads``: of the recurrence; ``groups``: how many keys and queries they share.
    """

    why: str
    length: int = 23
    documents: tuple[tuple[int, ...], ...] = ()
    heads: int = 4
    groups: int = 2
    chunks: int = 0
    """Chunks that each rank holds, dealt at random; 0 for the zigzag."""

    def layout(self, world_size: int, rank: int) -> Layout:
        owners = list(range(world_size)) * self.chunks
        random.Random(self.chunks).shuffle(owners)
        return Layout(self.length, world_size, rank, tuple(owners))

    def ids(self) -> Tensor | None:
        rows = [torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)) for counts in self.documents]
        return torch.stack(rows) if rows else None


ROWS = [
    Row(why="a length that fits", length=24),
    Row(why="padding of the ring"),
    Row(why="chunks shorter than the reach", length=9),
    Row(why="ranks that hold padding only", length=3),
    Row(why="documents, others in each row", documents=((5, 2, 16), (13, 1, 9))),
    Row(why="documents in tiny chunks", length=10, documents=((1, 4, 5), (3, 3, 4))),
    Row(why="one head, fewer than ranks", heads=1, groups=1),
    Row(why="heads that share all", heads=5, groups=1),
    Row(why="groups that ranks share unevenly", heads=6, groups=2),
    Row(why="groups that ranks share evenly", heads=8, groups=2),
    Row(why="whole groups, as many on some ranks as not on others", heads=10, groups=5),
    Row(why="fewer heads than ranks, and documents", heads=2, groups=1, documents=((5, 2, 16), (13, 1, 9))),
    Row(why="one chunk a rank", chunks=1, documents=((5, 2, 16), (13, 1, 9))),
    Row(why="four chunks a rank, padded", length=45, chunks=4, documents=((5, 7, 33), (30, 14, 1))),
    Row(why="eight chunks a rank, shorter than the reach", length=41, chunks=8, documents=((40, 1), (13, 28))),
    Row(why="sixteen chunks a rank, one document", length=130, chunks=16),
]


def numbers(row: Row) -> Answer:
    """Inputs of both layers and gradients of their outputs, signed, the same on every rank."""
    generator = torch.Generator().manual_seed(row.length + row.heads)
    shapes = {
        "x": (2, row.length, CHANNELS), "kernel": (CHANNELS, WIDTH), "bias": (CHANNELS,),
        "value": (2, row.length, row.heads, VALUE), "rate": (2, row.length, row.heads),
        "query": (2, row.length, row.groups, KEY), "key": (2, row.length, row.groups, KEY), "skip": (row.heads,),
        "d_mixed": (2, row.length, CHANNELS), "d_scanned": (2, row.length, row.heads, VALUE),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


TOKENS = ("x", "value", "rate", "query", "key")
WEIGHTS = ("kernel", "bias", "skip")


def convolved(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """[b, n, C]: each channel by itself, over WIDTH tokens that end with the token."""
    length = x.shape[1]
    out = conv1d(x.transpose(1, 2), kernel[:, None], bias, padding=WIDTH - 1, groups=CHANNELS)
    return torch.tanh(out[:, :, :length]).transpose(1, 2)


def scanned(heads: list[Tensor], shared: list[Tensor], weights: list[Tensor]) -> Tensor:
    """A state [b, h, KEY, VALUE] that decays and takes in key x value at each token, read by the query."""
    value, rate = heads
    query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], 2) for x in shared)
    state = value.new_zeros(len(value), value.shape[2], KEY, VALUE)
    outs = []
    for at in range(value.shape[1]):
        state = state * torch.sigmoid(rate[:, at, :, None, None]) + key[:, at, :, :, None] * value[:, at, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", query[:, at], state) + weights[0][:, None] * value[:, at])
    return torch.stack(outs, 1)


def alone(row: Row) -> Answer:
    """Both outputs of whole rows, document by document, and gradients of the inputs."""
    given = numbers(row)
    leaves = {name: given[name].requires_grad_() for name in (*TOKENS, *WEIGHTS)}
    mixed, results = [], []
    for at, counts in enumerate(row.documents or ((row.length,),) * 2):
        start = 0
        for count in counts:
            part = {name: leaves[name][at : at + 1, start : start + count] for name in TOKENS}
            mixed.append(convolved(part["x"], leaves["kernel"], leaves["bias"]))
            results.append(scanned([part["value"], part["rate"]], [part["query"], part["key"]], [leaves["skip"]]))
            start += count
    outs = [torch.cat(x, 1)[0].unflatten(0, (2, row.length)) for x in (mixed, results)]
    gradients = torch.autograd.grad(outs, list(leaves.values()), [given["d_mixed"], given["d_scanned"]])
    return {"mixed": outs[0].detach(), "scanned": outs[1].detach(), **dict(zip(leaves, gradients, strict=True))}


def in_a_ring(rows: list[Row], defect: str | None = None) -> list[Answer]:
    """This rank's share of both outputs and of the gradients of tokens; of weights, its summand."""
    with planted(defect):
        return [_share(row) for row in rows]


def _share(row: Row) -> Answer:
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = row.layout(size, rank)
    given, ids = numbers(row), row.ids()
    if ids is not None:
        ids = layout.pad(ids, 1, -1)
    rows = RowShare(Ring.of(None), layout, ids)
    # Padding holds large numbers: where one reaches a token, it shows.
    leaves = {name: layout.shard(layout.pad(given[name], 1, 1e6), 1).requires_grad_() for name in TOKENS}
    leaves |= {name: given[name].requires_grad_() for name in WEIGHTS}
    mixed = halo.compute_with_halo(
        leaves["x"], rows, WIDTH - 1, lambda x: convolved(x, leaves["kernel"], leaves["bias"])
    )
    result = head_parallel.compute_by_heads(
        rows, [leaves["value"], leaves["rate"]], [leaves["query"], leaves["key"]], [leaves["skip"]], scanned
    )
    douts = [layout.shard(layout.pad(given[name], 1), 1) for name in ("d_mixed", "d_scanned")]
    gradients = torch.autograd.grad([mixed, result], list(leaves.values()), douts)
    found = {"mixed": mixed.detach(), "scanned": result.detach(), **dict(zip(leaves, gradients, strict=True))}
    real = _places(row, rank, size, -(-row.length // (size * (row.chunks or 2)))) < row.length
    return {name: x if name in WEIGHTS else x[:, real[: x.shape[1]]] for name, x in found.items()}


def _places(row: Row, rank: int, size: int, chunk: int) -> Tensor:
    """The places of a rank's tokens, padding included, in words of its own."""
    owners = row.layout(size, rank).owners if row.chunks else (*range(size), *reversed(range(size)))
    return (torch.tensor(owners).repeat_interleave(chunk) == rank).nonzero().flatten()


def joined(shares: list[Answer], row: Row) -> Answer:
    """The answer of the whole row from those of its ranks: tokens in order, weights' gradients summed."""
    answer: Answer = {}
    for name, first in shares[0].items():
        if name in WEIGHTS:
            answer[name] = torch.stack([share[name] for share in shares]).sum(0)
            continue
        answer[name] = torch.full((2, row.length, *first.shape[2:]), torch.nan, dtype=first.dtype)
        for rank, share in enumerate(shares):
            size = len(shares)
            places = _places(row, rank, size, -(-row.length // (size * (row.chunks or 2))))
            answer[name].index_copy_(1, places[places < row.length], share[name])
    return answer
