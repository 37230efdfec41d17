"""Overrides of a trainer's methods: refuses those that no trial step can judge, and checks one at each step.

An override of `_prepare_context_parallel_inputs` must pass the batch to super(), and return its result unchanged.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from transformers import Trainer

from ... import errors
from ..context.introspect import unwrapped
from ..context.tracked_input import version_of
from ..patching.changes import Patch, has_patch, target_of
from .program_methods import owner_of, refuse_set_on, stand_in, stands_in

OF_WHOLE_ROWS = {
    "trl.experimental.orpo.orpo_trainer:ORPOTrainer", "trl.experimental.cpo.cpo_trainer:CPOTrainer",
    "trl.experimental.tpo.tpo_trainer:TPOTrainer", "trl.experimental.gkd.gkd_trainer:GKDTrainer",
    "trl.experimental.a2po.a2po_trainer:A2POTrainer",
}  # fmt: skip
"""TRL's trainers whose loss needs logits of whole rows: ORPO, CPO (SimPO, AlphaPO), TPO, GKD and A*-PO."""
EXACT_TRL = OF_WHOLE_ROWS | {
    "trl.trainer.base_trainer:_BaseTrainer", "trl.trainer.sft_trainer:SFTTrainer",
    "trl.trainer.dpo_trainer:DPOTrainer", "trl.trainer.kto_trainer:KTOTrainer",
    "trl.trainer.reward_trainer:RewardTrainer",
    "trl.trainer.grpo_trainer:GRPOTrainer", "trl.trainer.rloo_trainer:RLOOTrainer",
    "trl.trainer.distillation_trainer:DistillationTrainer",
    "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer",
    "trl.experimental.gmpo.gmpo_trainer:GMPOTrainer",
    "trl.experimental.bema_for_ref_model.dpo_trainer:DPOTrainer",
}  # fmt: skip
"""TRL's trainers that are exact in a ring. Others have the same names."""
COUNTS = ("get_batch_samples", "_get_num_items_in_batch")
"""Methods that count the tokens a loss is divided by. Overrides are refused."""


def refuse_unknown(trainer: Any, methods: Sequence[str] = COUNTS) -> None:
    """Refuses TRL's trainers except those of `EXACT_TRL`, and overrides of ``methods``, unless ``ring_fp32_exact``.

    Raises:
        UnsupportedTrainer, UnknownTrainer.
    """
    kind = type(trainer)
    for cls in kind.__mro__:
        if cls.__module__.partition(".")[0] == "trl" and issubclass(cls, Trainer) and target_of(cls) not in EXACT_TRL:
            alike = any(one.endswith(f":{cls.__name__}") for one in EXACT_TRL)
            raise errors.UnsupportedTrainer(f"{cls.__module__}.{cls.__name__}" if alike else cls.__name__)
    if getattr(trainer, "ring_fp32_exact", False):
        return
    for method in methods:
        refuse_set_on(trainer, method)
        place = owner_of(kind, method)
        assert place is not None
        if getattr(kind, method) is not getattr(Trainer, method, None) and not has_patch(place, method):
            raise errors.UnknownTrainer(kind.__name__, f"{place.__qualname__}.{method}")


PREPARE = "_prepare_context_parallel_inputs"
SHARDS_CALLS = "_hf_ring_attn_shards_calls"
"""The attribute of a trainer in a step in which the calls of its models are sharded. True: its batch stays whole."""
LOSS_ALONE = "_hf_ring_attn_loss_alone"
"""The attribute of a trainer while Trainer's own compute_loss runs, which reads its model's loss, and no logits."""
Prepare = Callable[[Any, nn.Module, Any], tuple[Callable[[], Any], Any]]
"""Maps a trainer, its model and a whole batch to the context of a step and the step's inputs."""


def begin_training(trainer: Any, model: nn.Module) -> None:
    """Sets the mode for a step. Trainer does so before `_prepare_inputs`, but after what calls that in a ring."""
    # An evaluation may have changed the mode of the model inside its wrapper alone. The call takes 5 ms for adapters
    # on 32 layers.
    if not all(one.training for one in unwrapped(model)):
        model.train()
    if callable(getattr(trainer.optimizer, "train", None)):
        trainer.optimizer.train()


def patch_prepare(host: str, shards: Callable[[Any], bool], prepare: Prepare) -> Patch:
    """Patches the method of a host: it calls ``prepare`` instead if ``shards(trainer)``."""

    def make(original: Prepare) -> Prepare:
        def _prepare_context_parallel_inputs(self: Any, model: nn.Module, inputs: Any) -> Any:
            if not shards(self):
                return original(self, model, inputs)
            if vars(self).get(SHARDS_CALLS):  # an evaluation, which has begun
                return nullcontext, inputs
            begin_training(self, model)
            override = _CHECKED.get(self)
            if override is None:
                if not _is_exact(self):  # it runs now, and nobody looks at what it returns
                    raise errors.UnknownTrainer(type(self).__name__, _place(self))
                return prepare(self, model, inputs)
            took = _contents((model, inputs))
            made = prepare(self, model, inputs)
            override.noted = took, made, _contents(made)
            return made

        return _prepare_context_parallel_inputs

    return Patch(f"{host}.{PREPARE}", "(self, model, inputs)", make)


def check_override(trainer: Any, shards: Callable[[Any], bool]) -> None:
    """Makes each step of a trainer in a ring compare its override, if its class has one, with the patched method.

    Raises:
        UnknownTrainer: the override was set on the trainer itself.
    """
    if stands_in(trainer, PREPARE) or _is_exact(trainer):
        return
    refuse_set_on(trainer, PREPARE)
    _CHECKED[trainer] = _CheckedOverride(shards)
    stand_in(trainer, PREPARE, _CHECKED[trainer])


class _CheckedOverride:
    """Calls the override of a trainer's class.

    The batch must reach the patched method as it came, and what that returns must come back as it is: then the
    override's answer is the patched method's.
    """

    def __init__(self, shards: Callable[[Any], bool]) -> None:
        self._shards = shards
        self.noted: tuple[list[Any], tuple[Any, Any], list[Any]] | None = None
        """The arguments of the patched method, its result, and the contents of that."""

    def __call__(self, method: Callable[..., Any], trainer: Any, *given: Any, **named: Any) -> Any:
        before = _contents((*given, *named.values()))
        returned = method(*given, **named)
        if not self._shards(trainer) or vars(trainer).get(SHARDS_CALLS):
            return returned
        noted, self.noted = self.noted, None
        if noted is not None:
            took, made, contents = noted
            # The step knows its share by identity, so an equal dict would not do.
            is_same = isinstance(returned, tuple) and len(returned) == 2 and all(map(operator.is_, returned, made))
            if is_same and _same(before, took) and _same(_contents(made), contents):
                return returned
        raise errors.InputsNotHandedOn(type(trainer).__name__, _place(trainer))


_CHECKED: weakref.WeakKeyDictionary[Any, _CheckedOverride] = weakref.WeakKeyDictionary()
"""The checks that stand in for overrides, by trainer."""


def _is_exact(trainer: Any) -> bool:
    """Returns True if the trainer has the patched method, undecorated, or says that its own is exact."""
    code = getattr(getattr(trainer, PREPARE), "__code__", None)
    is_ours = getattr(code, "co_filename", None) == patch_prepare.__code__.co_filename
    return is_ours or bool(getattr(trainer, "ring_fp32_exact", False))


def _place(trainer: Any) -> str:
    cls = owner_of(type(trainer), PREPARE)
    assert cls is not None
    return f"{cls.__qualname__}.{PREPARE}"


def _contents(x: Any) -> list[tuple[Any, int]]:
    """Each object in ``x`` and its containers, tensors with the number of their changes in place."""
    return list(_leaves(x))


def _leaves(x: Any) -> Iterator[tuple[Any, int]]:
    if isinstance(x, (Mapping, list, tuple)):
        for key in x if isinstance(x, Mapping) else range(len(x)):
            yield str(key), 0
            yield from _leaves(x[key])
    else:
        yield x, version_of(x)


def _same(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    return len(before) == len(after) and all(
        (a is b or (isinstance(a, str) and a == b)) and n == m for (a, n), (b, m) in zip(before, after, strict=True)
    )
