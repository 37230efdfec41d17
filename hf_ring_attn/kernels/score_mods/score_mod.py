"""FlexAttention's score_mod, computed a block of scores at a time, with gradients of the tensors that it captures.

The function is written for one score and runs for many under vmap, as in FlexAttention's eager mode. A torch function
mode (`_Watch`) sees every torch function that it calls, and so finds its tensors wherever they come from: a closure, a
default, a module, a list, a global. They are replaced by float64 copies, so that gradients summed over many tokens are
rounded once. A gradient that would be lost all the same is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import BadScoreMod

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""score_mod(score, b, h, q_idx, kv_idx) -> score, of scalars; b is the batch row, h the query head, and both indices
count tokens from the beginning of the whole row."""

Pull = Callable[[Tensor], Tensor]
"""Maps the gradient of the scores after a function to that of the scores before it."""


T = TypeVar("T")


class Unfit(Exception):
    """A kernel cannot compute a function; with the reason."""


@dataclass(frozen=True)
class Indices:
    """The scores of a block: batch rows [b], query heads [H], queries [t] or [t, s], keys [s] or [t, s]."""

    rows: Tensor
    heads: Tensor
    queries: Tensor
    keys: Tensor

    @classmethod
    def of(
        cls, rows: slice, heads: slice, q_position: int, k_position: int, size: tuple[int, int],
        visible: Tensor | None, device: torch.device,
    ) -> Indices:  # fmt: skip
        """The indices of a block of ``size`` [t, s]. Invisible pairs get the indices of a visible one, since the
        function may give nan or an error for theirs."""
        numbers = partial(torch.arange, device=device)
        t, s = size
        queries, keys = numbers(q_position, q_position + t), numbers(k_position, k_position + s)
        if visible is not None:
            some = visible.flatten().int().argmax()
            queries = torch.where(visible, queries[:, None], queries[some // s])
            keys = torch.where(visible, keys, keys[some % s])
        return cls(numbers(rows.start, rows.stop), numbers(heads.start, heads.stop), queries, keys)


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A function of scores and the tensors that it captures.

    Args:
        function: as the user wrote it.
        captured: every floating-point tensor from outside that it uses.
        fixed: every other tensor from outside that it uses.
        values: the float64 tensors that replace the captured ones; those that require a gradient are leaves.
        first_head: the index of the first query head of the scores.
        deterministic: run it, and its backward, with torch's deterministic algorithms.
        device: of its scores; None: the CPU.
        cache: results of `once`, for as long as this call of attention lasts.
        text: of a function of this package, in place of its graph's, which takes long to make; it does not change.
    """

    function: ScoreFunction
    captured: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()
    first_head: int = 0
    deterministic: bool = False
    device: torch.device | None = None
    cache: dict[str, Any] = field(default_factory=dict)
    fixed: tuple[Tensor, ...] = ()
    text: str = ""

    @classmethod
    def of(cls, function: ScoreFunction, device: torch.device, deterministic: bool = False) -> ScoreMod:
        """Runs the function once, for the first query and key of the first row and head, and finds its tensors.

        Raises:
            BadScoreMod: it cannot be run for many scores at once, does not return one number, or uses a tensor that
                requires a gradient in a way that cannot be seen.
        """
        watch = _Watch()
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        score = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=device)
        with in_fixed_order(deterministic), torch.no_grad():
            try:
                _run(function, watch, score, Indices(zero, zero, zero, zero))
            except BadScoreMod:
                raise
            except Exception as error:
                raise BadScoreMod(_name(function), f"cannot be run for many scores at once ({error})") from error
        outside, fixed = tuple(watch.outside.values()), tuple(watch.fixed.values())
        mod = cls(function, outside, deterministic=deterministic, device=device, fixed=fixed)
        mod.with_values(mod.captured, [x.requires_grad for x in mod.captured]).differentiable(
            score, Indices(zero, zero, zero, zero), {}
        )
        return mod

    def with_values(self, values: Sequence[Tensor], require_grad: Sequence[bool]) -> ScoreMod:
        """Replaces the captured tensors, widened to float64 for the sums over tokens."""
        with torch.no_grad():
            wide = [x.detach().double() for x in values]
        leaves = [x.view_as(x).requires_grad_() if need else x for x, need in zip(wide, require_grad, strict=True)]
        return replace(self, values=tuple(leaves))

    def once(self, key: str, make: Callable[[], T]) -> T:
        """Calls ``make`` once per key and call of attention; returns what it returned, or raises its `Unfit` again."""
        if key not in self.cache:
            try:
                self.cache[key] = make()
            except Unfit as error:
                self.cache[key] = error
        found: T | Unfit = self.cache[key]
        if isinstance(found, Unfit):
            raise found
        return found

    @property
    def name(self) -> str:
        return _name(self.function)

    def of_heads(self, heads: slice) -> ScoreMod:
        return replace(self, first_head=self.first_head + (heads.start or 0))

    def new_gradients(self) -> dict[str, Tensor]:
        """Allocates zeroed float64 sums for the values that require a gradient."""
        return {_key(i): torch.zeros_like(x) for i, x in enumerate(self.values) if x.requires_grad}

    def gradient(self, sums: dict[str, Tensor], of: int) -> Tensor | None:
        """Returns the gradient of captured tensor number ``of``, rounded to its dtype; None if it requires none."""
        return sums[_key(of)].to(self.captured[of].dtype) if _key(of) in sums else None

    def add_gradients(self, sums: dict[str, Tensor], of: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Adds to ``sums`` the gradients of the values, backpropagated from ``gradients`` of the tensors ``of``."""
        wanted = {_key(i): x for i, x in enumerate(self.values) if _key(i) in sums}
        if of and wanted:
            found = torch.autograd.grad(of, list(wanted.values()), gradients, allow_unused=True)
            for name, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    sums[name] += gradient

    def __call__(self, scores: Tensor, at: Indices) -> Tensor:
        """Applies the function to scores [b, H, t, s]; returns their dtype."""
        with in_fixed_order(self.deterministic), torch.no_grad():
            return self._of(scores.double(), at).to(scores.dtype).contiguous()

    def differentiable(self, scores: Tensor, at: Indices, sums: dict[str, Tensor]) -> tuple[Tensor, Pull]:
        """Applies the function; also returns its backward, which adds gradients of captured tensors to ``sums``."""
        wanted = {_key(i): x for i, x in enumerate(self.values) if _key(i) in sums}
        with in_fixed_order(self.deterministic), torch.enable_grad():
            before = scores.double().detach().requires_grad_()
            after = self._of(before, at)
            self._refuse_strangers(after, before)

        def pull(d_after: Tensor) -> Tensor:
            leaves = [before, *wanted.values()]
            if not after.requires_grad:
                return torch.zeros_like(d_after)
            with in_fixed_order(self.deterministic):
                found: tuple[Tensor | None, ...] = torch.autograd.grad(
                    after, leaves, d_after.double(), allow_unused=True
                )
            d_before = found[0]
            for name, gradient in zip(wanted, found[1:], strict=True):
                if gradient is not None:
                    sums[name] += gradient
            return torch.zeros_like(d_after) if d_before is None else d_before.to(d_after.dtype)

        return after.detach().to(scores.dtype).contiguous(), pull

    def _of(self, scores: Tensor, at: Indices) -> Tensor:
        watch = _Watch({id(was): now for was, now in zip(self.captured, self.values, strict=True)})
        try:
            return _run(self.function, watch, scores, at)
        except (BadScoreMod, torch.OutOfMemoryError):  # the latter is not the function's fault
            raise
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            rows, heads, queries, keys = scores.shape
            asked = f"{rows} rows, {heads} heads, {queries} queries and {keys} keys"
            raise BadScoreMod(self.name, f"failed for a block of {asked} of this attention ({error})") from error

    def _refuse_strangers(self, after: Tensor, before: Tensor) -> None:
        known = {id(before), *(id(x) for x in self.values)}
        for leaf in _leaves(after):
            if id(leaf) not in known:
                raise BadScoreMod(
                    _name(self.function), f"uses a tensor of shape {tuple(leaf.shape)} that requires a gradient inside "
                    "something that cannot be looked into (such as compiled code), or not in every call",
                )  # fmt: skip


class _Watch(TorchFunctionMode):
    """Replaces tensors in every torch function. Tensors from outside are recorded by id: floating-point ones in
    ``outside``, with a float64 replacement, others in ``fixed``."""

    def __init__(self, instead: dict[int, Tensor] | None = None) -> None:
        super().__init__()
        self.instead = dict(instead or {})
        self.outside: dict[int, Tensor] = {}
        self.fixed: dict[int, Tensor] = {}
        self.known: dict[int, Any] = {}  # alive, so that no other tensor gets the id

    def know(self, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for one in value:
                self.know(one)
        elif isinstance(value, Tensor):
            self.known[id(value)] = value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = self._replaced(args), self._replaced(kwargs or {})
        result = _index(*args) if func is Tensor.__getitem__ else func(*args, **kwargs)
        self.know(result)
        return result

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_floating_point() and id(value) not in self.known and id(value) not in self.instead:
                self.outside[id(value)] = value
                self.instead[id(value)] = value.double()
            elif not value.is_floating_point() and id(value) not in self.known:
                self.fixed[id(value)] = value
            return self.instead.get(id(value), value)
        if isinstance(value, (tuple, list)):
            parts = [self._replaced(one) for one in value]
            return parts if isinstance(value, list) else tuple(parts)
        return {name: self._replaced(one) for name, one in value.items()} if isinstance(value, dict) else value


def _index(x: Tensor, index: Any) -> Tensor:
    """Computes x[index] under vmap, where a scalar tensor as index cannot be read on the host."""
    parts = index if isinstance(index, tuple) else (index,)
    simple = all(isinstance(part, (Tensor, int)) or part == slice(None) for part in parts)
    if not simple or not any(isinstance(part, Tensor) for part in parts):
        return x[index]
    numbers = [None if isinstance(part, slice) else torch.as_tensor(part, device=x.device) for part in parts]
    indexed: Tensor = torch.ops.aten.index(x, numbers)
    return indexed


def run_one(mod: ScoreMod, scalars: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Applies the function to one score, with ``values`` in place of the captured tensors."""
    instead = {id(was): now for was, now in zip(mod.captured, values, strict=True)}
    return _one(mod.function, _Watch(instead), *scalars)


_running = 0


def in_score_mod() -> bool:
    """Returns True while a score_mod runs: modules called now are part of it."""
    return _running > 0


def _one(function: ScoreFunction, watch: _Watch, *scalars: Tensor) -> Tensor:
    global _running
    watch.know(scalars)
    _running += 1
    try:
        with watch:
            result: Any = function(*scalars)
    finally:
        _running -= 1
    if not isinstance(result, Tensor) or result.dim() or not result.is_floating_point():
        got = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise BadScoreMod(_name(function), f"returned {got} for one score")
    one_score: Tensor = result
    return one_score


def _run(function: ScoreFunction, watch: _Watch, scores: Tensor, at: Indices) -> Tensor:
    """Applies the function to all scores [b, H, t, s] of a block."""
    paired = at.queries.dim() == 2
    for_all: Callable[..., Tensor] = partial(_one, function, watch)
    for dims in (
        (0, None, None, 0 if paired else None, 0), (0, None, None, 0, 0 if paired else None), (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):  # fmt: skip
        for_all = torch.vmap(for_all, dims)
    return for_all(scores, at.rows, at.heads, at.queries, at.keys)


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yields every leaf that a backward of this tensor would reach."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


@contextmanager
def in_fixed_order(wanted: bool) -> Iterator[None]:
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def _key(number: int) -> str:
    return f"captured {number}"


def _name(function: ScoreFunction) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
