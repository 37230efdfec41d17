"""What Lightning does with a program, without Lightning: Fabric's wrapper, steps with closures, FSDP1 around a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.jobs.refusal_jobs import FullyShardedDataParallel
from tests.helpers.models.tiny_models import tiny

# ---- Fabric ----------------------------------------------------------------------------------------------------------


class Precision:
    """Stands for Fabric's "bf16-mixed"."""

    contexts = 0

    def forward_context(self) -> AbstractContextManager[Any]:
        Precision.contexts += 1
        return nullcontext()


class Strategy:
    precision = Precision()


class _FabricModule(nn.Module):
    """Stands for Fabric's wrapper (lightning 2.6): around DDP, with a hook on each tensor that it returns."""

    in_backward = False

    def __init__(self, forward_module: nn.Module, original_module: nn.Module) -> None:
        super().__init__()
        self._forward_module, self._original_module, self._strategy = forward_module, original_module, Strategy()

    def forward(self, **inputs: Any) -> Any:
        with self._strategy.precision.forward_context():
            output = self._forward_module(**inputs)
        for x in output.values():
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(ask, True))
        return output


def ask(needs_fabric: bool, *_: Any) -> None:
    if needs_fabric and not _FabricModule.in_backward:
        raise RuntimeError("call fabric.backward(loss) instead of loss.backward()")


ask.__module__ = "lightning.fabric.wrappers"


def backward(loss: Tensor) -> None:
    """Stands for ``fabric.backward``."""
    _FabricModule.in_backward = True
    loss.backward()
    _FabricModule.in_backward = False


def set_up(model: nn.Module) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    """Stands for ``fabric.setup``: the wrapped model, and its no_backward_sync."""
    if not torch.distributed.is_initialized():
        return _FabricModule(model, model), nullcontext
    ddp = DistributedDataParallel(model)
    return _FabricModule(ddp, model), ddp.no_sync


def trained_by_fabric() -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of steps of two batches each, whose first layer trains from the second on; the weights; contexts."""
    Precision.contexts = 0
    model = tiny("llama", "ring_fp32").train()
    model.model.layers[0].requires_grad_(False)
    wrapped, no_sync = set_up(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        model.model.layers[0].requires_grad_(step > 0)
        for last in (False, True):
            with nullcontext() if last else no_sync():
                sharded = hf_ring_attn.shard(tokens(23, seed=2 * step + last))
                with sharded:
                    loss = wrapped(**sharded.inputs).loss
                backward(loss / 2)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: x.detach() for name, x in model.named_parameters()}, Precision.contexts


def test_a_model_in_fabrics_wrapper_trains_as_in_one_process(ranks: Ranks) -> None:
    """Its hooks on logits were refused, its precision's hooks ended the self-check, and DDP inside was not seen: the
    layer that it does not average was stepped by each rank's own gradient."""
    want, weights, calls = trained_by_fabric()
    for losses, got, contexts in ranks(2).run(trained_by_fabric):
        assert losses == pytest.approx(want, rel=1e-6)
        for name, x in weights.items():
            assert relative_error(got[name], x) < 1e-6, name
        assert contexts > calls, "the self-check runs in Fabric's precision, too"


def step_without_sync_in_fabric() -> tuple[str, bool]:
    model = tiny("llama", "ring_fp32").train()
    before = model.lm_head.weight.detach().clone()
    wrapped, no_sync = set_up(model)
    sharded = hf_ring_attn.shard(tokens(23))
    with no_sync(), sharded:
        backward(wrapped(**sharded.inputs).loss)
    raised = attempt(torch.optim.SGD(model.parameters(), lr=0.1).step)
    return "" if raised is None else raised[1], torch.equal(before, model.lm_head.weight)


def test_a_step_after_fabrics_no_backward_sync_is_refused(ranks: Ranks) -> None:
    for text, same in ranks(2).run(step_without_sync_in_fabric):
        assert "was in DDP's no_sync" in text and same


# ---- steps with closures, as of the Trainer --------------------------------------------------------------------------


def stepped_with_a_closure(kind: str) -> tuple[str, bool, Tensor]:
    """What the first step of a process raises; if it left the weights as they were; a weight.

    Args:
        kind: "accumulates": a backward without DDP's average before the step, one with it in the closure; "local": the
            only one without it; "by rank": of a loss that each rank multiplies by another number.
    """
    model = tiny("llama", "ring_fp32").train()
    before, in_ring = model.lm_head.weight.detach().clone(), torch.distributed.is_initialized()
    wrapped: Any = DistributedDataParallel(model) if in_ring else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(seed: int, local: bool) -> None:
        sharded = hf_ring_attn.shard(tokens(23, seed=seed))
        with wrapped.no_sync() if local and in_ring else nullcontext(), sharded:
            loss = wrapped(**sharded.inputs).loss
            (loss * (1 + torch.distributed.get_rank()) if kind == "by rank" else loss).backward()

    def closure() -> None:
        run(2, local=kind == "local")

    def step() -> None:
        if kind == "accumulates":
            run(1, local=True)
        optimizer.step(closure)

    hf_ring_attn.uninstall()  # as in a new process: an earlier test has watched steps
    hf_ring_attn.install()
    raised = attempt(step)
    return "" if raised is None else raised[0], torch.equal(before, model.lm_head.weight), model.lm_head.weight.detach()


@pytest.mark.parametrize("kind", ["local", "by rank"])
def test_a_closure_of_the_first_step_is_refused_before_weights_change(ranks: Ranks, kind: str) -> None:
    """The step took wrong gradients, and the next one was refused; the last one of a run was silent."""
    for error, same, _ in ranks(2).run(stepped_with_a_closure, kind):
        assert error == "RanksDiffer" and same


def test_gradients_that_a_closure_completes_are_no_error(ranks: Ranks) -> None:
    """Those before it were compared: not averaged yet, they differ among ranks."""
    _, _, want = stepped_with_a_closure("accumulates")
    for error, _, got in ranks(2).run(stepped_with_a_closure, "accumulates"):
        assert error == "" and relative_error(got, want) < 1e-6


# ---- FSDP1 around a step ---------------------------------------------------------------------------------------------


class Step(nn.Module):
    """A module whose ``forward`` shards its batch, as a training_step does that a strategy wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            return self.model(**sharded.inputs).loss


def refused_inside_fsdp1(has_parameters: bool) -> tuple[str, str] | None:
    model = tiny("llama", "ring_fp32").train()
    for module in () if has_parameters else model.modules():
        for name, x in list(module._parameters.items()):
            if x is not None:  # as FSDP1 without use_orig_params: views of its own parameter
                del module._parameters[name]
                setattr(module, name, x.detach().clone().requires_grad_())
    return attempt(lambda: FullyShardedDataParallel(Step(model))(**tokens(23)))


@pytest.mark.parametrize("has_parameters", [True, False])
def test_fsdp1_around_a_step_is_refused(ranks: Ranks, has_parameters: bool) -> None:
    """The self-check failed by itself; without parameters the model was not even checked, and a step was made."""
    for raised in ranks(2).run(refused_inside_fsdp1, has_parameters):
        assert raised is not None and raised[0] == "UnsupportedModel", raised
        assert "FSDP1 is not tested" in raised[1]


# ---- rows that a training_step gathers -------------------------------------------------------------------------------


def outcome_of_negatives() -> str:
    """What a loss is refused with whose embeddings are gathered, as by ``self.all_gather(x, sync_grads=True)``."""
    model = tiny("llama", "ring_fp32").train()

    def embedded() -> Tensor:
        sharded = hf_ring_attn.shard({"input_ids": tokens(23)["input_ids"]})  # dropped here
        with sharded:
            return sharded.last_token(model.model(**sharded.inputs).last_hidden_state)

    raised = attempt(lambda: torch.stack(all_gather(embedded())))
    return "" if raised is None else raised[0]


def test_rows_gathered_from_all_ranks_are_refused_once_their_batch_is_dropped(ranks: Ranks) -> None:
    """Each row was its own negative, silently, if a function made the embeddings and kept no batch."""
    assert ranks(2).run(outcome_of_negatives) == ["SameRowsGathered"] * 2
