"""The methods of a trainer that are the program's own, and functions that stand in for methods."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ... import errors
from ..patching.changes import Original, around, installed

HOSTS = ("transformers.", "trl.", "hf_ring_attn.")
"""Modules whose methods are known here."""


_stand_ins: weakref.WeakSet[Any] = weakref.WeakSet()
"""The functions that stand in for methods. Not an attribute of them: a program's own wrapper would copy it."""


def owner_of(kind: type, method: str) -> type | None:
    """The class from which ``kind`` has a method; None: it has no such method."""
    return next((cls for cls in kind.__mro__ if method in vars(cls)), None)


def is_own(one: Any, method: str) -> bool:
    """Returns True if ``one`` has this method from the program, not from its host."""
    if set_on(one, method) is not None:
        return True
    owner = owner_of(type(one), method)
    if owner is None:
        return False
    made_in = getattr(vars(owner)[method], "__module__", None) or owner.__module__  # a program may set it on a class
    return not (owner.__module__.startswith(HOSTS) and made_in.startswith(HOSTS))


def set_on(one: Any, method: str) -> Any:
    """The method that a program set on an object itself; None if it set none."""
    found = vars(one).get(method)
    return found.replaced if _is_ours(found) else found


def refuse_set_on(trainer: Any, method: str) -> None:
    """Raises UnknownTrainer if the program set a method on a trainer itself."""
    if set_on(trainer, method) is not None:
        raise errors.UnknownTrainer(type(trainer).__name__, f"the trainer's own {method}")


def stands_in(one: Any, method: str) -> bool:
    """Returns True if a function of ours stands in for a method."""
    return _is_ours(vars(one).get(method))


def _is_ours(function: Any) -> bool:
    return any(function is one for one in _stand_ins)  # by identity: a program's may have no hash


def stand_in(trainer: Any, method: str, run: Callable[..., Any]) -> None:
    """Puts a function in the place of a trainer's method. Without our patches it calls the method.

    Args:
        run: gets the method, the trainer and the arguments of the call, as in `changes.around`.
    """
    if stands_in(trainer, method):
        return
    own, kind, of = set_on(trainer, method), type(trainer), weakref.ref(trainer)  # else each would keep the other alive

    @functools.wraps(getattr(kind, method) if own is None else own)
    def function(*given: Any, **named: Any) -> Any:
        host = of()
        original = functools.partial(getattr(kind, method), host) if own is None else own
        return run(original, host, *given, **named) if installed() else original(*given, **named)

    function.replaced = own  # type: ignore[attr-defined]
    _stand_ins.add(function)
    setattr(trainer, method, function)


@around
def without_stand_ins(original: Original, self: Any, protocol: Any) -> Any:
    """Patches `__reduce_ex__`, which makes copies: a function that stands in for a method knows its own trainer only.

    So a copy has none, but the methods that the program set. It gets its own functions when it begins to train.
    """
    made = original(self, protocol)
    names = [name for name in vars(self) if stands_in(self, name)]
    if not names or isinstance(made, str) or not isinstance(made[2], dict):
        return made
    state = {name: set_on(self, name) if name in names else x for name, x in made[2].items()}
    state = {name: x for name, x in state.items() if x is not None or name not in names}
    return *made[:2], state, *made[3:]
