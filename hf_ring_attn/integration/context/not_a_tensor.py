"""A mask that is no tensor: code that computes with it raises a named error."""

from __future__ import annotations

from typing import Any, NoReturn

from ... import errors


class Opaque:
    """Refuses all tensor operations: arithmetic, indexing, torch's functions, a tensor's attributes."""

    def __getattr__(self, name: str) -> NoReturn:
        # hasattr() must return False, so the refusal is an AttributeError, too.
        raise errors.MaskIsNoTensor(f".{name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise errors.MaskIsNoTensor(f" in {getattr(function, '__name__', function)}()")

    def _refuse(self, *_: Any) -> NoReturn:
        raise errors.MaskIsNoTensor(" in arithmetic or indexing")

    def __getitem__(self, index: Any) -> Any:
        """Returns itself for a full slice, as Gemma 4 takes before its layers with shared keys."""
        parts = index if isinstance(index, tuple) else (index,)
        if all(part in (slice(None), slice(0, None), ...) for part in parts):
            return self
        return self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __invert__ = __neg__ = _refuse
    __and__ = __or__ = __lt__ = __gt__ = __le__ = __ge__ = __iter__ = _refuse
