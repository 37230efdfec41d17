"""The largest sum of the bytes of all tensors that a piece of code made and had at one time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Counts each storage from the operation that made it until nobody has it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0
        self.peak: int = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in before | self.known.keys():
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()

        def gone(_: Any) -> None:
            self.bytes -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


class Largest(TorchDispatchMode):
    """Finds the most values of any tensor that an operation makes.

    Args:
        size: of one of its dimensions; None: any tensor, also DDP's flat copy of all gradients.
    """

    def __init__(self, size: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.values = size, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = (x for x in tree_leaves(result) if isinstance(x, Tensor) and x.device.type != "meta")
        asked = (x for x in made if self.size is None or self.size in x.shape)
        self.values = max([self.values, *(x.numel() for x in asked if x.untyped_storage().data_ptr())])
        return result


def peak_bytes(function: Callable[[], object]) -> int:
    """Of tensors that torch's operations made while the function ran; what an operation needs inside is not seen."""
    ledger = Ledger()
    with ledger:
        function()
    return ledger.peak
