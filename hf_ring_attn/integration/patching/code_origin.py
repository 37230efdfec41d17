"""Who wrote a function that is called: the hosts that are known, or somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KNOWN = {"torch", "transformers", "accelerate", "peft", "trl", __name__.partition(".")[0]}
"""Packages whose methods, and what they put around those of others, are known."""


def strangers(function: Any) -> list[Any]:
    """Of a function, and of all that it says it wraps, those that no package of `KNOWN` has written."""
    return [part for part in _layers(function) if _author(part) not in KNOWN]


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield getattr(function, "__func__", function)
        function = getattr(function, "__wrapped__", None)


def _author(function: Any) -> str:
    """By the globals of its code: `functools.wraps` copies a function's name and module, but not these."""
    function = getattr(function, "func", function)  # of a partial
    name = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return str(name).partition(".")[0]
