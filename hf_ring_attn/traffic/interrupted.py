"""What ends half-way must not be mistaken for what comes next.

Ranks tell messages and signals apart by their order alone. After an error that was caught in the middle of an
attention, other ranks would take those of the next one for the rest of it: wrong numbers without a word, or a wait for
ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from ..comm.ring import LOCAL, Pending, Ring
from ..errors import LeftHalfway, PeerLost

P = ParamSpec("P")


class InterruptionGuard:
    """Whether a ring is in the middle of an attention, as this rank sees it.

    Attributes:
        inside: something was sent, not all has come.
        begun: something was sent since the latest walk began, whether or not all has come.
    """

    def __init__(self) -> None:
        self.inside = self.begun = False

    def begin(self) -> None:
        """Raises as `check`."""
        self.check()
        self.inside = self.begun = True

    def sending(self, send: Callable[P, Pending]) -> Callable[P, Pending]:
        """Begins with the first message by ``send``: where none has left, nothing is half-way. Raises as `check`."""
        self.check()

        def sent(*args: P.args, **kwargs: P.kwargs) -> Pending:
            before = self.inside, self.begun
            self.inside = self.begun = True
            try:
                return send(*args, **kwargs)
            except PeerLost:
                raise
            except Exception:  # no room for it, say: this message has not left
                self.inside, self.begun = before
                raise

        return sent

    def end(self) -> None:
        self.inside = False

    def abandon(self) -> None:
        """Notes that a forward ended by an error between two attentions: other ranks go on with it."""
        self.inside = True

    @contextmanager
    def walk(self, number: int, walks: int) -> Iterator[None]:
        """One of several walks of an attention, which is half-way between them, too."""
        if number:
            self.inside = False
        self.begun = False
        try:
            yield
        except BaseException:
            # Others go on with this walk, or with the next one.
            self.inside = self.inside or (number + 1 < walks if self.begun else number > 0)
            raise
        self.inside = number + 1 < walks

    def check(self) -> None:
        """
        Raises:
            LeftHalfway: what began before has not ended.
        """
        if self.inside:
            raise LeftHalfway()


def interruption_guard(ring: Ring) -> InterruptionGuard:
    """The one of a ring, whatever its roads. A new process group starts afresh; a ring of one, or one that a process
    plays, has nobody to fool."""
    return (
        InterruptionGuard()
        if ring.size == 1 or ring.name == LOCAL
        else _KNOWN.setdefault(ring.group, InterruptionGuard())
    )


_KNOWN: weakref.WeakKeyDictionary[object, InterruptionGuard] = weakref.WeakKeyDictionary()
"""By process group. Weak, since gloo's threads end with their group, and must before the process does."""
