"""save_attention="auto" in programs beyond one batch, one backward, one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.attention.op import attentions
from hf_ring_attn.integration import log
from hf_ring_attn.integration.memory import auto_saving
from hf_ring_attn.integration.memory.auto_saving import DeviceMemory
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny
from tests.integration.memory.test_auto_saving import GIB, PLENTY, fits

OPTIONS = RingConfig(self_check=False)


def checkpointed() -> Any:
    model: Any = tiny("llama", "ring_fp32").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hf_ring_attn.configure(model, OPTIONS)
    return model


def loss_of(model: Any, length: int = 24) -> torch.Tensor:
    """The loss of a batch of two rows."""
    with (sharded := hf_ring_attn.shard(tokens(length), model=model)):
        loss: torch.Tensor = model(**sharded.inputs).loss
    return loss


def layers_again(loss: torch.Tensor) -> int:
    """How many layers attend again in the backward."""
    before = attentions()
    loss.backward()
    return attentions() - before


@contextmanager
def stepping(memory: DeviceMemory, *models: Any, later: DeviceMemory | None = None) -> Iterator[Callable[[], None]]:
    """A function that steps the models' optimizer, on a device with these counters, and others after the first step."""
    optimizer = torch.optim.SGD([x for model in models for x in model.parameters()], lr=0.0)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        counters.return_value = later or memory

    with mock.patch.object(auto_saving, "device_memory", return_value=memory) as counters:
        yield step


def two_batches(memory: DeviceMemory, at_once: bool) -> list[int]:
    """Layers that attend again in each step: of two batches, whose graphs live at once, or one after the other."""
    model, found = checkpointed(), []
    with stepping(memory, model) as step:
        for _ in range(2):
            if at_once:
                found.append(layers_again(loss_of(model) + loss_of(model, 20)))
            else:
                found.append(layers_again(loss_of(model)) + layers_again(loss_of(model, 20)))
            step()
    return found


@pytest.mark.parametrize(("at_once", "room", "second"), [(True, 12, 4), (True, 30, 0), (False, 12, 0)])
def test_results_of_batches_that_live_at_once_must_fit_together(
    ranks: Ranks, at_once: bool, room: int, second: int
) -> None:
    assert ranks(2).run(two_batches, fits(room), at_once) == [[4, second]] * 2


def offloaded_at_once(host: int) -> list[int]:
    """Layers that attend again in steps of two batches at once, whose checkpoints wait in host memory."""
    model, found = checkpointed(), []
    hf_ring_attn.configure(model, replace(OPTIONS, offload_above=0.0))
    with (
        stepping(PLENTY, model) as step,
        mock.patch.object(auto_saving, "free_bytes", return_value=host),
        mock.patch.object(auto_saving, "ranks_of_machine", return_value=2),
    ):
        for _ in range(2):
            found.append(layers_again(loss_of(model) + loss_of(model, 20)))
            step()
    return found


@pytest.mark.parametrize(("part", "second"), [(0.9, 4), (1.3, 0)])
def test_results_of_batches_that_live_at_once_must_fit_the_host_together(
    ranks: Ranks, part: float, second: int
) -> None:
    """Of rows with 12 and 10 tokens on a rank, each as if all had its share. Two ranks share half of the memory."""
    results = fits(0).peak - fits(12 + 10).peak
    assert ranks(2).run(offloaded_at_once, int(4 * part * results)) == [[4, second]] * 2


def two_models(memory: DeviceMemory) -> list[int]:
    models, found = (checkpointed(), checkpointed()), []
    with stepping(memory, *models) as step:
        for _ in range(2):
            found.append(layers_again(loss_of(models[0]) + loss_of(models[1])))
            step()
    return found


@pytest.mark.parametrize(("room", "second"), [(12, 4), (24, 0)])
def test_results_of_two_models_must_fit_together(ranks: Ranks, room: int, second: int) -> None:
    assert ranks(2).run(two_models, fits(room)) == [[4, second]] * 2


def with_teacher() -> list[int]:
    """Layers that attend again; from the second step on a teacher is called between two calls of the model."""
    model, teacher, found = checkpointed(), checkpointed().eval(), []
    with stepping(PLENTY, model) as step:
        for teaches in (False, True):
            with (sharded := hf_ring_attn.shard(tokens(24), model=model)):
                loss = model(**sharded.inputs).loss
                if teaches:
                    with torch.no_grad():
                        teacher(**sharded.inputs)
                loss = loss + model(**sharded.inputs).loss
            found.append(layers_again(loss))
            step()
    return found


def test_a_teacher_in_the_batch_does_not_change_its_decision(ranks: Ranks) -> None:
    assert ranks(2).run(with_teacher) == [[4, 0]] * 2


def reset_after_steps(peak: int, lost: int) -> list[int]:
    """Layers that attend again, where the program resets the counters after each step."""
    model, found = checkpointed(), []
    with stepping(PLENTY._replace(peak=peak * GIB, lost=lost * GIB), model, later=PLENTY) as step:
        for _ in range(2):
            found.append(layers_again(loss_of(model)))
            step()
    return found


@pytest.mark.parametrize(("peak", "lost", "second"), [(65, 0, 0), (73, 0, 2), (65, 16, 2)])
def test_counters_are_read_before_the_program_resets_them(ranks: Ranks, peak: int, lost: int, second: int) -> None:
    assert ranks(2).run(reset_after_steps, peak, lost) == [[2, second]] * 2


def lost_between_tensors(peak: int, lost: int) -> list[str]:
    """Warnings of a run on 80 GiB, of which torch's allocator lost some."""
    model = checkpointed()
    with (
        stepping(PLENTY._replace(peak=peak * GIB, lost=lost * GIB), model) as step,
        mock.patch.object(log.logger, "warning") as warning,
    ):
        for _ in range(2):
            layers_again(loss_of(model))
            step()
    return [call.args[0] for call in warning.call_args_list if "auto" in call.args[0]]


@pytest.mark.parametrize(("peak", "lost", "lines"), [(35, 44, 0), (35, 46, 1), (73, 46, 0)])
def test_what_the_allocator_loses_is_told_if_it_decides(ranks: Ranks, peak: int, lost: int, lines: int) -> None:
    """At 35 GiB results would fit, but for 46 GiB that are lost; at 73 GiB they would not fit anyhow."""
    first, *others = ranks(2).run(lost_between_tensors, peak, lost)
    assert len(first) == lines and others == [[]]
    assert all("allocator lost up to 46.0 GiB between its tensors" in line for line in first)


def skipped(before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    """Layers that attend again in rows before and after one of 48 tokens without a backward."""
    model, found = checkpointed(), list[int]()
    with stepping(PLENTY, model) as step:
        for length in (*before, 0, *after):
            if length:
                found.append(layers_again(loss_of(model, length)))
                step()
            else:
                loss_of(model, 48)
    return found


def test_a_batch_without_a_backward_shows_nothing(ranks: Ranks) -> None:
    """Its backward would have taken more memory."""
    assert ranks(2).run(skipped, (), (24, 24, 48, 48)) == [[2, 0, 2, 0]] * 2
    assert ranks(2).run(skipped, (24, 24), (16, 24, 48, 48)) == [[2, 0, 0, 0, 2, 0]] * 2


def other_options() -> list[int]:
    """Layers that attend again: with options that take more memory from the third step on, and the first ones again."""
    model, found = checkpointed(), []
    with stepping(PLENTY, model) as step:
        for loss in ("chunked", "chunked", "sharded", "sharded", "chunked"):
            hf_ring_attn.configure(model, replace(OPTIONS, loss=loss))
            found.append(layers_again(loss_of(model)))
            step()
    return found


def test_other_options_are_measured_anew(ranks: Ranks) -> None:
    assert ranks(2).run(other_options) == [[2, 0, 2, 0, 0]] * 2


def test_an_allocator_from_outside_torch_has_no_counters() -> None:
    with mock.patch.object(torch.cuda, "get_allocator_backend", return_value="pluggable"):
        assert auto_saving.device_memory(torch.device("cuda")) is None


def a_program_that_takes_memory(taken: int) -> list[int]:
    """Layers that attend again in each step; after the second one the program takes GiB that it keeps."""
    model, found, memory = checkpointed(), [], PLENTY
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(5):
        if number == 2:
            memory = grown(memory, taken)
        with mock.patch.object(auto_saving, "device_memory", return_value=memory):
            found.append(layers_again(loss_of(model)))
            optimizer.step()
            optimizer.zero_grad()
    return found


def retried(after: int) -> tuple[list[int], list[str]]:
    """Layers that attend again in each step, and the warnings. After so many steps the allocator has run out."""
    model, found = checkpointed(), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    log._said.clear()
    with mock.patch.object(log.logger, "warning") as warning:
        for number in range(5):
            memory = PLENTY._replace(retries=3 * (number >= after))
            with mock.patch.object(auto_saving, "device_memory", return_value=memory):
                found.append(layers_again(loss_of(model)))
                optimizer.step()
                optimizer.zero_grad()
    return found, [call.args[0] for call in warning.call_args_list if "auto" in call.args[0]]


@pytest.mark.parametrize(("after", "again"), [(1, [0, 0, 0]), (2, [0, 0, 0]), (3, [0, 2, 2]), (4, [0, 0, 2])])
def test_nothing_is_saved_after_the_allocator_ran_out(ranks: Ranks, after: int, again: list[int]) -> None:
    """The first batch that saves finds a cache of other sizes, and may run out."""
    first, second = ranks(2).run(retried, after)
    assert first[0] == second[0] == [2, 0, *again]
    assert [len(first[1]), len(second[1])] == [after > 2, 0]


def grown(memory: DeviceMemory, taken: int) -> DeviceMemory:
    return memory._replace(allocated=memory.allocated + taken * GIB, peak=memory.peak + taken * GIB)


@pytest.mark.parametrize(("taken", "again"), [(3, [0, 0, 0]), (5, [2, 0, 0]), (60, [2, 2, 2])])
def test_memory_that_a_program_takes_later_is_measured(ranks: Ranks, taken: int, again: list[int]) -> None:
    assert ranks(2).run(a_program_that_takes_memory, taken) == [[2, 0, *again]] * 2
