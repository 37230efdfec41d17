"""Sharding a batch by name, and what follows from it: the loss of the whole batch, and whole sequences back."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import errors
from ..comm import Ring, fingerprint
from ..config import RingConfig
from ..layout import Layout
from ..ring import gather_sequence
from . import active, drift, models
from .report import announce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

IGNORED = -100
PADDING = {"labels": IGNORED, "shift_labels": IGNORED}
"""What a token of padding holds, by input; 0 for all others."""
KERNEL_HINTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
"""Inputs that repeat the documents for flash attention; true for the whole row only, so they are not passed on."""
FOREIGN = {
    "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "input_features", "input_values",
    "decoder_input_ids", "encoder_outputs", "past_key_values",
}  # fmt: skip


def find_ring(group: ProcessGroup | None = None) -> Ring:
    """The ring over ``group``; if None, over accelerate's "cp" axis where it has one, else the world, else of one."""
    if group is None:
        from .accelerate import ring_group

        group = ring_group()
    return Ring.of(group)


@dataclass(eq=False)
class Sharded:
    """A batch of which this rank holds its share. See `shard`.

    Attributes:
        inputs: what to pass to the model: ``model(**sharded.inputs)``.
        ring: the ring that shares the batch; layout: who holds which token.
    """

    inputs: dict[str, Any]
    scope: active.Scope
    _context: AbstractContextManager[None] | None = field(default=None, repr=False)

    @property
    def ring(self) -> Ring:
        return self.scope.ring

    @property
    def layout(self) -> Layout:
        return self.scope.layout

    def __enter__(self) -> Sharded:
        self._context = ring_context(self.scope)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        context, self._context = self._context, None
        assert context is not None, "left a context that was not entered"
        context.__exit__(*error)

    def reduce(self, loss: Tensor) -> Tensor:
        """The loss of the whole batch from each rank's ``out.loss``: their mean, detached, the same on every rank."""
        return self.ring.mean(loss.detach())

    def gather(self, x: Tensor) -> Tensor:
        """Whole sequences in their original order from every rank's share.

        Args:
            x: [B, T, ...], such as ``out.logits``.

        Returns:
            [B, S, ...] without the ring's padding, the same on every rank. Differentiable: a loss that every rank
            computes on it gives the right gradient once gradients are averaged over ranks. Memory: S x ... on each.
        """
        if x.dim() < 2 or x.shape[1] != self.layout.local_length:
            raise errors.BadShape("x", tuple(x.shape), f"it must be [B, {self.layout.local_length}, ...]")
        return gather_sequence(x, self.ring, self.layout)

    def reduce_gradients(self, model: nn.Module) -> None:
        """Averages gradients over the ring, in float32, for a model that neither DDP nor FSDP wraps."""
        self.scope.reduced = True
        for parameter in model.parameters():
            if parameter.requires_grad and self.ring.size > 1:
                # A rank without a gradient (an unused expert, say) still has to take part in the sum.
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.ring.mean(gradient)


def shard(
    batch: Mapping[str, Any],
    group: ProcessGroup | None = None,
    *,
    config: RingConfig | None = None,
    model: nn.Module | None = None,
) -> Sharded:
    """This rank's share of a batch, and the context in which a model computes it.

    >>> sharded = hf_ring_attn.shard(batch)
    >>> with sharded:
    ...     out = model(**sharded.inputs)
    >>> out.loss.backward()                       # DDP or FSDP averages gradients; else sharded.reduce_gradients(model)
    >>> loss = sharded.reduce(out.loss)           # of the whole batch

    Every entry of shape [B, S, ...] is padded to a multiple of 2 * W and cut to this rank's T tokens. Documents are
    read from the restarts of position_ids, if there is no attention_mask; cu_seq_lens_q must tell the same ones. With
    labels, shift_labels are made from the whole row before it is cut, and num_items_in_batch is the batch's own or the
    number of labelled tokens of the whole batch, over W, so that out.loss is this rank's share times W.

    Args:
        batch: what the model would get, whole: input_ids or inputs_embeds, and any of labels, shift_labels,
            attention_mask [B, S], position_ids [B, S], num_items_in_batch (of all the batches that a step adds up) ...
            The same on every rank of the ring; it is not changed.
        group: the process group of the ring; None: accelerate's "cp" axis, else the world.
        config: options; None: those of ``model`` if given, else the defaults.
        model: the model that will run; only needed where it is compiled, to prepare it without hooks.

    Raises:
        BadBatch, UnevenLength: on every rank, if any rank's batch cannot be sharded exactly.
        RanksDiffer: on every rank, if the ranks hold different batches.
    """
    ring = find_ring(group)
    if config is None:
        config = RingConfig() if model is None else models.options_of(model)
    refusal: errors.Refused | None = None
    told = ("labels", "shift_labels", "position_ids", "attention_mask")
    facts = dict.fromkeys(("options (RingConfig)", "rows", "tokens", "input_ids", *told), 0)
    facts["options (RingConfig)"] = zlib.crc32(repr(config).encode())
    device = torch.device("cpu")
    try:
        tokens = _tokens(batch)
        device = tokens.device
        layout = Layout(tokens.shape[1], ring.size, ring.rank)
        facts.update(rows=tokens.shape[0], tokens=tokens.shape[1])
        if ring.size > 1:
            facts["input_ids"] = fingerprint(tokens)
            for name in told:
                facts[name] = fingerprint(batch.get(name))
        whole = _whole(batch, tokens, layout, config)
    except errors.Refused as error:
        refusal = error
    try:
        ring.agree(facts, ring.small_device(device), _SAME_BATCH, None if refusal is None else str(refusal))
    except errors.RefusedElsewhere as elsewhere:
        raise elsewhere from refusal
    if refusal is not None:
        raise refusal

    scope = active.Scope(
        ring, layout, config, whole.documents, whole.hidden, whole.max_position,
        has_labels=whole.items is not None, numbered=batch.get("position_ids") is None,
    )  # fmt: skip
    inputs = {
        name: layout.shard(layout.pad(x, 1, PADDING.get(name, 0)), 1) if name in whole.rows else x
        for name, x in whole.inputs.items()
    }
    items = whole.inputs.get("num_items_in_batch", whole.items)  # given: counted over several batches, perhaps
    if items is not None:
        inputs["num_items_in_batch"] = items / ring.size
    inputs["use_cache"] = False
    if model is not None:
        models.bind(model, scope)
    return Sharded(inputs, scope)


_SAME_BATCH = (
    "Every rank of a ring must be given the same whole batch: with your own DataLoader, seed its shuffling and leave "
    "out a DistributedSampler over these ranks; with an IterableDataset set dispatch_batches=False."
)


@dataclass(eq=False)
class _Whole:
    """A batch made ready to be cut: inputs, the names of those that hold a row per token, and what a mask needs."""

    inputs: dict[str, Any]
    rows: set[str]
    documents: Tensor | None
    hidden: Tensor | None
    max_position: int
    items: Tensor | None


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    foreign = sorted(name for name in FOREIGN & set(batch) if batch[name] is not None)
    if foreign:
        raise errors.BadBatch(
            f"the batch holds {foreign}: images, audio, encoders and caches cannot be sharded along the sequence yet. "
            "Train the text model alone, or without a ring."
        )
    for name in ("input_ids", "inputs_embeds"):
        tokens = batch.get(name)
        if isinstance(tokens, Tensor):
            if tokens.dim() != (2 if name == "input_ids" else 3):
                raise errors.BadShape(name, tuple(tokens.shape), "it must be [B, S] (inputs_embeds: [B, S, width])")
            return tokens
    raise errors.BadBatch(f"the batch holds neither input_ids nor inputs_embeds, only {sorted(batch)}.")


def _whole(batch: Mapping[str, Any], tokens: Tensor, layout: Layout, config: RingConfig) -> _Whole:
    rows, length = tokens.shape[:2]
    if layout.padded != length and not config.pad:
        raise errors.UnevenLength(length, layout.world_size)
    inputs = {name: x for name, x in batch.items() if x is not None and name not in KERNEL_HINTS}
    attention_mask = inputs.get("attention_mask")
    if attention_mask is not None and getattr(attention_mask, "shape", None) != (rows, length):
        what = f"has shape {tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else "is no tensor"
        raise errors.BadBatch(
            f"attention_mask {what}, but a ring takes [{rows}, {length}], one entry a "
            "token: pass the 2-D mask of the tokenizer, or position_ids that restart at each document."
        )
    given = inputs.get("position_ids")
    if given is None:
        given = torch.arange(length, device=tokens.device)[None]
    if given.dim() != 2 or given.shape[1] != length or given.shape[0] not in (1, rows):
        raise errors.BadShape("position_ids", tuple(given.shape), f"it must be [{rows}, {length}]")
    position_ids = inputs["position_ids"] = given.expand(rows, -1).contiguous()

    documents = _documents(batch, position_ids, attention_mask)
    hidden = None
    if attention_mask is not None and not bool(attention_mask.all()):
        hidden = layout.pad(attention_mask.to("cpu", torch.bool).logical_not(), 1, False)
    if layout.padded != length or documents is not None:
        if documents is None:
            documents = torch.zeros(rows, length, dtype=torch.int64)
        documents = layout.pad(documents, 1, -1)
    # 1 for every real token: with a 2-D mask present, masking_utils looks for no documents in a shard's positions.
    if attention_mask is None:
        inputs["attention_mask"] = torch.ones(rows, length, dtype=torch.int64, device=tokens.device)

    items = None
    labels = inputs.get("labels")
    if labels is not None:
        if tuple(labels.shape) != (rows, length):
            need = f"a ring needs one label a token, [{rows}, {length}]: a causal language model's"
            raise errors.BadShape("labels", tuple(labels.shape), need)
        if "shift_labels" not in inputs:
            inputs["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if "shift_labels" in inputs:
        inputs.setdefault("labels", inputs["shift_labels"])  # models compute a loss only where labels are given
        items = (inputs["shift_labels"] != IGNORED).sum()
    per_token = {n for n, x in inputs.items() if isinstance(x, Tensor) and tuple(x.shape[:2]) == (rows, length)}
    return _Whole(inputs, per_token, documents, hidden, int(position_ids.max()) if length else 0, items)


def _documents(batch: Mapping[str, Any], position_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """[B, S] ids on the CPU as transformers finds them, or None for one document a row."""
    positions = position_ids.cpu()
    restart = torch.diff(positions, dim=1) != 1
    hint = batch.get("cu_seq_lens_q")
    if attention_mask is not None:
        # Padded rows count oddly where they are padded; only a restart between two real tokens is a document's.
        real = attention_mask.to("cpu", torch.bool)
        restart &= real[:, 1:] & real[:, :-1]
        if bool(restart.any()):
            row, token = restart.nonzero()[0].tolist()
            raise errors.MixedDocuments(row, token + 1)
        if hint is not None:
            _check_hint(hint.cpu(), None, positions)
        return None
    ids = torch.nn.functional.pad(restart.cumsum(1), (1, 0)) if bool(restart.any()) else None
    if hint is not None:
        _check_hint(hint.cpu(), ids, positions)
    return ids


def _check_hint(cu_seq_lens: Tensor, ids: Tensor | None, positions: Tensor) -> None:
    """cu_seq_lens_q must tell the same documents as position_ids: kernels would follow the one, masks the other."""
    starts = {0} if ids is None else {0, *(torch.diff(ids.flatten()).nonzero().flatten() + 1).tolist()}
    starts |= set(range(0, positions.numel(), positions.shape[1]))
    told = set(cu_seq_lens.tolist()) - {positions.numel()}
    if told != starts:
        odd = sorted(told ^ starts)[:5]
        raise errors.BadBatch(
            f"cu_seq_lens_q and position_ids tell different documents (first difference at token {odd[0]}). Let "
            "position_ids restart at 0 with every document, as DataCollatorWithFlattening does."
        )


@contextmanager
def ring_context(scope: active.Scope) -> Iterator[None]:
    """The context of a sharded batch: makes its ring active, and binds every model at its first call inside."""

    def before(module: nn.Module, _inputs: Any) -> None:
        if id(module) not in scope.checked:
            models.bind(module, scope)
            drift.watch(module, scope)

    drift.tell()
    # A model that was bound by name needs no hooks, which a compiled model would trace.
    handle = None if scope.checked else torch.nn.modules.module.register_module_forward_pre_hook(before)
    try:
        with active.activate(scope):
            yield
    finally:
        if handle is not None:
            handle.remove()
    announce(scope)
