"""Run by test_accelerate.py: what accelerate does with a ring, on two ranks or on dp 2 x cp 2.

Every check starts from a fresh `Accelerator`; the config comes from the environment, as accelerate launch sets it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import get_scheduler

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.integration.context.mesh import ring_enabled, ring_group
from hf_ring_attn.integration.hosts.gather_for_metrics import gather_once_per_ring, gather_sums_per_ring
from hf_ring_attn.integration.hosts.parallelism_config import deferring_cp_checks
from hf_ring_attn.integration.hosts.rings_as_processes import RingsAsProcesses
from hf_ring_attn.integration.hosts.schedulers import ProcessCount
from tests.helpers.jobs.accelerate_batches import CP, Rows, averaged, batch, model, plain
from tests.helpers.jobs.accelerate_epochs import EPOCHS

# ---- checks --------------------------------------------------------------------------------------------------------


def stock_config_waits_for_the_model(accelerator: Any) -> None:
    config, world = accelerator.parallelism_config, accelerator.num_processes
    assert accelerator.distributed_type.name == "MULTI_CPU"
    assert (config.cp_backend, config.cp_size, config.cp_enabled, ring_enabled(config)) == (
        "torch",
        2,
        True,
        False,
    )
    accelerator.prepare(model())
    assert (config.cp_backend, config.cp_handler, config.cp_enabled, ring_enabled(config)) == (
        "ring",
        None,
        False,
        True,
    )
    assert accelerator.distributed_type.name == "MULTI_CPU"
    assert config._sizes["cp"] == 2
    assert config._sizes["dp_replicate"] == world // CP
    assert not hasattr(accelerator, "_cp_context"), "torch's context parallelism was set up too"
    mesh, dp = accelerator.torch_device_mesh, ["dp_replicate"] if world > CP else []
    assert mesh.mesh_dim_names == (*dp, "cp")
    assert config.non_dp_dim_names == config.dp_shard_cp_dim_names == ["cp"]
    assert config.dp_cp_dim_names == [*dp, "cp"]
    for group in (ring_group(), ring_group(accelerator)):
        assert group is not None
        assert group.size() == CP
        assert group.rank() == accelerator.process_index % CP


def a_wrapped_or_peft_model_is_recognised(accelerator: Any) -> None:
    from peft import LoraConfig, get_peft_model

    accelerator.prepare(torch.nn.Sequential(get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj"]))))
    assert ring_enabled(accelerator.parallelism_config)


class Endless(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"input_ids": torch.full((3,), number)} for number in range(64))


def ranks_of_a_ring_get_one_batch(accelerator: Any) -> None:
    before = accelerator.prepare(DataLoader(Endless(), batch_size=2))
    assert accelerator.dataloader_config.dispatch_batches is None
    _, after = accelerator.prepare(model(), DataLoader(Endless(), batch_size=2))
    shuffled = accelerator.prepare(DataLoader(Rows(), batch_size=2, shuffle=True))
    for loader in (before, after, shuffled):
        seen = accelerator.gather(next(iter(loader))["input_ids"][:, 0]).view(-1, CP, 2)
        assert torch.equal(seen[:, 0], seen[:, 1]), "ranks of one ring got other batches"
        assert len(set(seen[:, 0].flatten().tolist())) == seen[:, 0].numel(), "two rings got the same batch"


def _loop(
    accelerator: Any,
    extra: Callable[[Tensor], Any],
    named: bool = True,
    count: Callable[[Tensor], Any] | None = None,
) -> None:
    """accelerate's guide, word for word; ``extra`` are more inputs. Loss and gradients are those of the whole batch."""
    net = model()
    inputs = batch(accelerator)
    inputs |= extra(inputs["input_ids"])
    wholes = {name: value.clone() for name, value in inputs.items()}
    counts = {} if count is None else {"num_items_in_batch": count(inputs["labels"])}
    loss, gradients = plain(wholes | dict.fromkeys(counts, (inputs["labels"] != -100).sum()))
    prepared = accelerator.prepare(net)
    inputs["shift_labels"] = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    memory = inputs["input_ids"].data_ptr()
    with accelerator.maybe_context_parallel(
        buffers=list(inputs.values()), buffer_seq_dims=[1] * len(inputs), no_restore_buffers={inputs["shift_labels"]}
    ):
        assert inputs["input_ids"].shape == (2, 24 // CP)
        out = prepared(**inputs, **counts) if named else prepared(inputs["input_ids"], labels=inputs["labels"])
        assert out.logits.shape[1] == 24 // CP
    accelerator.backward(out.loss)  # after the context, which torch's would not allow
    assert inputs["input_ids"].data_ptr() == memory
    assert inputs["shift_labels"].shape == (2, 24 // CP), "no_restore_buffers stay sharded"
    assert all(torch.equal(inputs[name], whole) for name, whole in wholes.items())
    world = averaged([out.loss.detach().clone(), loss])
    torch.testing.assert_close(world[0], world[1], rtol=1e-6, atol=0)  # transformers' loss is float32
    for mine, whole in zip(net.parameters(), averaged(gradients), strict=True):
        torch.testing.assert_close(mine.grad, whole, rtol=1e-6, atol=1e-9)


def documented_loop_is_exact(accelerator: Any) -> None:
    _loop(accelerator, lambda ids: {})


def documented_loop_with_positional_tokens(accelerator: Any) -> None:
    _loop(accelerator, lambda ids: {}, named=False)


def documented_loop_with_padding(accelerator: Any) -> None:
    def left_and_right(ids: Tensor) -> dict[str, Tensor]:
        mask = torch.ones_like(ids)
        mask[0, :5], mask[1, -3:] = 0, 0
        return {"attention_mask": mask}

    _loop(accelerator, left_and_right)


def documented_loop_with_documents(accelerator: Any) -> None:
    position_ids = torch.cat([torch.arange(7), torch.arange(17)]).expand(2, -1)
    _loop(accelerator, lambda ids: {"position_ids": position_ids})


def _labelled(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def loops_that_count_the_whole_batch(accelerator: Any) -> None:
    _loop(accelerator, lambda ids: {}, count=_labelled)
    _loop(accelerator, lambda ids: {}, count=lambda labels: int(_labelled(labels)))


def loops_that_count_by_rank(accelerator: Any) -> None:
    """torch's context parallelism: each rank's loss is its own sum over what it is given."""
    _loop(accelerator, lambda ids: {}, count=lambda labels: _labelled(labels) / CP)
    _loop(accelerator, lambda ids: {}, count=lambda labels: int(_labelled(labels)) // CP)


def counts_that_are_not_clear_are_refused(accelerator: Any) -> None:
    net, inputs = model().train(), batch(accelerator)
    prepared = accelerator.prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    count = int(_labelled(inputs["labels"]))

    def loss(given: Any) -> Tensor:
        with accelerator.maybe_context_parallel(list(inputs.values()), [1, 1]):
            found: Tensor = prepared(**inputs, num_items_in_batch=given).loss
        return found

    for given in (77, count * CP, 1):
        text = rf"={given} for a batch of {count} labels.* num_items_in_batch out"
        with pytest.raises(errors.UnclearCount, match=text):
            loss(given)
    for given in (count, count):  # one batch a step
        accelerator.backward(loss(given))
        optimizer.step()
        optimizer.zero_grad()
    # A step of two such batches has twice as many labels: over two ranks they are this number, too.
    accelerator.backward(loss(count))
    with pytest.raises(errors.UnclearCount, match="adds up several batches"):
        loss(count)
    optimizer.zero_grad()
    # Under torch's context parallelism the whole count goes with such a loss.
    with pytest.raises(errors.UnclearCount, match=r"multiplied by accelerator\.num_processes"):
        accelerator.backward(loss(count) * accelerator.num_processes)


def schedulers_have_the_rates_of_one_process(accelerator: Any) -> None:
    """Both kinds of programs, as transformers' examples are written: made before `prepare`, with a loader."""
    rings = accelerator.num_processes // CP
    for multiplied in (True, False):
        net, whole = model(), DataLoader(Rows(), batch_size=4 // rings)
        made = torch.optim.SGD(net.parameters(), lr=1.0)
        steps = 16 * accelerator.num_processes if multiplied else len(whole)
        schedule = get_scheduler("linear", made, 0, steps)
        net, optimizer, loader, schedule = accelerator.prepare(net, made, whole, schedule)
        assert len(loader) == 16
        for done, rows in enumerate(loader):
            assert schedule.get_last_lr() == [1 - done / 16]
            accelerator.gather_for_metrics(rows["input_ids"])
            optimizer.step()
            schedule.step()
    assert not ProcessCount.lost, "a host loses a count"


def buffers_that_do_not_fit_are_refused(accelerator: Any) -> None:
    prepared, inputs = accelerator.prepare(model()), batch(accelerator)

    def enter(buffers: list[Tensor], dims: list[int], **rest: Any) -> None:
        with accelerator.maybe_context_parallel(buffers, dims, **rest):
            prepared(**inputs)

    ids = inputs["input_ids"]
    with pytest.raises(errors.UnevenLength, match=r"multiple of 2 \* cp_size = 4, got 22.*24 tokens with labels of"):
        enter([ids[:, :22]], [1])
    with pytest.raises(errors.BadBuffers, match=r"buffer 1 of shape \(2, 20\) with sequence dimension 1, but all.* 24"):
        enter([ids, ids[:, :20]], [1, 1])
    with pytest.raises(errors.BadBuffers, match="0 buffers and 0 sequence dimensions"):
        enter([], [])
    with pytest.raises(errors.BadBuffers, match="no_restore_buffers that are no buffers"):
        enter([ids], [1], no_restore_buffers={torch.ones(1)})
    with pytest.raises(errors.BadBuffers, match="buffer 1 that requires a gradient"):
        enter([ids, torch.ones(2, 24, requires_grad=True)], [1, 1])
    assert ids.shape == (2, 24)
    inside = accelerator.maybe_context_parallel
    text = r"input_ids .* must be one of the buffers itself, not a copy"
    with pytest.raises(errors.BadBuffers, match=text), inside([ids, inputs["labels"]], [1, 1]):
        prepared(input_ids=ids.clone(), labels=inputs["labels"])
    text = r"arguments are not among its buffers.* must be a model that accelerator.prepare returned"
    with pytest.raises(errors.BadBuffers, match=text), inside([ids], [1]):
        model()(ids)
    with pytest.raises(errors.BadBuffers, match=text), inside([ids], [1]):
        prepared(ids.clone())


def buffers_that_stayed_sharded_are_not_taken_for_rows(accelerator: Any) -> None:
    prepared = accelerator.prepare(model())
    ids = batch(accelerator)["input_ids"]
    with accelerator.maybe_context_parallel([ids], [1], no_restore_buffers={ids}):
        prepared(input_ids=ids)
    for given in (ids, ids.detach()):
        with pytest.raises(errors.BadBuffers, match="stayed sharded, after their context, but it must be whole rows"):
            prepared(input_ids=given)
    again = accelerator.maybe_context_parallel([ids], [1])
    with pytest.raises(errors.BadBuffers, match="earlier maybe_context_parallel left sharded"), again:
        pass
    prepared(input_ids=ids.clone())  # a tensor of the program's
    ids.add_(0)
    prepared(input_ids=ids)


def a_shared_view_and_a_tensor_given_twice(accelerator: Any) -> None:
    """Memory that other tensors look at is not written to, and labels that are input_ids are sharded once."""
    prepared = accelerator.prepare(model())
    base = torch.randint(0, 61, (2, 30))
    view, before = base[:, 3:27], base.clone()
    with accelerator.maybe_context_parallel([view, view], [1, -1]):
        assert view.shape == (2, 12)
        assert torch.equal(base, before)
        prepared(input_ids=view, labels=view).loss.backward()
    assert torch.equal(view, before[:, 3:27])
    assert torch.equal(base, before)


def values_are_gathered_once_per_ring(accelerator: Any) -> None:
    samples = 5 if accelerator.num_processes == CP else 7  # the last batch of 3 (a ring) or 2 x 2 is not full
    size = 3 if accelerator.num_processes == CP else 2
    _, loader = accelerator.prepare(model(), DataLoader(TensorDataset(torch.arange(samples)), batch_size=size))
    me = accelerator.process_index
    seen, sums, objects = [], [], []
    for (rows,) in loader:
        data = {"rows": rows, "pair": (rows[:, None].expand(-1, 4) * 1.5, rows > 2)}
        got = accelerator.gather_for_metrics(data)
        assert torch.equal(got["pair"][0], got["rows"][:, None].expand(-1, 4) * 1.5)
        assert torch.equal(got["pair"][1], got["rows"] > 2)
        seen += got["rows"].tolist()
        sums += gather_sums_per_ring(accelerator, rows.float() * (1 + me % CP)).tolist()
        objects += accelerator.gather_for_metrics([str(row.item()) for row in rows], use_gather_object=True)
        scalar = gather_once_per_ring(accelerator, torch.tensor(float(me // CP)))
        assert scalar.tolist() == [float(ring) for ring in range(accelerator.num_processes // CP)]
    assert seen == list(range(samples))
    assert sums == [3.0 * row for row in range(samples)]
    assert objects == [str(row) for row in range(samples)]
    metrics = {"loss": float("nan"), "rows": [1.0, float("nan")]}
    assert len(accelerator.gather_for_metrics([metrics], use_gather_object=True)) == accelerator.num_processes // CP
    with pytest.raises(errors.RanksDiffer, match=r"sharded.gather\(x\) for what each token has"):
        accelerator.gather_for_metrics(torch.full((4,), float(me)))
    with pytest.raises(errors.RanksDiffer, match="the ranks of one ring must hold the same values"):
        accelerator.gather_for_metrics([f"rank {me}"])


def reductions_over_rings_are_those_over_processes(accelerator: Any) -> None:
    """As `Accelerator.reduce` of one process for each ring: nested tensors, and a scale that only XLA applies."""
    rings = RingsAsProcesses(accelerator)
    number, each = rings.num_processes, torch.tensor([1.0, -2.0]) * (1 + rings.process_index)
    everyone = torch.stack([torch.tensor([1.0, -2.0]) * (1 + ring) for ring in range(number)])
    for reduction, wanted in {"sum": everyone.sum(0), "mean": everyone.mean(0), "max": everyone.amax(0)}.items():
        got = rings.reduce({"a": each, "b": [(each.sum(),)]}, reduction, scale=0.5)
        assert torch.equal(got["a"], wanted)
        assert got["b"][0][0].shape == ()
    assert rings.reduce(torch.tensor([1], dtype=torch.int32)).dtype == torch.int32
    assert rings.gather({"a": each})["a"].tolist() == everyone.flatten().tolist()
    with pytest.raises(errors.UnsupportedArgument, match=r"got reduction='none': in a ring it may be sum, mean, max"):
        rings.reduce(each, "none")


def another_model_gets_accelerates_refusals(accelerator: Any) -> None:
    context = accelerator.maybe_context_parallel([torch.ones(2, 8)], [1])
    with pytest.raises(errors.ModelNotPrepared, match=r"Call accelerator.prepare\(model, ...\) first"), context:
        pass
    with pytest.raises(errors.TorchContextParallelRefused) as refusal:
        accelerator.prepare(model("sdpa"))
    text = str(refusal.value)
    assert "LlamaForCausalLM has attn_implementation=sdpa" in text
    assert "not compatible with distributed_type MULTI_CPU" in text
    assert ("needs dp_shard_size > 1" in text) == (accelerator.num_processes > CP)
    with pytest.raises(errors.TorchContextParallelRefused):
        accelerator.prepare_model(model("sdpa"))
    with pytest.raises(errors.TorchContextParallelRefused, match="no attention of transformers"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    assert accelerator.parallelism_config.cp_backend == "torch"


def a_ring_refuses_another_model(accelerator: Any) -> None:
    accelerator.prepare(model())
    accelerator.prepare(torch.nn.Linear(2, 2))  # no attention, so nothing to be wrong
    with pytest.raises(errors.ModelIsNoRing, match=r"cp_size=2 .*LlamaForCausalLM has .*=sdpa: each rank"):
        accelerator.prepare(model("sdpa"))


def dispatched_batches_are_refused(accelerator: Any) -> None:
    accelerator.dataloader_config.dispatch_batches = True
    loader = DataLoader(Endless(), batch_size=2)
    accelerator.prepare(loader)
    with pytest.raises(errors.DispatchedBatches, match="a DataLoader was prepared with dispatch_batches=True"):
        accelerator.prepare(model())
    accelerator._dataloaders.clear()
    with pytest.raises(errors.DispatchedBatches, match=r"DataLoaderConfiguration\(dispatch_batches=False\)"):
        accelerator.prepare(model(), loader)


def the_model_is_known_at_construction() -> None:
    """What a Trainer does: its model comes first."""
    with deferring_cp_checks(model()):
        assert ring_enabled(Accelerator().parallelism_config)
    AcceleratorState._reset_state()
    stock = errors.TorchContextParallelRefused if torch.distributed.get_world_size() > CP else ValueError
    with deferring_cp_checks(model("sdpa")), pytest.raises(stock):
        Accelerator()
    AcceleratorState._reset_state()


def sizes_that_do_not_multiply_out() -> None:
    world = torch.distributed.get_world_size()
    text = rf"dp_replicate 3 x dp_shard 1 x cp 2 x sp 1 x tp 1 needs 6 processes, got {world}\. Start 6 processes"
    for backend in ("torch", "ring"):
        with pytest.raises(errors.MeshMismatch, match=text):
            Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=3, cp_size=2, cp_backend=backend))
        AcceleratorState._reset_state()


def after_uninstalling_accelerate_is_itself() -> None:
    hf_ring_attn.uninstall()
    with pytest.raises(ValueError, match=r"pure data parallelism|MULTI_CPU"):
        Accelerator()


CHECKS: tuple[Callable[[Any], None], ...] = (
    stock_config_waits_for_the_model, a_wrapped_or_peft_model_is_recognised, ranks_of_a_ring_get_one_batch,
    documented_loop_is_exact, documented_loop_with_positional_tokens, documented_loop_with_padding,
    documented_loop_with_documents, loops_that_count_the_whole_batch, loops_that_count_by_rank,
    counts_that_are_not_clear_are_refused, schedulers_have_the_rates_of_one_process,
    buffers_that_do_not_fit_are_refused, buffers_that_stayed_sharded_are_not_taken_for_rows,
    a_shared_view_and_a_tensor_given_twice,
    *EPOCHS, values_are_gathered_once_per_ring, reductions_over_rings_are_those_over_processes,
    another_model_gets_accelerates_refusals, a_ring_refuses_another_model, dispatched_batches_are_refused,
)  # fmt: skip
LAST_CHECKS = (
    the_model_is_known_at_construction, sizes_that_do_not_multiply_out, after_uninstalling_accelerate_is_itself,
)  # fmt: skip


def main() -> None:
    Accelerator()
    for check in CHECKS:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        check(Accelerator(dataloader_config=DataLoaderConfiguration()))
    for last in LAST_CHECKS:
        AcceleratorState._reset_state()
        last()
    sys.stdout.write("passed all\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
