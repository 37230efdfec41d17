"""What stands between the call of a model and its loss: forwards that are not known may change it.

A trainer multiplies what a rank returns, as a share of the loss of whole rows: a term that is no sum over tokens, such
as a penalty of weights, would be counted once for each rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from ... import errors
from ..patching.code_origin import strangers
from .forward_source import loss_function_alone

ON_IT = ", set on the model itself,"


def of_classes(module: nn.Module) -> list[tuple[type, Any]]:
    """The classes of ``module`` that have a forward, and that forward; the one that is called first."""
    return [(cls, vars(cls)["forward"]) for cls in type(module).__mro__ if "forward" in vars(cls)]


def asks_loss_function(forward: Any) -> bool:
    """Whether a forward mentions the model's loss_function."""
    return "loss_function" in getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ())


def refuse_unknown(model: nn.Module, head: nn.Module) -> None:
    """Refuses forwards that may change the loss of ``head``, which is ``model`` or in it, and one of which asks for its
    loss_function: on the head, in its classes before that one, and around it.

    Known are those of the hosts, a forward whose loss is its loss_function's as it is, and what says
    ``ring_fp32_exact = True`` of itself: a class, or a module on which a forward was set.

    Raises:
        UnknownForward.
    """
    own = of_classes(head)
    at = next(index for index, (_, forward) in enumerate(own) if asks_loss_function(forward))
    around = f" around that of {own[at][0].__name__}"
    for module in _around(model, head):
        if _set_on(module):
            _refuse(module, type(module).__name__, ON_IT)
        for cls, forward in of_classes(module):
            if not strangers(forward):
                break
            _refuse(cls, cls.__name__, around)
    if not _alone(_set_on(head)):
        _refuse(head, type(head).__name__, ON_IT)
    for cls, _ in own[:at]:
        _refuse(cls, cls.__name__, around)
    cls, forward = own[at]
    if not _alone(strangers(forward)):
        _refuse(cls, cls.__name__, ", which does more than return the value of self.loss_function,")


def _around(model: nn.Module, head: nn.Module) -> Iterator[nn.Module]:
    """The modules in ``model`` that hold ``head``, itself left out."""
    path = next(name for name, module in model.named_modules() if module is head)
    parts = path.split(".") if path else []
    return (model.get_submodule(".".join(parts[:length])) for length in range(len(parts)))


def _set_on(module: nn.Module) -> list[Any]:
    """What strangers wrote of a forward that was set on ``module`` itself: a host's may wrap that of its class."""
    known = {function for _, forward in of_classes(module) for function in strangers(forward)}
    return [function for function in strangers(vars(module).get("forward")) if function not in known]


def _alone(functions: list[Any]) -> bool:
    return not functions or (len(functions) == 1 and loss_function_alone(functions[0]))


def _refuse(place: Any, name: str, how: str) -> None:
    if not vars(place).get("ring_fp32_exact", False):
        raise errors.UnknownForward(name, how, name if isinstance(place, type) else "the model itself")
