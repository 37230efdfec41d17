"""Saves what attention computed, for save_attention="auto", once a step has shown that the memory for it is free.

A batch of more tokens than all before runs without. Its step is measured: the most memory that torch's allocator held
until the optimizer stepped, and the bytes that saving would have added, of all batches and models whose graphs lived at
the same time. After the step, so that the optimizer's states exist, batches of up to that size are saved if all of it
would have fit, and a tenth of the GPU with it; else smaller ones. Where checkpoints wait in host memory, so do results
beyond the budget: they may take half of what is free there. With keep_layers="auto" the last layers keep all of their
activations, as many as fit into the rest: each takes what a recompute of a layer allocated in that step. Ranks exchange
their numbers with the agreement on the model, and the smallest ones decide. The bits are the same.
"""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ...attention.saved_results import HandsOn, Saved, SavedResults
from ...config import RingConfig, ranks_of_machine
from ...layers.free_memory import free_bytes
from ..context.batch_context import BatchContext
from ..context.model_record import ModelRecord
from ..log import warn
from ..patching import optimizer_steps

LEFT_FREE = 0.1
"""The part of a GPU's memory that saving leaves free."""
HOST_LEFT_FREE = 0.5
"""The part of free host memory that it leaves free: a host gathers whole models there to save them."""
IN_FLIGHT = 3
"""The most layers whose results are on the GPU on their way to the host or back."""

LOST = (
    'save_attention="auto" saves less than would fit, because torch\'s allocator lost up to {:.1f} GiB between its '
    "tensors. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids that."
)

SCARCE = (
    'save_attention="auto" saves no longer: torch\'s allocator ran out of memory, and went on after it had emptied its '
    "cache. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves it more."
)


class DeviceMemory(NamedTuple):
    """The bytes of a device that this process can have, and those that torch's allocator holds.

    Args:
        peak: the most allocated at a time since the process began, or since the program reset this counter.
        lost: the most that lay between tensors at a time: free parts of segments whose other parts are in use. The
            allocator gives back segments that are free as a whole before it runs out of memory, but not these. With
            expandable segments there are none.
        retries: how often it ran out of memory, gave back what it could, and went on.
    """

    usable: int
    allocated: int
    peak: int
    lost: int
    retries: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Reads the counters of a device; None if it has none, as a CPU, or an allocator from outside torch."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() == "pluggable":
        return None
    free, total = torch.cuda.mem_get_info(device)
    counters = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved, lost = (
        counters[f"{name}_bytes"]["all"] for name in ("allocated", "reserved", "inactive_split")
    )
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    usable = min(free + reserved["current"], allowed)
    return DeviceMemory(usable, allocated["current"], allocated["peak"], lost["peak"], counters["num_alloc_retries"])


class Budget(NamedTuple):
    """A batch's checkpoints, some of which wait in host memory.

    Args:
        limit: bytes that stay on the GPU. inputs: bytes of all layers' inputs per token; 0: not known yet.
        layers: the number of layers.
    """

    limit: float
    inputs: float
    layers: int

    def takes(self, per_token: float, tokens: int, calls: int) -> tuple[float, float]:
        """Returns the bytes that saved results of ``per_token`` bytes take on the GPU, and in host memory.

        Args:
            calls: of checkpointed layers whose graphs live at once. Each batch may keep ``limit`` bytes on the GPU.
        """
        batches = max(1.0, calls / self.layers)
        inputs, results, limit = batches * self.inputs * tokens, per_token * tokens, batches * self.limit
        here = min(limit, inputs + results) - min(limit, inputs)
        return here + IN_FLIGHT * results / max(calls, self.layers), results - here


@dataclass(eq=False)
class _Measurement:
    """Memory measured from a batch with more tokens than any before to the next step of an optimizer.

    Args:
        before: bytes allocated before its first forward. start: before a forward, the most.
        tokens: the most of a rank in a batch whose backward began. per_token: bytes of the results that would have been
            saved then, for each token of that batch; the most. calls: the most checkpointed layers whose graphs lived
            then. peak, lost: as in `DeviceMemory`, the most seen.
    """

    device: torch.device
    before: int
    start: int
    tokens: int = 0
    per_token: float = 0.0
    calls: int = 0
    of_layer: float = 0.0
    peak: int = 0
    lost: int = 0
    stepped: bool = False

    def look(self) -> int:
        """Reads the peaks, which the program may reset between steps; returns the bytes that are allocated."""
        memory = device_memory(self.device)
        if memory is None:
            return 0
        self.peak, self.lost = max(self.peak, memory.peak), max(self.lost, memory.lost)
        return memory.allocated


_OPEN: weakref.WeakSet[_Measurement] = weakref.WeakSet()
"""The measurements that have not ended, of all models."""


class _Unsaved:
    """The results of one checkpoint's attentions, which would be saved as long as its graph lives.

    It is the context of the checkpoint's recomputes, which torch holds so long.

    Args:
        tokens: of a rank, in its batch.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens, self.size = tokens, 0
        self.began: list[tuple[_Measurement, int]] = []
        _UNSAVED.add(self)

    def count(self, out: Tensor, lse: Tensor) -> None:
        """Counts the results of an attention."""
        self.size += out.nbytes + lse.nbytes

    def __enter__(self) -> None:
        together = sum(one.size for one in _UNSAVED)
        for one in list(_OPEN):
            self.began.append((one, one.look()))
            one.tokens = max(one.tokens, self.tokens)
            one.per_token = max(one.per_token, together / self.tokens)
            one.calls = max(one.calls, len(_UNSAVED))

    def __exit__(self, *_error: object) -> None:
        for one, before in self.began:
            one.of_layer = max(one.of_layer, (one.look() - before) / self.tokens)
        self.began.clear()


_UNSAVED: weakref.WeakSet[_Unsaved] = weakref.WeakSet()
"""Those of all graphs that live: of several batches, if their backwards come later, and of several models."""


def _note_step(_optimizer: Optimizer) -> None:
    for one in list(_OPEN):
        one.look()
        one.stepped = True


class _Room:
    """The measurements of a model.

    Attributes:
        tokens: batches of up to so many tokens of a rank fit with their results. tried: the most tokens so far.
        start: the most bytes that were allocated before a batch, as far as it is known.
        batches: how many began since the last measurement ended. retries: the allocator's, when the first one began.
        shown: the last measurement that ended, and the bytes that were free in its step.
    """

    def __init__(self) -> None:
        self.tokens = self.tried = self.start = self.batches = self.retries = 0
        self.measurement: _Measurement | None = None
        self.shown: tuple[_Measurement, int] | None = None

    def begin(self, tokens: int, device: torch.device, memory: DeviceMemory) -> None:
        """Begins the measurement of a batch of more tokens than all before."""
        optimizer_steps.call_before_each_step(_note_step)
        self.tried = tokens
        if self.measurement is None:
            self.measurement = _Measurement(device, memory.allocated, memory.allocated)
            _OPEN.add(self.measurement)

    def at_batch(self, memory: DeviceMemory, budget: Budget | None) -> None:
        """Ends the measurement, if an optimizer has stepped. Forgets all if the program has taken memory since.

        Nothing is saved any more if the allocator runs out of memory, but for the first batch that saves: it finds the
        cache full of other sizes.
        """
        one = self.measurement
        if one is None:
            self.batches += 1
            self.retries = memory.retries if self.batches == 1 else self.retries
            if self.tokens and memory.retries > self.retries:
                warn(SCARCE, everywhere=False)
                self.tokens = 0
            if memory.allocated - self.start > LEFT_FREE / 2 * memory.usable:
                self.tokens = self.tried = 0
            return
        if not one.stepped:
            one.start = max(one.start, memory.allocated)
            return
        self.measurement, self.batches = None, 0
        self.tried = max(self.tokens, min(self.tried, one.tokens))  # a batch without a backward shows nothing
        states = max(0, memory.allocated - one.before)
        self.start = one.start + states
        if one.per_token:
            held, most = one.peak + states, int((1 - LEFT_FREE) * memory.usable)
            filled = int(memory.usable / (1 + one.lost / max(1, one.peak)))  # the loss grows with what is held
            free = min(most, filled) - held
            fitting = _most(self.tried, one, free, budget)
            self.shown = one, free
            if fitting < _most(self.tried, one, most - held, budget):
                warn(LOST.format(one.lost / 2**30), everywhere=False)
            self.tokens = max(self.tokens, fitting)

    def kept(self, tokens: int, layers: int) -> int:
        """The most of so many layers whose activations fit beside all results, in a batch of so many tokens.

        0 in a program whose batches have several graphs at once: between them, kept activations would be taken for
        memory of the program.
        """
        if self.shown is None or not 0 < tokens <= self.tokens:
            return 0
        one, free = self.shown
        of_layer = one.of_layer - one.per_token / one.calls  # the results of its own attention are among them
        if of_layer <= 0 or one.calls > layers:
            return 0
        return max(0, min(layers, int((free - one.per_token * tokens) / (of_layer * tokens))))


def _most(tried: int, shown: _Measurement, free: int, budget: Budget | None) -> int:
    """The most tokens, up to ``tried``, whose results fit into ``free`` bytes of the GPU."""
    if budget is None:
        return min(tried, int(free / shown.per_token))
    of_host = free_bytes()
    if of_host is None or not budget.inputs:
        return 0
    free_there = (1 - HOST_LEFT_FREE) * of_host / ranks_of_machine()

    def is_too_long(tokens: int) -> bool:
        here, there = budget.takes(shown.per_token, tokens, shown.calls)
        return here > free or there > free_there

    return bisect(range(1, tried + 1), False, key=is_too_long)


class _Rooms(dict[tuple[int, RingConfig], _Room]):
    """A model's measurements by the size of its ring and its options, on which memory depends."""


class Saving:
    """The decision of a batch: does it save its attention's results?

    Attributes:
        possible: "auto" was asked for, and the checkpoints of the model admitted last can save. on: they do.
        budget: of its checkpoints; None: all stay on the GPU.
        layers: how many of its checkpointed layers can keep their activations. kept: how many do, the last ones.
    """

    def __init__(self) -> None:
        self.possible = self.on = False
        self.budget: Budget | None = None
        self.layers = self.kept = 0


def saves_attention(context: BatchContext) -> bool:
    """Returns True if a batch saves its attention's results."""
    chosen = context.config.save_attention
    return context.state(Saving).on if chosen == "auto" else chosen


def offers(record: ModelRecord, context: BatchContext, device: torch.device) -> tuple[int, int]:
    """Returns the most tokens whose results of attention fit in this rank's memory, and the most layers that are kept.

    No tokens: not known yet. -1: this model cannot save, or does not train.
    """
    saving = context.state(Saving)
    if not saving.possible:
        return -1, 0
    memory, tokens = device_memory(device), _tokens(context)
    if memory is None:
        return 0, 0
    room = record.state(_Rooms).setdefault((context.ring.size, context.config), _Room())
    room.at_batch(memory, saving.budget)
    if tokens > room.tried:
        room.begin(tokens, device, memory)
    return room.tokens, room.kept(tokens, saving.layers)


def decide_saving(context: BatchContext, tokens: list[int], layers: list[int]) -> None:
    """Decides from all ranks' offers what a batch saves; a model that cannot, as a teacher, leaves it as it is."""
    if max(tokens) < 0:
        return
    saving = context.state(Saving)
    saving.on = _tokens(context) <= min(tokens)
    if saving.on:
        context.log.features.add("attention saved")
        if context.config.keep_layers == "auto":
            keep(context, min(layers))


def keep(context: BatchContext, layers: int) -> None:
    """Lets the last so many checkpointed layers of a batch keep their activations."""
    context.state(Saving).kept = layers
    if layers:
        context.log.features.add(f"{layers} layer{'s' * (layers > 1)} kept")


def contexts(
    context: BatchContext, save: Callable[[Tensor, Tensor], Saved]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]] | None:
    """The contexts of a checkpoint's forward and recomputes in a batch; None: nothing is saved or counted."""
    if saves_attention(context):
        return SavedResults(save).contexts()
    tokens = _tokens(context)
    if not tokens or not _OPEN:
        return None
    unsaved = _Unsaved(tokens)
    return HandsOn(unsaved.count), unsaved


def _tokens(context: BatchContext) -> int:
    return context.facts.rows * context.layout.local_length
