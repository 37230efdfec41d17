"""Checkpoints in host memory: the inputs of layers and their saved attention, under one budget of GPU memory.

The last layers' stay, since a backward needs them first. Saved attention travels with the input of its layer. Buffers
are made ahead, and all ranks agree that they have them: a rank that ran out of host memory in the middle of a forward
would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ... import errors
from ...attention.saved_results import Pair, Saved, save_here
from ...layers.host_memory import HostMemory, Stored, host_memory, make_room
from ..context.batch_context import BatchContext
from ..context.model_record import ModelRecord
from ..log import warn
from ..patching import modules
from .auto_saving import saves_attention

SMALLEST = 1 << 20
"""Bytes below which a tensor stays on a GPU."""
_SAVING = "saving"
"""The key of the hook before a model's state dict."""


class CheckpointedLayer:
    """A checkpointed layer, and its place among the others.

    Args:
        stock: the host asked for offloading, too.

    Attributes:
        order: all checkpointed layers in order, this one at ``index``; empty: unknown.
        saved: bytes of saved attention per byte of the layer's input; None: not known yet.
        per_token: bytes of each tensor that could leave, per token of the text model's row, of batches that save
            attention (True) and that do not; empty: not known.
        device: of the layer's input (weights may be elsewhere).
    """

    def __init__(self, stock: bool) -> None:
        self.stock = stock
        self.order: Sequence[CheckpointedLayer] = ()
        self.index = 0
        self.saved: float | None = None
        self.per_token: dict[bool, list[float]] = {False: [], True: []}
        self.device = torch.device("cpu")

    def is_among_last(self, count: int) -> bool:
        """Returns True if at most ``count`` layers are left, this one included."""
        return 0 < len(self.order) - self.index <= count

    def stays(self, size: int, limit: float, saves: bool) -> bool:
        """Returns True if this layer and all after it, each with an input of ``size`` bytes, fit in ``limit`` GiB."""
        known = max((layer.saved for layer in self.order if layer.saved is not None), default=None)
        if not self.order or (saves and known is None):
            return False
        later = self.order[self.index :]
        beside = sum(known if layer.saved is None else layer.saved for layer in later) if saves and known else 0.0
        return (len(later) + beside) * size <= limit * 2**30


def number(layers: Sequence[CheckpointedLayer]) -> None:
    """Gives each layer its place in the order."""
    for index, layer in enumerate(layers):
        layer.order, layer.index = layers, index


def input_bytes(layers: Sequence[CheckpointedLayer]) -> float:
    """The bytes of all layers' inputs per token; 0: not known yet. A layer that never ran counts as the first."""
    found = [layer.per_token[False][:1] for layer in layers]
    known = next(filter(None, found), [0.0])
    return sum(size for sizes in found for size in sizes or known)


class StoredResults(NamedTuple):
    """Results of an attention in host memory."""

    out: Stored
    lse: Tensor | Stored

    def results(self) -> Pair:
        lse = self.lse.fetch() if isinstance(self.lse, Stored) else self.lse.detach()
        return self.out.fetch(), lse


class LayerCall:
    """One call of a checkpointed layer: decides where its input and its saved attention wait.

    Args:
        limit: GiB on the GPU. saves: attention is saved.
    """

    def __init__(self, layer: CheckpointedLayer, limit: float, saves: bool, context: BatchContext) -> None:
        self.layer, self.limit, self.saves = layer, limit, saves
        self.context = context
        self.input: Stored | None = None
        self.sizes: list[int] = []
        self.beside = 0
        self.of_row = False

    def pack(self, x: Tensor) -> Tensor | Stored:
        """The hook for the layer's arguments."""
        memory = host_memory(x.device)
        if not x.numel() or type(x) is not Tensor:
            memory.settle()
            return x
        if not self.sizes:
            self.of_row = x.shape[:2] == self.context.local_shape
        self.sizes.append(x.nbytes)
        self.layer.device = x.device
        if _is_small(x) or self.layer.stays(x.nbytes, self.limit, self.saves):
            memory.settle()
            return x
        try:
            stored = memory.store(x)
        except errors.HostMemoryFull as error:
            _note(memory, error)
            return x
        self.input = self.input or stored
        return stored

    @staticmethod
    def unpack(x: Tensor | Stored) -> Tensor:
        return x.fetch() if isinstance(x, Stored) else x

    def save(self, out: Tensor, lse: Tensor) -> Saved:
        """Saves an attention's results where the layer's input is."""
        self.sizes += [out.nbytes, lse.nbytes]
        self.beside += out.nbytes + lse.nbytes
        if self.input is None or _is_small(out):
            return save_here(out, lse)
        memory = self.input.memory
        memory.settle()
        try:
            away = self.input.store_beside(out)
            return StoredResults(away, lse.detach() if _is_small(lse) else self.input.store_beside(lse))
        except errors.HostMemoryFull as error:
            _note(memory, error)
            return save_here(out, lse)

    def end(self) -> None:
        """Notes the sizes, for other layers and for the next row."""
        if self.sizes and self.saves:
            self.layer.saved = self.beside / self.sizes[0]
        each = [size / self.context.local_shape.numel() for size in self.sizes] if self.of_row else []
        self.layer.per_token[saves_attention(self.context)] = each
        pending = self.context.state(_Pending)
        if pending.reserve is not None and self.of_row:
            reserve, pending.reserve = pending.reserve, None
            reserve()


def _is_small(x: Tensor) -> bool:
    return x.device.type != "cpu" and x.nbytes < SMALLEST


def _note(memory: HostMemory, error: errors.HostMemoryFull) -> None:
    """Keeps a tensor where it is: an error now would leave the other ranks waiting. `reserve` raises it on all."""
    memory.full = error
    warn(f"{error} Until all ranks stop for it, they stay on the GPU.")


class CheckpointedLayers(list[CheckpointedLayer]):
    """The numbered layers of a model in a batch that offloads."""


class _Pending:
    """A reservation that waits for the sizes of a first layer."""

    def __init__(self) -> None:
        self.reserve: Callable[[], None] | None = None


def reserve(model: nn.Module, record: ModelRecord, context: BatchContext) -> None:
    """Makes the buffers that a training step needs, on all ranks or on none; in the first batch after its first layer.

    Raises:
        HostMemoryFull: this rank has too little host memory, now or in the middle of the batch before.
        RefusedElsewhere: on every other rank.
    """
    layers = record.state(CheckpointedLayers)
    if not layers or not record.uses_ring() or not model.training or not torch.is_grad_enabled():
        return
    if not modules.attached(model, _SAVING):
        modules.keep(model, _SAVING, [model.register_state_dict_pre_hook(make_room_to_save)])
    if any(layer.per_token[saves_attention(context)] for layer in layers):
        _reserve(layers, context)
    else:
        context.state(_Pending).reserve = partial(_reserve, layers, context)


def make_room_to_save(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Gives idle buffers back before a state dict is made, if host memory is short of twice the weights.

    A checkpoint has the weights and a copy that is being written, or AdamW's two states, in host memory. The next step
    makes the buffers again.
    """
    make_room(2 * sum(x.nbytes for x in model.parameters()))


def _reserve(layers: Sequence[CheckpointedLayer], context: BatchContext) -> None:
    first, ring = next(layer for layer in layers if layer.per_token[saves_attention(context)]), context.ring
    device = first.device
    memory = host_memory(device)
    failure: Exception | None = memory.full
    memory.full = None
    try:
        memory.buffers.reserve(_sizes(layers, first, context))
    except Exception as error:  # noqa: BLE001  raised below; else the others would wait
        failure = failure or error
    ring.agree({}, ring.small_device(device), failure=failure, doing="reserved host memory for checkpoints")


def _sizes(layers: Sequence[CheckpointedLayer], first: CheckpointedLayer, context: BatchContext) -> list[int]:
    """Bytes of each tensor that layers will store; a layer that never ran counts as the ``first`` one that did."""
    found, tokens, saved = [], context.local_shape.numel(), saves_attention(context)
    for layer in layers:
        each = [round(size * tokens) for size in layer.per_token[saved] or first.per_token[saved]]
        if not layer.stays(each[0], context.config.offload_above or 0.0, saved):
            found += [size for size in each if first.device.type == "cpu" or size >= SMALLEST]
    return found
