"""Mistakes that a ring attention can make, planted on purpose: a test that stays green with one of them is no test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import hf_ring_attn
from hf_ring_attn.attention import function
from hf_ring_attn.comm.ring import Pending, Ring
from hf_ring_attn.integration.batch.shard import Sharded
from hf_ring_attn.integration.context import whole_batch
from hf_ring_attn.kernels import Place, ScoreMod, reference
from hf_ring_attn.kernels.reference import Block, Reference
from hf_ring_attn.kernels.score_mods.score_mod import Indices, Pull
from hf_ring_attn.layers import collectives, halo, head_parallel, rows
from hf_ring_attn.layers.halo import Piece, RowShare, Span
from hf_ring_attn.layers.head_parallel import Compute
from hf_ring_attn.sharding import plan
from hf_ring_attn.sharding.layout import Layout, Run
from hf_ring_attn.sharding.mask import Band, Mask, tiles
from hf_ring_attn.traffic import Messages, RingStep

Patch = AbstractContextManager[Any]


def _gradients_arrive(changed: Callable[[Tensor], Tensor]) -> Patch:
    send_on = Ring.send_on

    def sent(self: Ring, tensors: Sequence[Tensor], doing: str) -> Pending:
        pending = send_on(self, tensors, doing)
        if doing != "passed gradients on":
            return pending
        return Pending(self, doing, [changed(x) for x in pending.wait()], ())

    return mock.patch.object(Ring, "send_on", sent)


def bf16_hop() -> Patch:
    """Gradients travel in bfloat16."""
    return _gradients_arrive(lambda x: x.bfloat16().to(x.dtype))


def unflipped_half() -> Patch:
    """The second halves of a gather are put down in the ranks' order, not in the row's."""

    def merge(self: Layout, gathered: Tensor) -> Tensor:
        if self.world_size == 1:
            return gathered[0]
        halves = gathered.unflatten(2, (2, -1))
        return torch.cat([halves[:, :, half].transpose(0, 1).flatten(1, 2) for half in (0, 1)], 1)

    return mock.patch.object(Layout, "merge", merge)


def contiguous_chunks() -> Patch:
    """The ring believes that rank r holds chunks 2r and 2r + 1."""

    def runs(self: Layout, rank: int | None = None) -> tuple[Run, ...]:
        return (Run(0, (self.rank if rank is None else rank) * self.local_length, self.local_length),)

    return mock.patch.object(Layout, "runs", runs)


def _hops_are(changed: Callable[[Messages, RingStep, Tensor, Tensor], RingStep]) -> Patch:
    ring_pass = Messages.ring_pass

    def changed_steps(self: Messages, k: Tensor, v: Tensor, *more: Any) -> Iterator[RingStep]:
        for hop in ring_pass(self, k, v, *more):
            yield changed(self, hop, k, v)

    return mock.patch.object(Messages, "ring_pass", changed_steps)


def ring_turned() -> Patch:
    """Keys are taken to be those of the rank that they will go to, not of the one that they came from."""
    return _hops_are(lambda by, hop, k, v: hop._replace(source=(2 * by.ring.rank - hop.source) % by.ring.size))


def keys_stay() -> Patch:
    """Keys and values are not passed on: every step sees this rank's own."""
    return _hops_are(lambda transport, hop, k, v: hop._replace(k=k[:, :, hop.heads], v=v[:, :, hop.heads]))


def window_off_by_one() -> Patch:
    """A window reaches one token too far to the left."""
    band = function._band

    def wider(causal: bool, window: tuple[int | None, int | None]) -> Band:
        lo, hi = band(causal, window)
        return Band(lo, hi if window[0] is None else hi + 1)

    return mock.patch.object(function, "_band", wider)


def local_positions() -> Patch:
    """The window is handed unchanged to every step of the ring, as if its keys were this rank's own."""

    def same(mask: Mask, queries: Sequence[Run], keys: Sequence[Run], key_block: int = 1) -> Tensor:
        backward = len(keys) == len(queries) and sum(run.length for run in keys) == sum(run.length for run in queries)
        return tiles(mask, queries, queries if backward else keys, key_block)

    return mock.patch.object(plan, "tiles", same)


def reused_buffer() -> Patch:
    """Gradients are added into buffers that are kept from step to step and not cleared."""
    new_gradient = Reference.new_gradient
    kept: dict[tuple[str, int], Tensor] = {}

    def reused(self: Reference, chunk: Tensor, place: Place | None = None) -> Tensor:
        assert place is not None
        return kept.setdefault((place.of, chunk.numel()), new_gradient(self, chunk))

    return mock.patch.object(Reference, "new_gradient", reused)


def dropped_hop() -> Patch:
    """What the ranks before have added is lost on the way."""
    return _gradients_arrive(torch.zeros_like)


def documents_forgotten() -> Patch:
    """All tokens are of one document, padding too."""

    def none(documents: Tensor | None, batch: int, layout: Layout) -> None:
        return None

    return mock.patch.object(function, "_documents", none)


def labels_shifted_late() -> Patch:
    """Labels are shifted on each rank's tokens: to the next token of the shard, not of the row."""
    shard = hf_ring_attn.shard

    def late(given: Mapping[str, Any]) -> Sharded:
        sharded: Sharded = shard(given)
        labels = sharded.inputs["labels"]
        sharded.inputs["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=whole_batch.IGNORED)
        return sharded

    return mock.patch.object(hf_ring_attn, "shard", late)


def local_indices() -> Patch:
    """A score_mod is told where queries and keys lie on this rank, not in the row."""
    blocks = reference.blocks

    def local(table: Tensor, heads: int, device: torch.device) -> Iterator[Block]:
        for block in blocks(table, heads, device):
            yield block._replace(q_position=block.queries.start, k_position=block.keys.start)

    return mock.patch.object(reference, "blocks", local)


def local_heads() -> Patch:
    """A score_mod is told the number of a head among those that were gathered together."""
    return mock.patch.object(ScoreMod, "of_heads", lambda self, heads: self)


def captured_overwritten() -> Patch:
    """Of the tiles, only the last adds to the gradient of what a score_mod captures."""
    differentiable = ScoreMod.differentiable

    def overwriting(self: ScoreMod, scores: Tensor, at: Indices, sums: dict[str, Tensor]) -> tuple[Tensor, Pull]:
        parts = {name: torch.zeros_like(x) for name, x in sums.items()}
        after, pull = differentiable(self, scores, at, parts)

        def last(d_after: Tensor) -> Tensor:
            d_before = pull(d_after)
            sums.update(parts)
            return d_before

        return after, last

    return mock.patch.object(ScoreMod, "differentiable", overwriting)


def runs_by_themselves() -> Patch:
    """A convolution starts anew with each run of a rank's tokens."""
    along = halo._with_tokens_before

    def without(x: Tensor, rows: RowShare, reach: int) -> tuple[Tensor, Tensor]:
        x, before = along(x, rows, reach)
        return x, before * 0

    return mock.patch.object(halo, "_with_tokens_before", without)


def states_stay() -> Patch:
    """A recurrence starts anew on each rank, with the rank's own tokens of all heads."""

    def local(
        rows: RowShare, heads: Sequence[Tensor], shared: Sequence[Tensor], weights: Sequence[Tensor], compute: Compute
    ) -> Tensor:
        return compute(list(heads), list(shared), list(weights))

    return mock.patch.object(head_parallel, "compute_by_heads", local)


def states_leak() -> Patch:
    """What carries state knows no documents."""
    return mock.patch.object(RowShare, "pieces", property(lambda self: [[Piece(slice(None), 0, self.layout.length)]]))


def shares_overwritten() -> Patch:
    """Of the ranks that used a shared input, only the last adds to its gradient."""

    def last(x: Tensor, part: list[Span], count: int) -> Tensor:
        total = x.new_zeros(count, *x.shape[1:])
        for (lo, hi), piece in zip(part, x.split([stop - start for start, stop in part]), strict=True):
            total[lo:hi] = piece
        return total

    return mock.patch.object(head_parallel, "_sum", last)


def row_sum_times_ranks() -> Patch:
    """The sum of a row is multiplied by the ring size, as a rank's share of a loss is."""
    sum_over_ring = collectives.sum_over_ring
    return mock.patch.object(rows, "sum_over_ring", lambda x, ring: sum_over_ring(x, ring) * ring.size)


def row_gradient_of_one_rank() -> Patch:
    """The gradient of a row's sum is passed on as it is, so that a mean over ranks divides it by the ring size."""

    def summed(x: Tensor, ring: Ring) -> Tensor:
        return x + (ring.total(x.detach()) - x.detach())

    return mock.patch.object(rows, "sum_over_ring", summed)


def chunks_in_order_of_ranks() -> Patch:
    """A cumulative sum takes the chunks of a row to lie in the order of ranks."""

    def gathered(x: Tensor, ring: Ring, layout: Layout) -> Tensor:
        return torch.cat([*ring.gather(x.detach()).wait()[0]], 1)

    return mock.patch.object(rows, "gather_sequence", gathered)


def mask_shifted_late() -> Patch:
    """A mask is moved to the tokens that predict after it was sharded. The program does so by itself."""
    return nullcontext()


DEFECTS: dict[str, Callable[[], Patch]] = {
    defect.__name__: defect
    for defect in (
        bf16_hop, unflipped_half, contiguous_chunks, ring_turned, keys_stay, window_off_by_one, local_positions,
        reused_buffer, dropped_hop, documents_forgotten, labels_shifted_late, local_indices, local_heads,
        captured_overwritten, runs_by_themselves, states_stay, states_leak, shares_overwritten,
        row_sum_times_ranks, row_gradient_of_one_rank, chunks_in_order_of_ranks, mask_shifted_late,
    )
}  # fmt: skip


@contextmanager
def planted(defect: str | None) -> Iterator[None]:
    """The defect of that name, on this process, while the context lasts; None plants nothing.

    Plans are made anew meanwhile: one that is cached would hide a defect of planning, or keep it for the tests after.
    """
    if defect is None:
        yield
        return
    with DEFECTS[defect](), mock.patch.object(plan, "_cached", plan._cached.__wrapped__):
        yield
