"""Ranks whose models differ or drift apart are refused, all alike, by the name of what differs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.comm.ring import Ring
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens, told
from tests.helpers.models.tiny_models import tiny


def changed(change: Callable[[Any], object]) -> Callable[[Any], tuple[Any, AbstractContextManager[Any]]]:
    def apply(model: Any) -> tuple[Any, AbstractContextManager[Any]]:
        change(model)
        return model, nullcontext()

    return apply


def other(**config: Any) -> Callable[[Any], tuple[Any, AbstractContextManager[Any]]]:
    return lambda _model: (tiny("llama", "ring_fp32", **config).train(), nullcontext())


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Any:
    return lambda model: (model, context())


CHECKPOINTED = changed(lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}))
DIFFERENCES: dict[str, tuple[Any, str]] = {
    "dtype": (changed(lambda model: model.bfloat16()), "dtypes of weights, but got rank 0: torch.float32, rank 1: tor"),
    "mode": (changed(lambda model: model.eval()), "mode, but got rank 0: training, rank 1: evaluation"),
    "autocast": (
        inside(lambda: torch.autocast("cpu", torch.bfloat16)),
        "autocast, but got rank 0: off, rank 1: torch.bfloat16",
    ),
    "gradients": (inside(torch.no_grad), "grad mode, but got rank 0: enabled, rank 1: disabled"),
    "layers": (other(num_hidden_layers=3), "config[0]['num_hidden_layers'], but got rank 0: 2, rank 1: 3"),
    "heads": (other(num_key_value_heads=4), "config[0]['num_key_value_heads'], but got rank 0: 2, rank 1: 4"),
    "modules": (changed(lambda model: model.add_module("extra", nn.Linear(2, 2))), "but got rank 0: "),
    "frozen": (changed(lambda model: model.model.norm.requires_grad_(False)), "weights['model.norm.weight']"),
    "options": (
        changed(lambda model: hf_ring_attn.configure(model, RingConfig(backward="gather"))),
        "RingConfig.backward, but got rank 0: ring, rank 1: gather",
    ),
    "checkpointing": (CHECKPOINTED, "gradient checkpointing, but got rank 0: off, rank 1: on"),
}


def differing(what: str, turns: int) -> tuple[str, str] | None:
    """The last of ``turns`` batches is computed with a model that differs on rank 1."""
    model: Any = tiny("llama", "ring_fp32").train()

    def run() -> None:
        nonlocal model
        for turn in range(turns):
            context: AbstractContextManager[Any] = nullcontext()
            if turn == turns - 1 and dist.get_rank() == 1:
                model, context = DIFFERENCES[what][0](model)
            sharded = hf_ring_attn.shard(tokens(23, seed=turn))
            with sharded, context:
                model(**sharded.inputs)

    return attempt(run)


@pytest.mark.parametrize("turns", [1, 3], ids=["at first", "later"])
@pytest.mark.parametrize("what", DIFFERENCES)
def test_models_that_differ_are_refused_before_anything_of_them_travels(ranks: Ranks, what: str, turns: int) -> None:
    for raised in ranks(2).run(differing, what, turns):
        assert raised is not None, "not refused"
        assert raised[0] == "RanksDiffer"
        assert DIFFERENCES[what][1] in raised[1]


def hooked_alone() -> tuple[str, str] | None:
    """A hook that a profiler puts on one rank's model is another structure there: all ranks look at it again."""
    model: Any = tiny("llama", "ring_fp32").train()

    def run() -> None:
        for turn in range(3):
            if turn == 1 and dist.get_rank() == 1:
                model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
            sharded = hf_ring_attn.shard(tokens(23, seed=turn))
            with sharded:
                model(**sharded.inputs)

    return attempt(run)


def test_a_hook_on_one_rank_does_not_leave_it_alone(ranks: Ranks) -> None:
    assert ranks(2).run(hooked_alone) == [None, None]


def called(model: Any) -> None:
    """Calls a model on a sharded row."""
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        model(**sharded.inputs)


def ordered_by_process() -> tuple[str, str] | None:
    """A config's dict that was made of a set of texts: each process has its own order of these."""
    model: Any = tiny("llama", "ring_fp32").train()
    kinds = sorted(("full_attention", "sliding_attention"), reverse=dist.get_rank() == 1)
    model.config.by_kind = {kind: {"rope_theta": 1e4} for kind in kinds}
    return attempt(lambda: called(model))


def test_the_order_of_a_dict_in_a_config_is_no_difference(ranks: Ranks) -> None:
    assert ranks(2).run(ordered_by_process) == [None, None]


def refused_alone() -> tuple[str, str] | None:
    """A module that only one rank cannot have in a ring: the others hear why."""
    model: Any = tiny("llama", "ring_fp32").train()
    model.model.layers[0].mlp.add_module("drop", nn.Dropout1d(0.5 if dist.get_rank() else 0.0))
    return attempt(lambda: called(model))


def test_a_model_that_one_rank_refuses_is_refused_by_all(ranks: Ranks) -> None:
    here, there = ranks(2).run(refused_alone)
    assert here is not None and there is not None
    assert (here[0], there[0]) == ("RefusedElsewhere", "UnsupportedModel")
    assert "rank 1: UnsupportedModel: LlamaForCausalLM" in here[1] and "its p to 0" in here[1]


# ---- weights that drift apart ----------------------------------------------------------------------------------------


def one_weight(model: nn.Module) -> None:
    with torch.no_grad():
        next(x for x in model.parameters() if x.requires_grad).mul_(1.001)


def drifting(how: str, model: Any) -> tuple[int, str]:
    """The number of the batch in which the run was refused, and why; 99 if it never was. Rank 1 differs in batch 1."""
    called, apart = model, dist.get_rank() == 1
    if how == "in DDP":
        called = DistributedDataParallel(model)
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.2 if how == "another rate" and apart else 0.1)
    turn = 0

    def run() -> None:
        nonlocal turn
        for turn in range(len(trained) + 2):
            sharded = hf_ring_attn.shard(tokens(23, seed=turn))
            with sharded:
                loss = called(**sharded.inputs).loss
            loss.backward()
            if how == "clipped before":
                torch.nn.utils.clip_grad_norm_(trained, 0.1)
            if how == "divided before":
                torch._foreach_div_([x.grad for x in trained], 3)
            if how == "reduced after":
                optimizer.step()
            if how != "in DDP":
                sharded.reduce_gradients(model)
            if how == "one weight" and turn == 1 and apart:
                one_weight(model)
            skips = turn == 1 and apart and how in ("a skipped step", "in DDP")
            if how != "reduced after" and not skips:
                optimizer.step()
            optimizer.zero_grad()

    raised = attempt(run)
    return (99, "") if raised is None else (turn, raised[1])


def drifting_llama(how: str) -> tuple[int, str]:
    return drifting(how, tiny("llama", "ring_fp32").train())


def drifting_lora(how: str) -> tuple[int, str]:
    torch.manual_seed(0)
    model: Any = tiny("llama", "ring_fp32").train()
    return drifting(how, get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])))


DRIFTS = {
    "a skipped step": (2, "weight ", "its optimizer took another step"),
    "another rate": (1, "weight ", "its optimizer took another step"),
    "in DDP": (2, "weight ", "its optimizer took another step"),
    "reduced after": (99, "", ""),  # the end of the backward has averaged
    "clipped before": (99, "", ""),
    "divided before": (99, "", ""),
    "none": (99, "", ""),
}


@pytest.mark.parametrize("program", [drifting_llama, drifting_lora])
@pytest.mark.parametrize("how", DRIFTS)
@pytest.mark.turns
def test_replicas_that_drift_apart_are_refused(ranks: Ranks, how: str, program: Callable[[str], Any]) -> None:
    batch, what, todo = DRIFTS[how]
    for turn, text in ranks(2).run(program, how):
        assert turn == batch, f"batch {turn}: {text}"
        assert what in text and todo in text


def test_one_weight_that_drifts_is_named_within_as_many_batches_as_there_are_weights(ranks: Ranks) -> None:
    for turn, text in ranks(2).run(drifting_lora, "one weight"):
        assert 2 <= turn < 6
        assert "weight base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight" in text


def steps_with_an_empty_weight() -> int:
    """How many batches a model with an empty weight trains on, at each of which another weight is compared."""
    model: Any = tiny("llama", "ring_fp32", num_hidden_layers=1).train()
    model.model.layers[0].mlp.empty = torch.nn.Parameter(torch.empty(0))
    for _ in list(model.parameters()):
        sharded = hf_ring_attn.shard(tokens(24))
        with sharded:
            model(**sharded.inputs).loss.backward()
        sharded.reduce_gradients(model)
    return len(list(model.parameters()))


def test_a_model_with_an_empty_weight_trains(ranks: Ranks) -> None:
    """It ended in a ZeroDivisionError when its turn came to be compared."""
    assert ranks(2).run(steps_with_an_empty_weight) == [13, 13]


# ---- one message a batch ---------------------------------------------------------------------------------------------


def messages() -> list[int]:
    """How many messages leave for the agreement of each batch's model."""
    model = tiny("llama", "ring_fp32").train()
    counts: list[int] = []
    gather = Ring.gather

    def counted(ring: Ring, tensor: torch.Tensor, doing: str = "") -> Any:
        counts[-1] += "its model" in doing
        return gather(ring, tensor, doing)

    Ring.gather = counted  # type: ignore[method-assign, assignment]
    try:
        for turn in range(3):
            counts.append(0)
            sharded = hf_ring_attn.shard(tokens(23, seed=turn))
            with sharded:
                model(**sharded.inputs)
    finally:
        Ring.gather = gather  # type: ignore[method-assign]
    return counts


def test_a_batch_costs_one_message_once_its_model_is_known(ranks: Ranks) -> None:
    for first, *later in ranks(2).run(messages):
        assert first <= 2 and later == [1, 1]


# ---- a loss that is not finite on one rank ---------------------------------------------------------------------------


def odd_loss(value: float) -> tuple[float, list[str]]:
    model, means = tiny("llama", "ring_fp32"), []
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        loss = model(**sharded.inputs).loss.detach()
    texts = told(lambda: means.append(float(sharded.reduce(loss * (value if dist.get_rank() == 1 else 1)))))
    return means[0], texts


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_rank_whose_loss_is_not_finite_is_named(ranks: Ranks, value: float) -> None:
    answers = ranks(2).run(odd_loss, value)
    for _, texts in answers:
        assert [f"the loss is {value} on rank 1, not on rank 0" in text for text in texts] == [True]
    assert all(texts == [] for _, texts in ranks(2).run(odd_loss, 1.0))
