"""The base classes of all errors."""

from __future__ import annotations

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxtuple = _SHORT.maxlist = 16


def shown(value: object) -> str:
    """A value in few words: a tensor by its dtype and shape, text as it is, anything else by a short repr, one line."""
    if isinstance(value, str):
        return value
    try:
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  no tensor, or a nested one, which has no shape
        return " ".join(_SHORT.repr(value).split())  # one line: an optimizer's has many


def told(error: Exception | None, most: int = 240) -> str:
    """The class and the text of another program's error, in one line; of a long one, such as a model's, the ends."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class RingAttentionError(Exception):
    """Base of all errors of this package."""


class Refused(RingAttentionError, ValueError):
    """Something this package cannot do exactly. Mostly raised before the first training step; says what to do.

    Attributes:
        in_loss: a trainer's compute_loss raised it, before any backward.
        everywhere: all ranks have agreed that each of them raises it.
    """

    in_loss = False
    everywhere = False
