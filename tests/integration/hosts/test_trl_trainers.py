"""TRL's other trainers: refused by name where there is a ring, untouched where there is none."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from typing import Any

import pytest
from transformers import Trainer
from trl.experimental.bema_for_ref_model import DPOTrainer as BemaDPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from hf_ring_attn import errors
from hf_ring_attn.integration.hosts.trainer_facts import refuse_trainer
from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trl_trainers import KINDS, constructed, one_step, unknown

OWN_GATES = ["Distillation", "GRPO", "RLOO"]
"""Those whose config refuses context parallelism by itself, if it is told of it there."""


@pytest.mark.parametrize("name", ["GKD"])
def test_it_is_refused_by_name_when_it_is_constructed_in_a_ring(ranks: Ranks, name: str) -> None:
    for said in ranks(2).run(unknown, name, Mesh(cp=2)):
        assert said.startswith(f"UnsupportedTrainer: {name}Trainer is not supported in a ring yet: its loss compares ")
        assert "ring_fp32_exact" not in said  # with which it would train wrongly


@pytest.mark.parametrize("backend", ["torch", "ring"])
@pytest.mark.parametrize("name", OWN_GATES)
def test_it_is_refused_too_where_its_own_config_asks_for_a_ring(ranks: Ranks, name: str, backend: str) -> None:
    """A ring's config passes TRL's own gates, which look for torch's context parallelism."""
    own = name in OWN_GATES and backend == "torch"
    start = (
        f"ValueError: {name}Trainer does not support sequence-dim" if own
        else "constructed"
    )  # fmt: skip
    for said in ranks(2).run(constructed, name, Mesh(cp=2), {"cp_size": 2, "cp_backend": backend}):
        assert said.startswith(start)


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_ever_without_a_ring(ranks: Ranks, name: str) -> None:
    got, want = (ranks(1).run(one_step, name, plugin)[0] for plugin in (True, False))
    assert want["grad_norm"] > 0
    for number in ("loss", "grad_norm"):
        assert got[number] == pytest.approx(want[number], rel=LOSS), number


def all_trainers() -> set[Any]:
    """Every trainer of TRL that can be imported, the experimental ones too."""
    with warnings.catch_warnings(action="ignore"):
        folder = importlib.import_module("trl.experimental")
        names = ["trl", *(f"trl.experimental.{module.name}" for module in pkgutil.iter_modules(folder.__path__))]
        modules = map(importlib.import_module, names)
        named = {getattr(module, name) for module in modules for name in dir(module) if name.endswith("Trainer")}
    return {kind for kind in named if isinstance(kind, type) and issubclass(kind, Trainer)}


def test_no_other_trainer_of_trl_gets_through() -> None:
    exact = {SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer, GRPOTrainer, RLOOTrainer, DistillationTrainer}
    of_logits = {"ORPOTrainer", "CPOTrainer", "TPOTrainer", "GKDTrainer", "OnlineDPOTrainer", "A2POTrainer"}
    exact |= {GMPOTrainer, BemaDPOTrainer}
    trainers = {kind for kind in all_trainers() - exact if kind.__name__ not in of_logits}
    assert len(trainers) > 8
    for kind in trainers:
        with pytest.raises(errors.UnsupportedTrainer, match=kind.__name__):
            refuse_trainer(object.__new__(kind))
