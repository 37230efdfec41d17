"""The package that defines a function: a known one, or another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KNOWN = {"torch", "transformers", "accelerate", "peft", "trl", __name__.partition(".")[0]}
"""Packages whose methods and wrappers are known."""


def strangers(function: Any) -> list[Any]:
    """Returns a function and all that it wraps (``__wrapped__``), without those defined in packages of `KNOWN`."""
    return [part for part in _layers(function) if _author(part) not in KNOWN]


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield getattr(function, "__func__", function)
        function = getattr(function, "__wrapped__", None)


def _author(function: Any) -> str:
    """The package by the globals of its code: `functools.wraps` copies name and module, but not these."""
    function = getattr(function, "func", function)  # for a partial
    name = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return str(name).partition(".")[0]
