"""Results of attention that a checkpoint saves, so that its recompute neither gathers nor attends.

A policy of selective checkpointing could save them. But it sends every op of a layer through Python, forward and
recompute, which costs more host time than short rows take on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from ..errors import SavedAttentionChanged

Pair = tuple[Tensor, Tensor]
"""out [B, T, H, Dv] and lse [B, H, T] of one forward."""


class Saved(Protocol):
    """The results of one attention, wherever they wait."""

    def results(self) -> Pair: ...


class Here(NamedTuple):
    """Results that stay on their device."""

    out: Tensor
    lse: Tensor
    version: int

    def results(self) -> Pair:
        """Raises SavedAttentionChanged: the output was changed after the forward."""
        if self.out._version != self.version:
            raise SavedAttentionChanged(tuple(self.out.shape))
        return self.out.detach(), self.lse.detach()


def save_here(out: Tensor, lse: Tensor) -> Saved:
    # Detached: the tensor that is returned gets a graph, which would live as long as this.
    return Here(out.detach(), lse.detach(), out._version)


class SavedResults:
    """The results of the attentions in one checkpoint, in the order of its forward.

    Args:
        save: saves the results of one attention.
    """

    def __init__(self, save: Callable[[Tensor, Tensor], Saved] = save_here) -> None:
        self.save = save
        self.saved: list[Saved] = []

    def contexts(self) -> tuple[Active, Active]:
        """The contexts of the checkpoint's forward and of its recomputes."""
        return HandsOn(self._keep), _Reuses(self)

    def _keep(self, out: Tensor, lse: Tensor) -> None:
        self.saved.append(self.save(out, lse))


class Active:
    """A context that answers each attention of this thread: it computes it, or returns a saved result."""

    def __enter__(self) -> None:
        _stack().append(self)

    def __exit__(self, *_error: object) -> None:
        _stack().remove(self)

    def attend(self, compute: Callable[[], Pair], q: Tensor) -> Pair:
        """The results of one attention of queries ``q``, as `saved_or` returns them."""
        raise NotImplementedError


class HandsOn(Active):
    """Calls a function with the results of each attention, and keeps none.

    Args:
        receive: takes out and lse.
    """

    def __init__(self, receive: Callable[[Tensor, Tensor], None]) -> None:
        self.receive = receive

    def attend(self, compute: Callable[[], Pair], q: Tensor) -> Pair:
        out, lse = compute()
        self.receive(out, lse)
        return out, lse


class _Reuses(Active):
    def __init__(self, results: SavedResults) -> None:
        self.results = results
        self.next = 0

    def __enter__(self) -> None:
        self.next = 0
        super().__enter__()

    def attend(self, compute: Callable[[], Pair], q: Tensor) -> Pair:
        saved = self.results.saved
        assert self.next < len(saved), _SAME
        out, lse = saved[self.next].results()
        self.next += 1
        assert out.shape[:3] == q.shape[:3], _SAME
        return out, lse


_THREAD = threading.local()
"""The contexts that are active in each thread: autograd computes backwards in threads of its own."""


def _stack() -> list[Active]:
    if not hasattr(_THREAD, "active"):
        _THREAD.active = []
    found: list[Active] = _THREAD.active
    return found


def saved_or(compute: Callable[[], Pair], q: Tensor) -> Pair:
    """The results of an attention of queries ``q`` [B, T, H, D]: saved ones in a recompute, else those of ``compute``.

    Raises:
        SavedAttentionChanged: a result was changed after the forward.
    """
    active = _stack()[-1] if _stack() else None
    return compute() if active is None else active.attend(compute, q)


_SAME = "a recompute calls the same attentions as the forward"
