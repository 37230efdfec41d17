"""States that a forward leaves behind for the next one: a running maximum, a codebook, a counter.

A rank would keep what it saw of its own tokens, which a first forward does not show. So each run of the self-check
begins with the program's states, and if a second forward of the whole row gives another answer than the first one,
second forwards are compared, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..context.introspect import file_of
from ..context.program_states import TORCHS_OWN, is_of_program, preserved_objects
from ..context.tensor_tree import tensors_of
from ..context.tracked_input import version_of
from .restore import CONSTANT, holders, programs_hooks, restored

T = TypeVar("T")

NAMED = 2
"""The most states that an error names."""


@dataclass
class States:
    """The states of a model in the self-check.

    Args:
        sharded: ranks exchange weights in a forward, so that no rank may run another one by itself.
        second: runs are second ones.
        matter: a second forward gave another answer than the first one, or may give one.
        written: the states in modules that a forward wrote to, by path.
    """

    model: nn.Module
    sharded: bool
    second: bool = False
    matter: bool = False
    written: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._paths = dict(self.model.named_modules())
        self._modules = [*self._paths.values()]
        self._holders = holders(self._modules)
        owners = [file_of(module) for module in self._modules]
        owners += [str(getattr(hook, "__module__", "")) for hook in programs_hooks(self._modules)]
        self._has_others = any(map(is_of_program, owners))  # in objects of the program, which are not watched

    def run(self, call: Callable[[], T], whole: bool = False) -> T:
        """Calls ``call`` with the program's states: once, or a second time with what the first one left.

        Args:
            whole: of the whole row, whose second answer is compared with the first one.
        """
        with ExitStack() as stack:
            stack.enter_context(restored(self._modules))
            stack.enter_context(preserved_objects(self._holders, self._modules))
            before = dict(_marks(self._paths)) if whole and not (self.second or self.written) else {}
            answer = call()
            if before:
                after = _marks(self._paths)
                self.written = [".".join(place).lstrip(".") for place, mark in after if before.get(place) != mark]
            if self.second:
                return call()
            if whole and not self.matter and (self.written or self._has_others):
                self.matter = self.sharded or not _same(answer, call())
            return answer

    def in_words(self) -> str:
        """The states that were written to, for an error."""
        names = ", ".join(self.written[:NAMED]) + ", ..." * (len(self.written) > NAMED)
        return names or "in an object of the program"


def _marks(modules: Mapping[str, nn.Module]) -> Iterator[tuple[tuple[str, str], object]]:
    """A mark of each state in modules, by their path and its name; another one after a write."""
    for path, module in modules.items():
        own = module.__dict__
        for name, x in own.items():
            if name not in TORCHS_OWN:
                yield (path, name), x if type(x) in CONSTANT else _mark(x)
        for name, x in own["_buffers"].items():
            yield (path, name), _mark(x)
        if own["_modules"]:
            yield (path, "_modules"), _mark(own["_modules"])


def _mark(x: Any) -> object:
    if isinstance(x, Tensor):
        return id(x), version_of(x)
    if type(x) in (list, set, tuple) or isinstance(x, Mapping):
        return [id(part) for part in (x.values() if isinstance(x, Mapping) else x)]
    return x if isinstance(x, bool | int | float | str) else id(x)


def _same(answer: Any, other: Any) -> bool:
    """Returns True if all tensors of two answers are equal."""
    found, others = dict(tensors_of(answer)), dict(tensors_of(other))
    return found.keys() == others.keys() and all(torch.equal(x, others[name]) for name, x in found.items())
