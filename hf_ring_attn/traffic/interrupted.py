"""Detects an exchange that an exception interrupted.

Ranks match messages and signals by order alone. If a program catches an error in the middle of an attention, other
ranks would receive the next attention's messages for the rest of this one: silently wrong numbers, or a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, cast

import torch

from ..comm.meeting import meet
from ..comm.ring import LOCAL, Pending, Ring
from ..errors import LeftHalfway, PeerLost

P = ParamSpec("P")


class InterruptionGuard:
    """Tracks on this rank if a ring is in the middle of an exchange.

    Attributes:
        inside: a message was sent, and not all have arrived.
        begun: a message was sent since the latest pass began, even if all have arrived.
        backwards: the numbers of backwards that began and have not ended, in the ring or by an error.
    """

    def __init__(self) -> None:
        self.inside = self.begun = False
        self.backwards: set[int] = set()

    def note_backward(self) -> None:
        """Notes that a backward runs, until its end. After an error, or Ctrl-C, torch calls nothing at its end."""
        task, engine = torch._C._current_graph_task_id(), cast("Any", torch.autograd.Variable)._execution_engine
        if task >= 0 and task not in self.backwards:
            self.backwards.add(task)
            engine.queue_callback(lambda: self.backwards.discard(task))

    def check_backwards(self, ring: Ring) -> None:
        """Refuses a new batch on a rank whose backward an error ended, unless it ended so on all ranks.

        Raises:
            LeftHalfway: others are still in that backward, and wait there for this rank.
        """
        if torch._C._current_graph_task_id() < 0 and self.backwards:
            self.inside = self.inside or not meet(ring)
            self.backwards.clear()

    def begin(self) -> None:
        """Marks the start of an exchange. Raises as `check`."""
        self.check()
        self.inside = self.begun = True

    def sending(self, send: Callable[P, Pending]) -> Callable[P, Pending]:
        """Wraps ``send`` so that the exchange begins with its first message. Raises as `check`."""
        self.check()

        def sent(*args: P.args, **kwargs: P.kwargs) -> Pending:
            before = self.inside, self.begun
            self.inside = self.begun = True
            try:
                return send(*args, **kwargs)
            except PeerLost:
                raise
            except Exception:  # such as out of memory: this message was not sent
                self.inside, self.begun = before
                raise

        return sent

    def end(self) -> None:
        self.inside = False

    def abandon(self) -> None:
        """Notes that a forward ended by an error between two attentions: other ranks go on with it."""
        self.inside = True

    @contextmanager
    def ring_pass(self, number: int, passes: int) -> Iterator[None]:
        """Runs one of several passes of an attention; between two of them the exchange is unfinished, too."""
        if number:
            self.inside = False
        self.begun = False
        try:
            yield
        except BaseException:
            # Other ranks continue with this pass, or with the next one.
            self.inside = self.inside or (number + 1 < passes if self.begun else number > 0)
            raise
        self.inside = number + 1 < passes

    def check(self) -> None:
        """Refuses to begin after an interrupted exchange.

        Raises:
            LeftHalfway: an earlier exchange has not ended.
        """
        if self.inside:
            raise LeftHalfway()


def interruption_guard(ring: Ring) -> InterruptionGuard:
    """Returns the guard of a ring's process group, shared by its transports; a fresh one without communication."""
    return InterruptionGuard() if ring.name == LOCAL else ring.state(InterruptionGuard)
