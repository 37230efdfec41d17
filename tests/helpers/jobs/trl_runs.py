"""What runs of TRL's trainers share, for live ranks: how a case is described, their arguments, and what a run gives."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from datasets import disable_progress_bars
from torch import Tensor

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.context.mesh import ring_group
from tests.helpers.jobs.fsdp2_trainers import weights_of
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import a_folder, launched, refusals_of

OFFLINE = {"HF_HUB_OFFLINE": "1", "CI": "1"}
"""Nothing is looked up, and TRL's telemetry is not sent."""


@dataclass(frozen=True, eq=False)
class Case:
    """One way to train, and why it is here.

    Args:
        args: for the trainer's config, over `arguments`. kind: the class of the model.
    """

    why: str
    args: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    kind: str = "LlamaForCausalLM"

    def with_args(self, **more: Any) -> Self:
        return dataclasses.replace(self, args={**self.args, **more})


def arguments(folder: str, **more: Any) -> dict[str, Any]:
    """For a trainer's config."""
    return {
        "output_dir": folder, "learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "seed": 5,
        "max_grad_norm": 100.0, "logging_steps": 1, "bf16": False, "use_cpu": True, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, "dataloader_pin_memory": False,
        **more,
    }  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of what TRL deprecates, and without a progress bar for each map over a dataset."""
    disable_progress_bars()
    with warnings.catch_warnings(action="ignore"):
        yield


@dataclass(frozen=True)
class Outcome:
    """What a run gave: the numbers of each step and of the evaluation, and the trained parameters before and after.

    ``refused``: see `refusals_of`.
    """

    ring_size: int
    steps: list[dict[str, float]]
    evaluation: dict[str, float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    refused: str = ""


def numbers(entry: dict[str, Any]) -> dict[str, float]:
    """Every number that does not depend on the clock."""
    clock = ("_runtime", "_per_second", "_time")
    return {name: float(x) for name, x in entry.items() if isinstance(x, (int, float)) and not name.endswith(clock)}


def evaluation(host: Any) -> dict[str, float]:
    return numbers(host.evaluate())


def outcome(
    host: Any, evaluate: Callable[[Any], dict[str, float]] = evaluation, checkpoint: str | None = None
) -> Outcome:
    """The steps of a trainer on this rank, from a checkpoint on, and an evaluation."""
    before = weights_of(host.model)
    host.train(resume_from_checkpoint=checkpoint)
    steps = [numbers(entry) for entry in host.state.log_history if "loss" in entry]
    evaluated, group = evaluate(host), ring_group(host.accelerator)
    ring_size, after = 1 if group is None else group.size(), weights_of(host.model)
    return Outcome(ring_size, steps, evaluated, before, after, refusals_of(host))


def first_error(make: Any, case: Any, mesh: Mesh, ring: RingConfig | None = None, **options: Any) -> str:
    """What a trainer's construction and its first step raise, as "Type: text", or "trained".

    A rank that raised the error itself would end its world.
    """
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet():
        try:
            once = dataclasses.replace(case, args={**case.args, "max_steps": 1})
            host = make(once, folder, "ring_fp32" if mesh.cp > 1 else "sdpa", **options)
            hf_ring_attn.configure(host.model, ring or RingConfig())
            host.train()
        except Exception as error:  # noqa: BLE001 - the test judges the text, whatever it is
            return f"{type(error).__name__}: {error}"
        return "trained"
