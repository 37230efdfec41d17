"""Weak references to several objects."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def alive(references: Iterable[weakref.ref[T]]) -> list[T]:
    """The objects that still exist, in the order of their references."""
    return [x for reference in references if (x := reference()) is not None]
