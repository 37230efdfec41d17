"""Saved buffers and frozen weights that a program writes to: ranks compare them, as weights that train.

A program that counts tokens in a hook, and then moves a buffer by these counts (as loss-free balancing of experts
does), would move each rank's by its own tokens; so would a codebook that follows a mean of hidden states. What nobody
writes to is not read, but for a program's own modules: through ``.data`` they write unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..context.model_record import ModelRecord
from ..context.program_states import is_of_program
from ..context.tracked_input import version_of

SAMPLE = 2**14
"""The most values of all buffers that a batch compares."""
NAMED = 2
TODO = (
    "Each rank wrote values of its own tokens: reduce them over the ring first (torch.distributed.all_reduce). "
    "If no forward reads the buffer (a log, for example), register it with persistent=False."
)


class SavedBuffers:
    """The saved buffers and frozen weights of a model with its present structure, and which of them were written to."""

    def __init__(self, model: nn.Module) -> None:
        self._known: list[tuple[str, weakref.ref[nn.Module], str, weakref.ref[Tensor], int]] = []
        for path, module in model.named_modules():
            unseen = is_of_program(type(module).__module__)
            for name, x in _saved(module):
                own = f"{path}.{name}".lstrip(".")
                self._known.append((own, weakref.ref(module), name, weakref.ref(x), -1 if unseen else version_of(x)))

    def written(self) -> dict[str, object]:
        """A sample of those that were, or may have been, written to, as one fact for ranks to compare."""
        found: dict[str, Tensor] = {}
        for path, reference, name, first, version in self._known:
            module = reference()
            x = None if module is None else module._buffers.get(name, module._parameters.get(name))
            if x is not None and _is_whole(x) and not x.is_meta and (x is not first() or version_of(x) != version):
                found[path] = x
        if not found:
            return {"no buffer": None}
        most = max(1, SAMPLE // len(found))
        parts = [x.detach().flatten()[:: max(1, -(-x.numel() // most))].double() for x in found.values()]
        device = parts[0].device
        names = ", ".join([*found][:NAMED]) + ", ..." * (len(found) > NAMED)
        fact = f"buffers and frozen weights that the program writes ({names})"
        return {fact: torch.cat([part.to(device) for part in parts])}


def _saved(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The saved buffers and frozen weights of a module itself; not those that FSDP2 shards."""
    passing = module._non_persistent_buffers_set
    frozen = {name: x for name, x in module._parameters.items() if x is not None and not x.requires_grad}
    both: dict[str, Any] = {**module._buffers, **frozen}
    for name, x in both.items():
        if _is_whole(x) and x.is_floating_point() and name not in passing:
            yield name, x


def _is_whole(x: Tensor) -> bool:
    """Returns False for shards (FSDP2 may shard a known model later) and for quantized weights."""
    return type(x) in (Tensor, nn.Parameter)


def written_buffers(model: nn.Module, record: ModelRecord) -> dict[str, object]:
    """A sample of the saved buffers and frozen weights that a program wrote to with the model's present structure."""
    return record.once(SavedBuffers, model).written()
