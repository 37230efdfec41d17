"""Dicts and lists among a layer's arguments, in which the layer may keep tensors for later layers.

A layer on whole rows gets copies of those that hold tokens or masks. What it writes goes to the program's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_map

from ..context.tensor_tree import tensors_of


def call_with(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> tuple[Any, bool]:
    """Calls ``function`` with what ``change`` makes of each argument that is no container, and of what containers hold.

    Returns:
        Its result, and whether it wrote a tensor into a dict or a list among its arguments.
    """
    held: list[_Held] = []
    found = function(*(_changed(x, change, held) for x in args), **{
        name: _changed(x, change, held) for name, x in kwargs.items()
    })  # fmt: skip
    wrote = [one.give_back() for one in held]
    return found, any(wrote)


@dataclass
class _Held:
    """A dict or a list.

    Args:
        own: the program's. given: what the layer got, ``own`` if nothing in it changed. before: what that held.
    """

    own: Any
    given: Any
    before: dict[Any, Any]

    def give_back(self) -> bool:
        """Brings what the layer wrote into the program's own. Returns True if that holds a tensor."""
        now, unset = _entries(self.given), object()
        new = [x for key, x in now.items() if x is not self.before.get(key, unset)]
        if self.given is not self.own and (new or len(now) != len(self.before)):
            own = _entries(self.own)
            known = {id(x): own[key] for key, x in self.before.items() if key in own}
            values = {key: known.get(id(x), x) for key, x in now.items()}
            self.own.clear()
            if isinstance(self.own, dict):
                self.own.update(values)
            else:
                self.own.extend(values.values())
        return any(True for x in new for _ in tensors_of(x))


def _changed(x: Any, change: Callable[[Any], Any], held: list[_Held]) -> Any:
    if isinstance(x, dict | list):
        if (same := next((one for one in held if one.own is x), None)) is not None:
            return same.given
        own = _entries(x)
        made = {key: _changed(one, change, held) for key, one in own.items()}
        given = x if all(made[key] is one for key, one in own.items()) else copy.copy(x)
        if given is not x:
            for key, one in made.items():
                given[key] = one
        held.append(_Held(x, given, made))
        return given
    if type(x) is tuple:
        parts = tuple(_changed(one, change, held) for one in x)
        return x if all(a is b for a, b in zip(parts, x, strict=True)) else parts
    return tree_map(change, x)


def _entries(x: Any) -> dict[Any, Any]:
    return dict(x.items()) if isinstance(x, dict) else dict(enumerate(x))
