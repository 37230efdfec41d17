"""The self-check of a model whose structure is suspicious (`structure.Suspicion`): it decides if the model is exact.

A convolution may run over the features of one token, a GRU over the layers of a model, and code may reach transformers'
attention interface under any name. What ran in the check and agreed is exact; what did not run is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ... import errors
from ...attention.op import attentions
from ..context import batch_context, introspect
from ..context.batch_context import BatchContext
from ..context.model_record import ModelRecord
from ..model.structure import Suspicion, Suspicions
from . import check
from .row import SelfCheckState

_OF_RANKS = errors.RanksDiffer, errors.RefusedElsewhere
"""Refusals of the self-check that are not of the model."""


class _Cleared(set[tuple[str, str, str]]):
    """The suspicions that the self-check cleared, by ring and reason. `check.check` tries further kinds of batches."""


def check_suspected(model: nn.Module, context: BatchContext, record: ModelRecord) -> None:
    """Runs the self-check (`check.check`), and refuses a model on whose suspicions it could not decide.

    Raises (each on every rank):
        UnsupportedModel: with the suspicions. The errors of `check.check`.
    """
    cleared, ring = record.state(_Cleared), context.ring.name
    left = Suspicions(one for one in record.state(Suspicions) if (ring, one.where, one.what) not in cleared)
    if not left:
        check.check(model, context, record)
        return
    name, before, ran = introspect.name_of(model), attentions(), set[Suspicion]()
    try:
        with _noting(introspect.inside(model), left, ran):
            check.check(model, context, record)
    except errors.Refused as error:
        # A suspicion names the cause better, unless all tokens agree, and the loss does not.
        causes = left.of_text(ran).reasons()
        if isinstance(error, _OF_RANKS) or context.state(SelfCheckState).verdict or not causes:
            raise
        raise errors.UnsupportedModel(name, causes) from error
    attended = attentions() > before
    undecided = Suspicions(one for one in left.of_text(ran) if one not in ran or (one.attends and not attended))
    if undecided:
        raise errors.UnsupportedModel(name, undecided.reasons())
    cleared.update((ring, one.where, one.what) for one in left)


@contextmanager
def _noting(model: nn.Module, suspected: Suspicions, ran: set[Suspicion]) -> Iterator[None]:
    """Adds to ``ran`` the suspicions whose module runs in a ring of several ranks meanwhile."""

    def note(one: Suspicion) -> Any:
        def before(_module: nn.Module, _inputs: Any) -> None:
            context = batch_context.current()
            if context is not None and context.ring.size > 1:
                ran.add(one)

        return before

    with ExitStack() as hooks:
        for one in suspected:
            module = model if one.module is None else one.module()
            if module is not None:
                hooks.enter_context(module.register_forward_pre_hook(note(one)))
        yield
