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
from ..context.program_states import TORCHS_OWN, is_of_program
from ..context.tensor_tree import tensors_of
from ..context.tracked_input import version_of
from .restore import preserved_states, programs_hooks, restored

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
        owners = [file_of(module) for module in self.model.modules()]
        owners += [str(getattr(hook, "__module__", "")) for hook in programs_hooks(self.model.modules())]
        self._has_others = any(map(is_of_program, owners))  # in objects of the program, which are not watched

    def run(self, call: Callable[[], T], whole: bool = False) -> T:
        """Calls ``call`` with the program's states: once, or a second time with what the first one left.

        Args:
            whole: of the whole row, whose second answer is compared with the first one.
        """
        with ExitStack() as stack:
            stack.enter_context(restored(self.model))
            stack.enter_context(preserved_states(self.model.modules()))
            before = {} if self.second or self.written else dict(_marks(self.model))
            answer = call()
            if before:
                after = dict(_marks(self.model))
                self.written = [name for name, mark in after.items() if before.get(name) != mark]
            if self.second:
                return call()
            if whole and not self.matter and (self.written or self._has_others):
                self.matter = self.sharded or not _same(answer, call())
            return answer

    def in_words(self) -> str:
        """The states that were written to, for an error."""
        names = ", ".join(self.written[:NAMED]) + ", ..." * (len(self.written) > NAMED)
        return names or "in an object of the program"


def _marks(model: nn.Module) -> Iterator[tuple[str, object]]:
    """A mark of each state in modules, by path; another one after a write."""
    for path, module in model.named_modules():
        for name, x in (*module._buffers.items(), *module.__dict__.items()):
            if name not in TORCHS_OWN:
                yield f"{path}.{name}".lstrip("."), _mark(x)


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
