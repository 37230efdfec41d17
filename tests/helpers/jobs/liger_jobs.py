"""Liger's patches of models, their Triton kernels replaced by plain torch, which runs on a CPU and counts its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers.models.granite import modeling_granite
from transformers.models.llama import modeling_llama

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.config import Loss
from hf_ring_attn.integration.losses.head import ChunkedLoss
from tests.helpers.jobs import chunked_jobs
from tests.helpers.jobs.chunked_jobs import Answer, Step
from tests.helpers.jobs.plain_jobs import attempt, gradients_of
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.sft_jobs import Case
from tests.helpers.jobs.sft_jobs import trained as sft_trained
from tests.helpers.jobs.trainer_jobs import train

PATCHED = (modeling_llama, modeling_granite, functional)
"""Modules that Liger changes, and that other tests use."""


@contextmanager
def liger_in_torch() -> Iterator[Counter[str]]:
    """Liger without its Triton kernels. Gives how often each was called; what Liger patches is undone afterwards."""
    import liger_kernel.transformers.functional as liger_functional
    from liger_kernel.transformers import rms_norm, rope, swiglu

    calls: Counter[str] = Counter()

    def norm(x: Tensor, weight: Tensor, epsilon: float, *_: Any) -> Tensor:
        calls["norm"] += 1
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))

    def rotated(_name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        calls["rope"] += 1
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        half: Any = modeling_llama.rotate_half
        return q * cos + half(q) * sin, k * cos + half(k) * sin

    def gated(a: Tensor, b: Tensor, *_: Any) -> Tensor:
        calls["gated"] += 1
        return functional.silu(a) * b

    def entropy(logits: Tensor, target: Tensor, _weight: Any, ignore: int, *rest: Any) -> tuple[Any, ...]:
        calls["loss"] += 1
        assert type(logits) is Tensor, "Triton would read the memory that lazy logits do not have"
        loss = real_cross_entropy(logits, target, ignore_index=ignore, reduction=rest[2])
        return loss, None, None, None

    def fused(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Any, ...]:
        calls["fused loss"] += 1
        loss = real_cross_entropy(hidden @ weight.T, target, ignore_index=rest[2], reduction=rest[5])
        return loss, None, None, None

    real_cross_entropy = functional.cross_entropy
    before = [dict(vars(module)) for module in PATCHED]
    forward = modeling_llama.LlamaForCausalLM.forward
    with (
        mock.patch.object(rms_norm, "LigerRMSNormFunction", mock.Mock(apply=norm)),
        mock.patch.object(rope, "dispatch", rotated),
        mock.patch.object(swiglu, "LigerSiLUMulFunction", mock.Mock(apply=gated)),
        mock.patch.object(liger_functional, "LigerCrossEntropyFunction", mock.Mock(apply=entropy)),
        mock.patch.object(
            liger_functional, "LigerFusedLinearCrossEntropyFunction", mock.Mock(apply=fused, spec=["apply"])
        ),
    ):
        try:
            yield calls
        finally:
            modeling_llama.LlamaForCausalLM.forward = forward  # type: ignore[method-assign]
            for module, names in zip(PATCHED, before, strict=True):
                vars(module).update(names)


def apply_to_class() -> None:
    """As `AutoLigerKernelForCausalLM` does, and programs by themselves, before they make a model."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()


def apply_to(model: Any) -> None:
    """Afterwards, with the losses that Liger takes by default."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model.get_base_model() if hasattr(model, "get_base_model") else model)


def step_of(step: Step, loss: Loss, liger: str = "", named: bool = True) -> Answer:
    """One rank's step of a loop; gradients are averaged over ranks. ``liger``: applied to "class" or "model"."""
    if liger == "class":
        apply_to_class()
    model = chunked_jobs.model_of(step)
    if liger == "model":
        apply_to(model)
    if step.wrap == "DDP":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif step.wrap:
        chunked_jobs.sharded(model, step.wrap)
    with chunked_jobs.in_float64() as made:
        batch = hf_ring_attn.shard(step.batch, config=RingConfig(loss=loss), model=model if named else None)
        with batch:
            out = model(**batch.inputs)
        out.loss.backward()
        if not step.wrap:
            batch.reduce_gradients(model)
    state, found = batch.context.state(ChunkedLoss), gradients_of(model)
    gradients = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
    return Answer(out.loss.detach(), gradients, state.losses, max(made, default=0), state.why)


def both(step: Step, liger: str) -> tuple[Answer, Answer, Counter[str]]:
    """With Liger and without it; how often Liger's functions were called."""
    want = step_of(step, "sharded")
    with liger_in_torch() as calls:
        return step_of(step, "auto", liger), want, calls


def unnamed() -> list[Any]:
    """What a step raises whose model was not named to `shard`, and whose forward is Liger's."""
    with liger_in_torch():
        return [attempt(step_of, Step(why=""), "auto", "model", False)]


def by_name() -> Answer:
    """A step with Liger's loss in place of torch's, where "chunked" was asked for by name: raises."""
    with liger_in_torch():
        return step_of(Step(why="", model="granite"), "chunked", "model")


@dataclass
class WithLiger:
    """A run of a trainer, and how often Liger's functions were called in it."""

    outcome: Any
    calls: Counter[str]


def trained(run: Run | Case, mesh: Mesh, by_class: bool = False) -> WithLiger:
    with liger_in_torch() as calls:
        if by_class:
            apply_to_class()
        return WithLiger(train(run, mesh) if isinstance(run, Run) else sft_trained(run, mesh), calls)


def refused_by_name() -> str:
    raised = attempt(by_name)
    return "nothing" if raised is None else f"{raised[0]}: {raised[1]}"
