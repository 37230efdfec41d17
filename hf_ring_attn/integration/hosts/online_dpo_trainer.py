"""TRL's OnlineDPOTrainer in a ring: a ring generates and rewards its completions once, and models get shares of them.

Prompts, rewards and metrics are those of a process for each ring (`rings_as_processes`). The step calls its models with
the whole rows that it made, and these calls are sharded (`batch.whole_row_calls`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ... import errors
from ..patching.changes import Original, Patch
from . import rings_as_processes as rings
from . import trainer_facts, whole_row_steps
from .ring_overrides import of_first_rank
from .trainer_facts import in_rings


@in_rings
def _training_step(original: Original, self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
    trainer_facts.refuse_step(self)
    if self.args.use_vllm:
        raise errors.UnsupportedOption("OnlineDPOTrainer with use_vllm", "let transformers generate")
    with rings.rings_as_processes(self), whole_row_steps.sharded_calls(self, model):
        return original(self, model, inputs, num_items_in_batch)


@in_rings
def _once(original: Original, self: Any, *given: Any, **named: Any) -> Any:
    """Gives all ranks of a ring what the method returns on its first rank."""
    return of_first_rank(self, original.__name__, lambda: original(self, *given, **named))


ONLINE_DPO = "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer"
_REWARDS = "(self, prompts, completions, completion_ids_list, **reward_kwargs)"
PATCHES = [
    Patch(f"{ONLINE_DPO}.training_step", "(self, model, inputs, num_items_in_batch=)", _training_step),
    Patch(f"{ONLINE_DPO}._generate", "(self, model, prompts, images=)", _once),
    Patch(f"{ONLINE_DPO}._calculate_rewards_from_functions", _REWARDS, _once),
]
