"""The units of a model that FSDP2 shards: their weights, and their forwards and backwards in the self-check.

A unit is a call of `fully_shard`. It has a state, and groups of weights that are gathered together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..context import introspect


def groups_of(unit: Any) -> Iterator[Any]:
    """The groups of weights that a call of `fully_shard` shards together."""
    return _groups_in(unit._get_fsdp_state())


def _groups_in(state: Any) -> Iterator[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # before torch 2.13
    return (group for group in groups if group is not None)


def weights_of(unit: nn.Module) -> Iterator[Tensor]:
    """The weights that a call of `fully_shard` shards, and those that it has gathered."""
    for weight in (weight for group in groups_of(unit) for weight in group.fsdp_params):
        yield weight.sharded_param
        if hasattr(weight, "_unsharded_param"):
            yield weight._unsharded_param


def gathered(model: nn.Module, weights: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that a forward of ``model`` used for its ``weights``: those that FSDP2 gathered, or the weights."""
    whole: dict[int, Tensor] = {}
    for state in _states(model):
        for weight in (weight for group in _groups_in(state) for weight in group.fsdp_params):
            used = getattr(weight, "_unsharded_param", None)
            whole |= {} if used is None else {id(weight.sharded_param): used}
    # FSDP2 copies this flag only when it gathers: an adapter may have been off then.
    return [whole.get(id(x), x).requires_grad_(x.requires_grad) for x in weights]


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Lets a backward inside gather weights, but send no gradients, nor those of an accumulation so far.

    A forward around it, of a larger model that FSDP2 shards with ``model``, goes on as before.
    """
    states = _states(model)
    forwards = [(one._state_ctx, one._state_ctx.iter_forward_root) for one in states]
    running = [
        (one, one._training_state, set(_modules_to_run(one))) for one in states if one._training_state.name == "FORWARD"
    ]
    with _reductions_off(states):
        yield
    for context, root in forwards:
        context.iter_forward_root = root
    for state, forward, modules in running:  # the end of the backward dropped its weights
        state._training_state = forward
        _modules_to_run(state).update(modules)
        for group in _groups_in(state):
            group._training_state = forward
            group.unshard()
            group.wait_for_unshard()


def end_forward(model: nn.Module) -> bool:
    """Lets FSDP2 forget a forward of ``model`` that an error ended on every rank, so that another one may follow.

    Returns False if none can: FSDP2 refused the first one, as where a part of the model had run before.
    """
    mine = [state for state in _states(model, only_inside=True) if state._is_root is not None]  # None: it never ran
    if not all(hasattr(state._comm_ctx, "all_gather_stream") for state in mine):
        return False
    with _reductions_off(mine):
        for state in mine:
            idle = type(state._training_state).IDLE
            state._training_state = idle
            _modules_to_run(state).clear()
            for group in filter(_was_gathered, _groups_in(state)):
                group.post_backward()  # drops what it gathered
                group._training_state = idle
                group.finalize_backward()
            context = state._state_ctx
            context.post_backward_final_callback_queued = False  # an error may have ended a backward, too
            if context.iter_forward_root is state:
                context.iter_forward_root = None
                state._comm_ctx.post_forward_order.clear()
    return True


@contextmanager
def _reductions_off(states: Iterable[Any]) -> Iterator[None]:
    """FSDP2 reduces no gradients. Of groups that it never gathered there are none, and torch would look for them."""
    groups = [group for state in states for group in _groups_in(state) if _was_gathered(group)]
    reduced = [group.reduce_grads for group in groups]
    for group in groups:
        group.reduce_grads = False
    try:
        yield
    finally:
        for group, before in zip(groups, reduced, strict=True):
            group.reduce_grads = before


def _was_gathered(group: Any) -> bool:
    return all(hasattr(weight, "_unsharded_param") for weight in group.fsdp_params)


def _states(model: nn.Module, only_inside: bool = False) -> list[Any]:
    """The states of FSDP2 of ``model``, and of a larger model that runs it."""
    units: Iterator[Any] = filter(introspect.is_unit, model.modules())
    mine = dict.fromkeys(unit._get_fsdp_state() for unit in units)
    if only_inside:
        return [*mine]
    return [*(mine | dict.fromkeys(state for one in mine for state in one._state_ctx.all_states))]


def _modules_to_run(state: Any) -> set[Any]:
    """The modules that `fully_shard([a, b, ...])` shards together, and that a forward has not called yet."""
    found: set[Any] = getattr(state, "_modules_to_run_forward", set())
    return found
