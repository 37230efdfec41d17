"""Attributes of a module and its parts by which it computes: modes, scales, the adapters in use.

A forward that runs again in the backward must have those of the first time: by then a program may have set others.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..context.program_states import COLLECTIONS, PLAIN, TORCHS_OWN


class Attributes:
    """Plain values and collections in the attributes of ``module`` and its parts, as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self.owners = [vars(part) for part in module.modules()]
        self.values = [{name: _copied(x) for name, x in own.items() if _decides(name, x)} for own in self.owners]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the module has them; on exit it has again what it had."""
        now = [
            (own, name, own.get(name, ...), x)
            for own, values in zip(self.owners, self.values, strict=True) for name, x in values.items()
            if not _is_same(own.get(name, ...), x)
        ]  # fmt: skip
        try:
            for own, name, _, x in now:
                own[name] = _copied(x)
            yield
        finally:
            for own, name, before, _ in now:
                own[name] = before
                if before is ...:
                    del own[name]

    def new_tensors(self) -> list[tuple[dict[str, Any], str]]:
        """The attributes in which the module, or a part of it, keeps a tensor since: whose, and their names."""
        return [
            (own, name)
            for own, values in zip(self.owners, self.values, strict=True) for name, x in own.items()
            if _decides(name, x) and not _is_same(x, values.get(name, ...)) and any(_tensors(x))
        ]  # fmt: skip


def _decides(name: str, x: Any) -> bool:
    is_kind = isinstance(x, PLAIN) or type(x) in COLLECTIONS
    return is_kind and (name == "training" or name not in TORCHS_OWN)


def _copied(x: Any) -> Any:
    return x.copy() if type(x) in COLLECTIONS else x


def _entries(x: Any) -> list[Any]:
    return [*x, *x.values()] if isinstance(x, dict) else [*x] if type(x) in COLLECTIONS else [x]


def _is_same(x: Any, y: Any) -> bool:
    one, other = _entries(x), _entries(y)
    return type(x) is type(y) and len(one) == len(other) and all(map(operator.is_, one, other))


def _tensors(x: Any) -> Iterator[bool]:
    return (isinstance(one, Tensor) for one in _entries(x))
