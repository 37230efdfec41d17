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

    def contexts(self) -> tuple[_Active, _Active]:
        """The contexts of the checkpoint's forward and of its recomputes."""
        return _Active(self, reuse=False), _Active(self, reuse=True)


class _Active:
    """Within it, attentions of this thread are saved, or replaced by saved results."""

    def __init__(self, saved: SavedResults, reuse: bool) -> None:
        self.saved, self.reuse = saved, reuse
        self.next = 0

    def __enter__(self) -> None:
        self.next = 0
        _stack().append(self)

    def __exit__(self, *_error: object) -> None:
        _stack().remove(self)


_THREAD = threading.local()
"""The contexts that are active in each thread: autograd computes backwards in threads of its own."""


def _stack() -> list[_Active]:
    if not hasattr(_THREAD, "active"):
        _THREAD.active = []
    found: list[_Active] = _THREAD.active
    return found


def saved_or(compute: Callable[[], Pair], q: Tensor) -> Pair:
    """The results of an attention of queries ``q`` [B, T, H, D]: saved ones in a recompute, else those of ``compute``.

    Raises:
        SavedAttentionChanged: a result was changed after the forward.
    """
    active = _stack()[-1] if _stack() else None
    if active is None:
        return compute()
    saved = active.saved.saved
    if not active.reuse:
        out, lse = compute()
        saved.append(active.saved.save(out, lse))
        return out, lse
    assert active.next < len(saved), _SAME
    out, lse = saved[active.next].results()
    active.next += 1
    assert out.shape[:3] == q.shape[:3], _SAME
    return out, lse


_SAME = "a recompute calls the same attentions as the forward"
