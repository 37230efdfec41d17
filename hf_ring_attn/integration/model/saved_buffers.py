"""Buffers that are saved with a model's weights, and that a program writes to: ranks compare them, as weights.

A program that counts tokens in a hook, and then moves a buffer by these counts (as loss-free balancing of experts
does), would move each rank's by its own tokens. Buffers that nobody writes to are not read.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from ..context.model_record import ModelRecord
from ..context.tracked_input import version_of

SAMPLE = 2**14
"""The most values of all buffers that a batch compares."""
NAMED = 2
TODO = (
    "Each rank wrote values of its own tokens: reduce them over the ring first (torch.distributed.all_reduce). "
    "If no forward reads the buffer (a log, for example), register it with persistent=False."
)


class SavedBuffers:
    """The saved buffers of a model with its present structure, and which of them were written to since it was found."""

    def __init__(self, model: nn.Module) -> None:
        self._known: list[tuple[str, weakref.ref[nn.Module], str, weakref.ref[Tensor], int]] = []
        for path, module in model.named_modules():
            for name, x in module._buffers.items():
                if x is not None and x.is_floating_point() and name not in module._non_persistent_buffers_set:
                    own = f"{path}.{name}".lstrip(".")
                    self._known.append((own, weakref.ref(module), name, weakref.ref(x), version_of(x)))

    def written(self) -> dict[str, object]:
        """A sample of the buffers that were written to, as one fact for ranks to compare."""
        found: dict[str, Tensor] = {}
        for path, reference, name, first, version in self._known:
            module = reference()
            x = None if module is None else module._buffers.get(name)
            if x is not None and (x is not first() or version_of(x) != version):
                found[path] = x
        if not found:
            return {"no buffer": None}
        most = max(1, SAMPLE // len(found))
        parts = [x.detach().flatten()[:: max(1, -(-x.numel() // most))].double() for x in found.values()]
        device = parts[0].device
        names = ", ".join([*found][:NAMED]) + ", ..." * (len(found) > NAMED)
        return {f"buffers that the program writes ({names})": torch.cat([part.to(device) for part in parts])}


def written_buffers(model: nn.Module, record: ModelRecord) -> dict[str, object]:
    """A sample of the saved buffers that a program wrote to since the model's structure was found."""
    return record.once(SavedBuffers, model).written()
