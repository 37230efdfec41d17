"""Checkpoints in host memory, and the switches of transformers and accelerate for checkpointing, change no answer."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.integration.memory import checkpointing
from hf_ring_attn.layers import host_memory
from tests.helpers.contexts import alone
from tests.helpers.hosts import CHECKPOINTS_SOME_LAYERS, checkpoint
from tests.helpers.jobs import activation_jobs as jobs
from tests.helpers.jobs.activation_jobs import LORA, Step
from tests.helpers.jobs.chunked_jobs import sharded
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, in_rings, without_ring
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.models.tiny_models import tiny
from tests.integration.memory.test_mlp_chunks import assert_equal

FOUR = {"num_hidden_layers": 4}
INPUT = 2 * 23 * 32 * 8
"""Bytes of a layer's input in one process, and of its attention's output."""
SAVED = INPUT + 2 * 23 * 4 * 8
"""Bytes of a layer's saved attention, with its log-sum-exp."""


def stock(reentrant: bool = False, **more: Any) -> dict[str, Any]:
    return {"use_reentrant": reentrant, **more}


def offloading(gib: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"offload_above": gib, **more}


needs_newer_checkpoints = pytest.mark.skipif(not CHECKPOINTS_SOME_LAYERS, reason="needs every_n_layers and offload")


# Of four layers: tensors that are offloaded, and those of them that are prefetched.
STEPS = [
    (Step(why="all", ring=offloading(), checkpointing=stock()), (4, 3)),
    (Step(why="a budget of one layer", ring=offloading(INPUT / 2**30), checkpointing=stock()), (3, 2)),
    (Step(why="a budget of all", ring=offloading(1.0), checkpointing=stock()), (0, 0)),
    (Step(why="reentrant", ring=offloading(), checkpointing=stock(True)), (4, 3)),
    (Step(why="every second layer", ring=offloading(), checkpointing=stock(every_n_layers=2)), (2, 1)),
    (Step(why="every second layer, a budget", ring=offloading(INPUT / 2**30), checkpointing=stock(every_n_layers=2)),
     (1, 0)),
    (Step(why="transformers' offload", ring={}, checkpointing=stock(offload=True)), (4, 3)),
    (Step(why="transformers' offload, a budget", ring=offloading(INPUT / 2**30), checkpointing=stock(offload=True)),
     (3, 2)),
    (Step(why="transformers' offload, every second", ring={}, checkpointing=stock(every_n_layers=2, offload=True)),
     (2, 1)),
    (Step(why="with saved attention", ring=offloading(save_attention=True), checkpointing=stock()), (12, 9)),
    (Step(why="with saved attention, a budget of a layer's input", ring=offloading(INPUT / 2**30, save_attention=True),
          checkpointing=stock()), (12, 9)),
    (Step(why="with saved attention, a budget of two layers", checkpointing=stock(),
          ring=offloading(2 * (INPUT + SAVED) / 2**30, save_attention=True)), (6, 3)),
    (Step(why="transformers' offload, saved attention", ring={"save_attention": True},
          checkpointing=stock(offload=True)), (12, 9)),
    (Step(why="with MLPs in chunks", ring=offloading(mlp_tokens=3, save_attention=True), checkpointing=stock(),
          lora=LORA), (12, 9)),
    (Step(why="FSDP's checkpoints", ring={"save_attention": True, "mlp_tokens": 3}, fsdp="checkpoint"), (0, 0)),
    (Step(why="FSDP's checkpoints, our offload", ring=offloading(), fsdp="checkpoint"), (4, 3)),
    (Step(why="FSDP's offload", ring={}, fsdp="offload"), (4, 3)),
    (Step(why="FSDP's offload, a budget", ring=offloading(INPUT / 2**30), fsdp="offload"), (3, 2)),
    (Step(why="all that is saved moves", ring={}, moved=True), (0, 0)),
    (Step(why="all that is saved moves, chunks", ring={"mlp_tokens": 3}, moved=True, lora=LORA), (0, 0)),
    (Step(why="all that is saved moves, checkpoints", ring={"save_attention": True}, moved=True, checkpointing=stock()),
     (0, 0)),
]  # fmt: skip
STEPS = [
    (step, count) for step, count in STEPS if CHECKPOINTS_SOME_LAYERS or {*(step.checkpointing or ())} <= {*stock()}
]
SHARDED = [
    Step(why="FSDP2", ring=offloading(mlp_tokens=3), checkpointing=stock(), wrap="tail"),
    Step(why="FSDP2, LoRA, saved", ring=offloading(save_attention=True), checkpointing=stock(), wrap="tail", lora=LORA),
    Step(why="FSDP2 and its offload", ring={"mlp_tokens": 3}, fsdp="offload", wrap="tail"),
    Step(why="DDP", ring=offloading(), checkpointing=stock(), wrap="DDP"),
]


def with_four_layers(step: Step) -> Step:
    return Step(**{**vars(step), "config": FOUR})


@pytest.mark.turns
@pytest.mark.parametrize(("step", "offloaded"), STEPS, ids=lambda x: x.why if isinstance(x, Step) else "")
def test_a_step_is_that_without_checkpoints(step: Step, offloaded: tuple[int, int]) -> None:
    got, want = jobs.both(with_four_layers(step))
    assert_equal(got, want, step.exact)
    assert (got.offloaded, want.offloaded) == (offloaded, (0, 0))


@pytest.mark.parametrize("step", [*(step for step, _ in STEPS), *SHARDED], ids=lambda step: step.why)
@pytest.mark.turns
def test_a_step_in_a_ring_is_that_without_checkpoints(ranks: Ranks, step: Step) -> None:
    for got, want in ranks(2).run(jobs.both, with_four_layers(step)):
        assert_equal(got, want, step.exact)


def test_inputs_of_layers_are_freed_and_their_buffers_used_again() -> None:
    """Of four layers three inputs are on the host after the forward; a second step makes no more buffers."""
    alive, buffers = jobs.inputs_alive(offloading(INPUT / 2**30))
    assert alive == [False, False, False, True]
    assert jobs.inputs_alive({})[0] == [True] * 4
    assert buffers[0] == buffers[1] >= 3


def as_it_is(_model: Any) -> None: ...


def under_fsdp2(model: Any) -> None:
    """As accelerate does, whose FSDP2 has a hook on the embeddings' output. In one process as it is."""
    if dist.is_initialized():
        fully_shard(model.get_input_embeddings(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        sharded(model, "by itself")


def trained(model: Any) -> None:
    model.get_input_embeddings().weight.requires_grad_(True)


def watched(model: Any) -> None:
    model.get_input_embeddings().register_full_backward_hook(lambda *_: None)


def read(model: Any) -> None:
    model.get_input_embeddings().register_forward_hook(lambda *_: None)


EMBEDDINGS = {
    "frozen": (as_it_is, False, {"offload_above": 0.0}, False),
    "under FSDP2": (under_fsdp2, False, {"offload_above": 0.0}, False),
    "under FSDP2, not offloaded": (under_fsdp2, False, {}, True),
    "reentrant": (as_it_is, True, {"offload_above": 0.0}, True),
    "a hook on their gradient": (watched, False, {"offload_above": 0.0}, True),
    "a hook on them": (read, False, {"offload_above": 0.0}, True),
    "not offloaded": (as_it_is, False, {}, True),
    "trained": (trained, False, {"offload_above": 0.0}, False),
}


def embeddings(why: str) -> tuple[bool, Any, Any]:
    prepare, reentrant, ring, _ = EMBEDDINGS[why]
    return jobs.embeddings_of_a_step(prepare, reentrant, **ring)


@pytest.mark.parametrize("why", EMBEDDINGS)
def test_embeddings_of_a_row_on_the_host_are_freed(ranks: Ranks, why: str) -> None:
    """PEFT makes them a leaf that requires a gradient, which the graph keeps: a layer's input on the GPU."""
    prepare, *_, stays = EMBEDDINGS[why]
    _, loss, gradients = jobs.embeddings_of_a_step(prepare)
    assert any(bool(x.any()) for x in gradients.values())
    for alive, got, found in ranks(2).run(embeddings, why):
        assert alive == stays
        torch.testing.assert_close(got, loss, rtol=1e-6, atol=0)
        assert found.keys() == gradients.keys()
        for name, want in gradients.items():
            torch.testing.assert_close(found[name], want, rtol=1e-6, atol=1e-8)


def test_embeddings_that_a_program_makes_have_their_gradient() -> None:
    """As in adversarial training: called by the program, in the ring."""
    gradients = [jobs.gradient_of_embeddings(**ring) for ring in ({}, {"offload_above": 0.0})]
    assert bool(gradients[0].any())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("gib", [0.0, 2 * (INPUT + SAVED) / 2 / 2**30])
def test_host_memory_changes_no_bit(ranks: Ranks, gib: float) -> None:
    assert all(ranks(2).run(jobs.bits, {"save_attention": True}, {"offload_above": gib}))


def test_all_that_saves_memory_together_leaves_the_losses_of_the_first_steps(ranks: Ranks) -> None:
    """In float32, beside the ring with none of it; only the order of sums over chunks differs."""
    everything = {"mlp_tokens": 30, "save_attention": True, "offload_above": 1e-4, "loss": "chunked"}
    got = ranks(2).run(jobs.losses, jobs.CHECKPOINTED, **everything)
    want = ranks(2).run(jobs.losses, None, loss="sharded")
    for mine, plain in zip(got, want, strict=True):
        assert mine == pytest.approx(plain, rel=1e-6)
        assert plain[2] < plain[0] * (1 - 1e-3), "it learns"


@pytest.mark.parametrize("staying", [0, 2])
def test_checkpoints_and_saved_attention_have_one_budget(staying: int) -> None:
    """After a forward the attention that left last is held, too; a backward holds a layer, and one on its way."""
    layers, budget = 8, staying * (INPUT + SAVED) / 2**30
    held, peak = jobs.bytes_of_a_step(layers, save_attention=True)
    less, lower = jobs.bytes_of_a_step(layers, save_attention=True, offload_above=budget)
    leaving = 0 if staying else SAVED
    assert held - less == pytest.approx((layers - staying) * (INPUT + SAVED) - leaving, abs=INPUT / 2)
    assert peak - lower >= (layers - max(staying, 2)) * (INPUT + SAVED) - INPUT / 2


def test_a_rank_without_host_memory_ends_all_ranks_at_once(ranks: Ranks) -> None:
    """In the first batch, after its first layer: buffers of all layers are made then."""
    full, other = ranks(2).run(jobs.without_room, 0, True)
    assert re.match(r"HostMemoryFull: offload_above needs 3.0 GiB more .* 1.0 GiB are free", full[0])
    assert re.match(
        r"RefusedElsewhere: this rank stops .*\n  rank 0: HostMemoryFull: offload_above needs 3.0", other[0]
    )
    assert full[1:] == other[1:] == ["", ""], "memory was given: the ring goes on"


def test_any_error_of_a_rank_that_reserves_ends_all_ranks(ranks: Ranks) -> None:
    """Only HostMemoryFull reached the other ranks; for another error they waited until the time-out."""
    failed, other = ranks(2).run(jobs.failing_to_reserve, 0)
    assert failed == ["", "RuntimeError: by hand", ""]
    assert other[::2] == ["", ""] and "RefusedElsewhere: " in other[1] and "rank 0: RuntimeError: by hand" in other[1]


def test_host_memory_that_runs_out_in_a_forward_ends_all_ranks_at_the_next(ranks: Ranks) -> None:
    full, other = ranks(2).run(jobs.without_room, 0, False)
    assert [text[:14] for text in full] == ["", "HostMemoryFull", ""]
    assert [text[:16] for text in other] == ["", "RefusedElsewhere", ""]
    assert "rank 0: HostMemoryFull: offload_above needs 3.0 GiB more" in other[1]


def test_a_state_dict_takes_the_place_of_idle_buffers_where_memory_is_short() -> None:
    """A checkpoint of all weights could not be gathered in host memory that the last step's buffers filled."""
    model: Any = tiny("llama", "ring_fp32").train()
    checkpoint(model, **stock())
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(offload_above=0, self_check=False))
    with batch:
        model(**batch.inputs).loss.backward()
    buffers = host_memory.host_memory(torch.device("cpu")).buffers
    assert buffers.idle
    model.state_dict()
    assert buffers.idle, "there is room for both"
    with mock.patch.object(host_memory, "free_bytes", return_value=1 << 30):
        model.state_dict()
    assert not buffers.idle
    hf_ring_attn.uninstall()
    hf_ring_attn.install()
    assert not model._state_dict_pre_hooks, "uninstall leaves nothing on a module"


def test_a_layer_that_changes_its_input_is_refused() -> None:
    model: Any = tiny("llama", "ring_fp32").train()
    checkpoint(model, **stock())
    model.model.layers[0].input_layernorm.register_forward_hook(lambda _module, args, _output: args[0].add_(1.0))
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(offload_above=0, self_check=False))
    with pytest.raises(errors.ChangedInPlace), batch:
        model(**batch.inputs).loss.backward()


def test_a_compiled_model_is_refused() -> None:
    model: Any = tiny("llama", "ring_fp32").train()
    checkpoint(model, **stock())
    model.model.layers[0].compile(backend="eager")
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(offload_above=0, self_check=False))
    with pytest.raises(errors.UnsupportedModel, match="offload_above moves checkpoints from Python"), batch:
        model(**batch.inputs)


def test_without_checkpoints_it_is_told_that_nothing_is_offloaded() -> None:
    model = tiny("llama", "ring_fp32").train()
    with mock.patch.object(checkpointing, "warn") as warn:
        checkpointing.prepare(model, alone(RingConfig(offload_above=1)))
    assert "offload_above has no effect: nothing checkpoints a layer" in warn.call_args.args[0]


@needs_newer_checkpoints
def test_outside_a_ring_hosts_offload_by_themselves() -> None:
    model: Any = tiny("llama", "ring_fp32").train()
    checkpoint(model, **stock(offload=True))
    jobs.run(model)
    memory = host_memory.host_memory(torch.device("cpu"))
    before = memory.stored
    with mock.patch("transformers.modeling_utils.save_on_cpu", return_value=nullcontext()) as copying:
        model(**tokens(23)).loss.backward()
        assert (copying.call_count, memory.stored) == (2, before)
        jobs.run(model)
    assert (copying.call_count, memory.stored) == (2, before + 2)


OPTIONS = RingConfig(mlp_tokens=5, save_attention=True, offload_above=0)
TRAINERS = [
    Run(why="every second layer, offloaded", ring=OPTIONS, rows=Rows(labelled="answers"),
        arguments={"every_n_layers": 2, "offload": True, "use_reentrant": False}),
    Run(why="LoRA", ring=OPTIONS, lora=True, arguments={"use_reentrant": False}),
]  # fmt: skip


@needs_newer_checkpoints
@pytest.mark.parametrize("run", TRAINERS, ids=lambda run: run.why)
def test_trainer_with_all_of_them_trains_as_one_process_with_none(ranks: Ranks, run: Run) -> None:
    checkpointed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": run.arguments}
    got = in_rings(ranks, replace(run, arguments=checkpointed), Mesh(cp=2))
    want = without_ring(ranks, replace(run, arguments={}), Mesh(cp=2))
    for outcome in got:
        assert_equal_runs(outcome, want)


@pytest.mark.parametrize("value", [-1, "1", float("nan"), True])
def test_the_budget_is_a_number(value: Any) -> None:
    with pytest.raises(errors.BadOption, match=r"offload_above=.*a number of GiB, at least 0, or None"):
        RingConfig(offload_above=value)
