"""Threads: a batch runs in the one that entered it and in autograd's; others of the program may run other models."""

from __future__ import annotations

import threading


def runs_for(thread: int) -> bool:
    """Returns True in a thread, by its number, and in those that Python has not started, such as autograd's."""
    return threading.get_ident() == thread or isinstance(threading.current_thread(), threading._DummyThread)
