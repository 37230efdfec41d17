"""What ranks run on stock hosts and on those of docs/upstream: a backend of others, torch's own, and ours."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import accelerate
import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
)
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface, Trainer

import hf_ring_attn
from hf_ring_attn import integration
from hf_ring_attn.integration import log
from hf_ring_attn.integration.context.mesh import RING
from hf_ring_attn.integration.hosts import buffers, parallelism_config
from hf_ring_attn.integration.patching import changes
from tests.helpers.jobs import accelerate_ranks, sft_jobs, trl_runs
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import Outcome, launched, train, trainer_of
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import tiny
from tests.helpers.patience import patient

RUN = Run(why="upstream", rows=Rows(labelled="answers"), arguments={"gradient_accumulation_steps": 2})
NO_EVALUATION = Run(why="upstream", arguments={"eval_strategy": "no"})
PACKED = sft_jobs.Case("upstream", {"packing": True})
NAMED = {"PARALLELISM_CONFIG_CP_BACKEND": RING}

CONFIG = parallelism_config.CONFIG
UNNECESSARY = (
    *(CONFIG + name for name in ("__post_init__", "cp_enabled", "_validate_accelerator")),
    *(CONFIG + name for name in ("non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names")),
    "accelerate.accelerator:Accelerator.maybe_context_parallel",
)
"""Our patches that the patches of docs/upstream make unnecessary for configs that name the backend."""


# ---- a backend of others ---------------------------------------------------------------------------------------------


def foreign_training() -> tuple[list[str], Outcome]:
    """Our patches in force (there must be none), and the run of a stock Trainer with a backend that is not ours."""
    from tests.helpers import foreign_backend

    foreign_backend.install()
    mesh = {"PARALLELISM_CONFIG_CP_SIZE": "2", "PARALLELISM_CONFIG_CP_BACKEND": foreign_backend.NAME}
    with launched(Mesh(2), ACCELERATE_USE_PARALLELISM_CONFIG="true", **mesh):
        model = tiny(NO_EVALUATION.model, None)
        model.set_attn_implementation(foreign_backend.NAME)
        trainer = trainer_of(NO_EVALUATION, Mesh(2), "unused", model)
        trainer.train()
        losses = [entry for entry in trainer.state.log_history if "loss" in entry]
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return changes.installed(), Outcome(2, losses, parameters, {}, len(losses), [])


# ---- torch's own -----------------------------------------------------------------------------------------------------


def answer(call: Callable[[], Any]) -> str:
    """What a call returns, or its refusal."""
    try:
        return str(call())
    except (ValueError, RuntimeError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"


def as_if_on_gpus(plugin: Any) -> str:
    """What accelerate makes of cp_size=2 in processes that each have a GPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    given = {"fsdp_plugin": plugin, "dynamo_plugin": TorchDynamoPlugin(), "_from_accelerator": True}
    state = AcceleratorState(parallelism_config=ParallelismConfig(cp_size=2), **given)
    return str(state.distributed_type)


def prepared_by_trainer(attention: str) -> Any:
    """The shift_labels of the Trainer for a model with this attention."""
    trainer = object.__new__(Trainer)
    given: Any = SimpleNamespace(parallelism_config=ParallelismConfig(cp_size=2), maybe_context_parallel=nullcontext)
    given.unwrap_model = lambda model: model
    trainer.accelerator = given
    model: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))
    tokens = torch.tensor([[1, 2, 3, 4]])
    _, inputs = trainer._prepare_context_parallel_inputs(model, {"input_ids": tokens, "labels": tokens.clone()})
    return inputs["shift_labels"]


def torchs_own(config: ParallelismConfig, model: Any) -> tuple[Any, list[bool], Any]:
    """A buffer in torch's context, the masks that a model's attention gets, and the buffer after it."""
    accelerator = object.__new__(Accelerator)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    accelerator.state = SimpleNamespace(parallelism_config=config, device_mesh=mesh)
    accelerator._prepare_cp(model, None)
    seen: list[bool] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["attention_mask"] is None and kwargs["is_causal"]),
            with_kwargs=True,
        )
    buffer = torch.arange(16)[None]
    with accelerator.maybe_context_parallel(buffers=[buffer], buffer_seq_dims=[1]):
        inside = buffer.tolist()
    model(torch.arange(8)[None], attention_mask=torch.ones(1, 8))
    return inside, seen, buffer.tolist()


def stock_answers() -> dict[str, str]:
    """What accelerate and Trainer do by themselves with torch's backend and with wrong configs."""
    config = ParallelismConfig
    calls: dict[str, Callable[[], Any]] = {
        "torch": lambda: config(cp_size=2),
        "dims": lambda: [getattr(config(cp_size=2, dp_shard_size=2), name) for name in (
            "cp_enabled", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names",
        )],
        "unknown": lambda: config(cp_size=2, cp_backend="unknown"),
        "no size": lambda: config(cp_size=0),
        "handler": lambda: config(cp_size=2, cp_handler=TorchTensorParallelConfig()),
        "ddp": lambda: config(cp_size=2, dp_replicate_size=2),
        "cpu": lambda: Accelerator(cpu=True, parallelism_config=config(cp_size=2)),
        "no plugin": lambda: as_if_on_gpus(None),
        "FSDP1": lambda: as_if_on_gpus(FullyShardedDataParallelPlugin(fsdp_version=1)),
        "FSDP2": lambda: as_if_on_gpus(FullyShardedDataParallelPlugin(fsdp_version=2)),
        **{attention: partial(prepared_by_trainer, attention) for attention in ("eager", "flash_attention_2", "sdpa")},
        "context": lambda: torchs_own(config(cp_size=2), tiny("llama", "sdpa")),
        "window": lambda: torchs_own(config(cp_size=2), tiny("mistral", "sdpa")),
    }  # fmt: skip
    with launched(Mesh(2)):
        answers = {}
        for name, call in calls.items():
            AcceleratorState._reset_state(reset_partial_state=True)
            answers[name] = answer(call)
        return answers


# ---- ours ------------------------------------------------------------------------------------------------------------

WITHOUT_A_NAME = {
    "stock_config_waits_for_the_model", "another_model_gets_accelerates_refusals", "dispatched_batches_are_refused",
}  # fmt: skip
"""The checks of accelerate's loop that are about configs without the backend's name."""


def ring_of_two(**environment: str) -> tuple[list[str], Outcome]:
    """The lines logged on this rank, and a run of Trainer in a ring."""
    lines: list[str] = []
    log._said.clear()
    with mock.patch.object(log._logger(), "info", lines.append):
        return lines, train(RUN, Mesh(1, 2), **environment)


def packed_in_a_ring(**environment: str) -> trl_runs.Outcome:
    with mock.patch.dict(trl_runs.OFFLINE, environment):
        return sft_jobs.trained(PACKED, Mesh(1, 2))


def accelerates_loops(**environment: str) -> int:
    """The checks of accelerate's own loop, all or those of a config that names the backend; how many passed."""
    checks = [check for check in accelerate_ranks.CHECKS if not environment or check.__name__ not in WITHOUT_A_NAME]
    for check in checks:
        with launched(Mesh(1, 2), **environment):
            check(Accelerator(dataloader_config=DataLoaderConfiguration()))
    return len(checks)


@contextmanager
def fewer_patches() -> Iterator[None]:
    """Our package with its backend in accelerate's registry, and without the patches that this replaces."""
    from accelerate.utils import ContextParallelBackend, register_context_parallel_backend

    class Ring(ContextParallelBackend):  # type: ignore[misc]  # accelerate has no types
        requires_fsdp2 = False

        def validate(self, accelerator: Any) -> None:
            parallelism_config.refuse_host(accelerator)

        def context(self, accelerator: Any, *args: Any, **named: Any) -> Any:
            names = {"buffers": "buffers", "buffer_seq_dims": "dims", "no_restore_buffers": "no_restore"}
            return buffers.sharded_buffers(accelerator, *args, **{names[name]: x for name, x in named.items()})

    everything = list(integration.CHANGES)
    assert {change.key for change in everything} >= set(UNNECESSARY)
    hf_ring_attn.uninstall()
    integration.CHANGES[:] = [change for change in everything if change.key not in UNNECESSARY]
    try:
        hf_ring_attn.install()
        interface: Any = AttentionInterface  # its installed version has no context_parallel_backends
        interface.register("ring_fp32", interface._global_mapping["ring_fp32"], context_parallel_backends=[RING])
        register_context_parallel_backend(RING, Ring())
        yield
    finally:
        hf_ring_attn.uninstall()
        integration.CHANGES[:] = everything
        hf_ring_attn.install()


def ours_with_fewer_patches() -> dict[str, Any]:
    with fewer_patches():
        found = {"installed": changes.installed(), "trainer": ring_of_two(**NAMED), "packed": packed_in_a_ring(**NAMED)}
        return {**found, "loops": accelerates_loops(**NAMED)}


def ours_as_it_is() -> dict[str, Any]:
    found = {"installed": changes.installed(), "trainer": ring_of_two(), "packed": packed_in_a_ring()}
    return {**found, "named": ring_of_two(**NAMED), "loops": accelerates_loops()}


# ---- a program in the patched tree -----------------------------------------------------------------------------------

JOBS: dict[str, Callable[[], Any]] = {
    "stock": stock_answers, "ours": ours_as_it_is, "foreign": foreign_training, "fewer": ours_with_fewer_patches,
}  # fmt: skip
"""In this order: the last two register backends."""


def places() -> list[str]:
    return [str(accelerate.__file__), str(transformers.__file__)]


def main(result: Path) -> None:
    """Runs every job on two ranks of this python, and pickles what they return."""
    with LiveRanks(2, timeout_seconds=patient(100)) as ranks:
        found: dict[str, Any] = {"places": ranks.run(places)}
        for name, job in JOBS.items():
            found[name] = ranks.run(job)
    result.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
