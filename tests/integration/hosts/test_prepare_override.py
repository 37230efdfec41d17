"""An override of `_prepare_context_parallel_inputs` that hands on is exact; any other is refused at the first step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
from transformers import Trainer

import hf_ring_attn
from hf_ring_attn import RingAttentionError, RingConfig
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import a_folder, launched, trainer_of
from tests.helpers.models.tiny_models import tiny
from tests.integration.hosts.test_trainer_changed import LLAMA, assert_same_log

NAME = "_prepare_context_parallel_inputs"


class Override(Trainer):
    """The parent's method."""

    def below(self, model: Any, inputs: Any) -> Any:
        parent: Any = super()
        return parent._prepare_context_parallel_inputs(model, inputs)


class HandsOn(Override):
    """As axolotl's trainer: it has shares of its own, which are off."""

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        return self.below(model, inputs)


def test_an_override_that_hands_on_is_exact(ranks: Ranks) -> None:
    """Training, an evaluation and the counts. It was refused."""
    assert_same_log(ranks, HandsOn, LLAMA)


class Skips(Override):
    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        return nullcontext, inputs


class Forgets(Override):
    """A share, outside of its ring."""

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        return nullcontext, self.below(model, inputs)[1]


class GivesOthers(Override):
    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        return self.below(model, {**inputs, "labels": inputs["labels"].clamp(max=5)})


class ChangesWhole(Override):
    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        inputs["labels"][:, 4:] = -100
        return self.below(model, inputs)


class ChangesShare(Override):
    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        enter, share = self.below(model, inputs)
        share["shift_labels"][:, -1] = -100
        return enter, share


class ChangesEntry(Override):
    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        enter, share = self.below(model, inputs)
        share["shift_labels"] = share["shift_labels"].roll(1)
        return enter, share


class ReturnsOthers(Override):
    """A dict that the step would not know as its share."""

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        enter, share = self.below(model, inputs)
        return enter, dict(share)


def raised(kind: type[Trainer], mesh: Mesh, on_class: bool = False) -> str:
    """What the first step raises: of a subclass, or of Trainer with that method, set by another program."""
    with launched(mesh), a_folder(None) as folder:
        trainer = trainer_of(LLAMA, mesh, folder, kind=Trainer if on_class else kind)
        changed = mock.patch.object(Trainer, NAME, vars(kind)[NAME]) if on_class else nullcontext()
        try:
            with changed:
                trainer.train()
        except RingAttentionError as error:
            assert trainer.state.global_step == 0
            return f"{type(error).__name__}: {error}"
        return ""


CHANGES = [Skips, Forgets, GivesOthers, ChangesWhole, ChangesShare, ChangesEntry, ReturnsOthers]


@pytest.mark.parametrize("kind", CHANGES)
def test_an_override_that_does_more_is_refused(ranks: Ranks, kind: type[Trainer]) -> None:
    text = f"InputsNotHandedOn: {kind.__name__}.{NAME} of {kind.__name__} changed the batch"
    for error in ranks(2).run(raised, kind, Mesh(cp=2)):
        assert error.startswith(text), error


def test_a_method_that_others_put_in_its_place_is_refused(ranks: Ranks) -> None:
    """As axolotl does for its own context parallelism: every rank would have computed whole rows."""
    for error in ranks(2).run(raised, Skips, Mesh(cp=2), on_class=True):
        assert error.startswith(f"InputsNotHandedOn: Trainer.{NAME} of Trainer changed the batch"), error


def in_one_process(kind: type[Trainer], options: RingConfig) -> str:
    """What a ring of one raises, whose options are set after the trainer was made."""
    with launched(Mesh()), a_folder(None) as folder:
        hf_ring_attn.install()
        model = tiny("llama", "ring_fp32")
        trainer = trainer_of(LLAMA, Mesh(), folder, model, kind=kind)
        hf_ring_attn.configure(model, options)
        try:
            trainer.train()
        except RingAttentionError as error:
            return f"{type(error).__name__}: {error}"
        return ""


def test_a_ring_of_one_takes_and_refuses_the_same(ranks: Ranks) -> None:
    saves_memory = RingConfig(mlp_tokens=4)
    assert ranks(1).run(in_one_process, HandsOn, saves_memory) == [""]
    assert ranks(1).run(in_one_process, ChangesShare, saves_memory)[0].startswith("InputsNotHandedOn: ")
    assert ranks(1).run(in_one_process, ChangesWhole, RingConfig()) == [""]  # nothing is sharded
