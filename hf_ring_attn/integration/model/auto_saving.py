"""Saves what attention computed, for save_attention="auto", once a step has shown that the memory for it is free.

A row that is longer than all before it runs without. Its step is measured: the most memory that torch's allocator held,
and the bytes that would have been saved. After the optimizer has stepped, so that its states exist, rows of up to that
length are saved if all of it would have fit, and a tenth of the GPU with it; else rows that are shorter in proportion.
Ranks exchange their lengths with the agreement on the model, and the smallest one decides. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ...attention.saved_results import Counts, Saved, SavedResults
from ..context.batch_context import BatchContext
from ..context.model_record import ModelRecord
from . import optimizer_steps

LEFT_FREE = 0.1
"""The part of a GPU's memory that saving leaves free."""


class DeviceMemory(NamedTuple):
    """The bytes of a device that this process can have, and those that torch's allocator holds.

    Args:
        peak: the most at a time since the process began, or since the program reset this counter.
        beyond: the most that were reserved, less ``peak``: lost between tensors, or only cached.
    """

    usable: int
    allocated: int
    peak: int
    beyond: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Reads the counters of a device; None if it has none, as a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    usable = min(free + torch.cuda.memory_reserved(device), allowed)
    peak = torch.cuda.max_memory_allocated(device)
    return DeviceMemory(
        usable, torch.cuda.memory_allocated(device), peak, torch.cuda.max_memory_reserved(device) - peak
    )


@dataclass
class _Measurement:
    """The measurement of one step.

    Args:
        tokens: of each rank. steps: the optimizers' steps before it. before: bytes allocated before its forward.
        results: bytes of its attention's results. highest: the most bytes that were seen allocated in its forward.
    """

    tokens: int
    device: torch.device
    steps: int
    before: int
    results: int = 0
    highest: int = 0

    def count(self, out: Tensor, lse: Tensor) -> None:
        """Counts the results of an attention that are not saved."""
        self.results += out.nbytes + lse.nbytes
        memory = device_memory(self.device)
        assert memory is not None, "it began with this device's counters"
        self.highest = max(self.highest, memory.allocated)


class _Room:
    """The measurements of a model.

    Attributes:
        tokens: rows of up to so many tokens of a rank fit with their results. tried: the most tokens measured so far.
    """

    def __init__(self) -> None:
        self.tokens = self.tried = 0
        self.measurement: _Measurement | None = None

    def begin(self, tokens: int, device: torch.device) -> _Measurement | None:
        """Begins the measurement of a longer row than all before."""
        memory = device_memory(device)
        if memory is None:
            return None
        optimizer_steps.before_each(_nothing)
        before = memory.allocated if self.measurement is None else self.measurement.before
        self.tried, self.measurement = tokens, _Measurement(tokens, device, optimizer_steps.count(), before)
        return self.measurement

    def end(self) -> None:
        """Ends the measurement, if its optimizer has stepped."""
        one = self.measurement
        if one is None or one.steps == optimizer_steps.count():
            return
        self.measurement = None
        memory = device_memory(one.device)
        if memory is None or memory.peak < one.highest:  # the program has reset the counter: measure again
            self.tried = 0
        elif one.results:
            states = max(0, memory.allocated - one.before)
            free = memory.usable - memory.peak - states - max(int(LEFT_FREE * memory.usable), memory.beyond)
            self.tokens = max(self.tokens, min(one.tokens, one.tokens * free // one.results))


def _nothing(_optimizer: Optimizer) -> None:
    """Lets `optimizer_steps` count."""


class Saving:
    """The decision of a batch: does it save its attention's results?

    Attributes:
        possible: "auto" was asked for, and the checkpoints of its model can save. on: they do.
        measurement: counts the results, in a batch without.
    """

    def __init__(self) -> None:
        self.possible = self.on = False
        self.measurement: _Measurement | None = None


def saves(context: BatchContext) -> bool:
    """Returns True if a batch saves its attention's results."""
    chosen = context.config.save_attention
    return context.state(Saving).on if chosen == "auto" else chosen


def offer(record: ModelRecord, context: BatchContext, device: torch.device) -> int:
    """The most tokens of a rank with which the results of this model's attention fit on this rank; 0: not known."""
    saving, room = context.state(Saving), record.state(_Room)
    if not saving.possible:
        return 0
    tokens = _tokens(context)
    room.end()
    if tokens > room.tried:
        saving.measurement = room.begin(tokens, device)
    return room.tokens


def decide(context: BatchContext, offers: list[int]) -> None:
    """Decides from all ranks' offers whether a batch saves."""
    saving = context.state(Saving)
    saving.on = saving.possible and _tokens(context) <= min(offers)
    if saving.on:
        context.log.features.add("attention saved")


def contexts(
    context: BatchContext, save: Callable[[Tensor, Tensor], Saved]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]] | None:
    """The contexts of a checkpoint's forward and recomputes in a batch; None: nothing is saved or counted."""
    if saves(context):
        return SavedResults(save).contexts()
    measurement = context.state(Saving).measurement
    return None if measurement is None else (Counts(measurement.count), nullcontext())


def _tokens(context: BatchContext) -> int:
    return context.facts.rows * context.layout.local_length
