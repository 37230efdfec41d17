"""save_attention="auto": attention is saved once a step has shown that its results fit, on every rank of a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.attention.op import attentions
from hf_ring_attn.integration import log
from hf_ring_attn.integration.memory import auto_saving
from hf_ring_attn.integration.memory.auto_saving import DeviceMemory
from hf_ring_attn.layers.host_memory import host_memory
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny

GIB = 2**30
PLENTY = DeviceMemory(usable=80 * GIB, allocated=GIB, peak=20 * GIB, lost=0, retries=0)


class Run(NamedTuple):
    """Steps of a run: of each whether it saved, its loss and gradients, and the tensors for each layer that went to the
    host; and the lines that were logged."""

    saved: list[bool]
    bits: list[list[torch.Tensor]]
    lines: list[str]
    away: list[float]


def run(
    lengths: Sequence[int], save: Any = "auto", memory: Callable[[int], DeviceMemory | None] = lambda _rank: PLENTY,
    host: Sequence[int | None] = (100 * GIB, 100 * GIB), steps_every: int = 1,
    prepare: Callable[[Any], Any] = lambda model: model, **options: Any,
) -> Run:  # fmt: skip
    """Trains on rows of these lengths.

    Args:
        memory: the counters of a rank. host: bytes of host memory that are free for each rank.
        steps_every: batches of an optimizer's step. prepare: changes the model.
    """
    model: Any = tiny("llama", "ring_fp32").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = prepare(model)
    hf_ring_attn.configure(model, RingConfig(save_attention=save, self_check=False, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = Run([], [], [], [])

    def counters(_device: torch.device) -> DeviceMemory | None:
        return memory(torch.distributed.get_rank())

    with (
        mock.patch.object(auto_saving, "device_memory", counters),
        mock.patch.object(auto_saving, "free_bytes", return_value=host[torch.distributed.get_rank()]),
        mock.patch.object(log.logger, "info", found.lines.append),
    ):
        log._said.clear()
        for place, length in enumerate(lengths, start=1):
            before, stored = attentions(), host_memory(torch.device("cpu")).stored
            with (sharded := hf_ring_attn.shard(tokens(length, seed=place), model=model)):
                loss = model(**sharded.inputs).loss
            loss.backward()
            sharded.reduce_gradients(model)
            found.bits.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
            found.saved.append({1: True, 2: False}[(attentions() - before) / model.config.num_hidden_layers])
            found.away.append((host_memory(torch.device("cpu")).stored - stored) / model.config.num_hidden_layers)
            if place % steps_every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return found


def fits(tokens: int) -> DeviceMemory:
    """Counters that leave room for the results of so many tokens on a rank."""
    config: Any = tiny("llama", "ring_fp32").config
    per_token = config.num_hidden_layers * config.num_attention_heads * (config.head_dim + 1) * 4  # in float32
    return PLENTY._replace(peak=72 * GIB - 2 * tokens * per_token)  # of two rows


def saved(ranks: Ranks, *args: Any, **kwargs: Any) -> list[list[bool]]:
    return [one.saved for one in ranks(2).run(run, *args, **kwargs)]


def test_it_saves_from_the_second_step_on_with_the_same_bits(ranks: Ranks) -> None:
    never, always = ranks(2).run(run, [24] * 3, save=False), ranks(2).run(run, [24] * 3, save=True)
    for one, without, every in zip(ranks(2).run(run, [24] * 3), never, always, strict=True):
        assert (one.saved, without.saved, every.saved) == ([False, True, True], [False] * 3, [True] * 3)
        for got, want in zip(one.bits, without.bits, strict=True):
            assert all(map(torch.equal, got, want))


def test_the_line_at_start_comes_again_when_it_saves(ranks: Ranks) -> None:
    lines = [line for line in ranks(2).run(run, [24] * 4)[0].lines if line.startswith("ring of 2")]
    assert ["attention saved" in line for line in lines] == [False, True]


def test_a_rank_without_the_memory_decides_for_all(ranks: Ranks) -> None:
    full = PLENTY._replace(peak=72 * GIB)  # a tenth stays free
    assert saved(ranks, [24] * 3, memory=Full(1, full)) == [[False] * 3] * 2


class Full(NamedTuple):
    """The counters of one rank, which travel to it; the others have plenty."""

    rank: int
    memory: DeviceMemory | None

    def __call__(self, rank: int) -> DeviceMemory | None:
        return self.memory if rank == self.rank else PLENTY


def test_without_counters_it_never_saves(ranks: Ranks) -> None:
    assert saved(ranks, [24] * 3, memory=Full(0, None)) == [[False] * 3] * 2


def test_a_longer_row_is_measured_first(ranks: Ranks) -> None:
    lengths = [24, 16, 32, 24, 32, 40]
    assert saved(ranks, lengths) == [[False, True, False, True, True, False]] * 2


def test_half_of_the_memory_is_enough_for_rows_of_half_the_length(ranks: Ranks) -> None:
    memory = Full(1, fits(6))  # a row of 24 has 12 tokens on a rank
    assert saved(ranks, [24, 24, 16, 12, 8], memory=memory) == [[False, False, False, True, True]] * 2


def test_it_waits_for_the_states_of_an_optimizer(ranks: Ranks) -> None:
    assert saved(ranks, [24] * 5, steps_every=3) == [[False] * 3 + [True] * 2] * 2


@pytest.mark.parametrize(("lost", "saves"), [(0, True), (8, True), (9, False)])
def test_memory_lost_between_tensors_grows_with_what_is_held(lost: int, saves: bool) -> None:
    """Of 80 GiB the results need 20 beside 48: 8 that were lost would become 11.3, and 9 would become 12.75."""
    room, memory = auto_saving._Room(), PLENTY._replace(peak=48 * GIB, lost=lost * GIB)
    room.tried = 10
    room.measurement = auto_saving._Measurement(
        torch.device("cpu"), GIB, GIB, tokens=10, per_token=2 * GIB, calls=1, peak=memory.peak, lost=memory.lost,
        stepped=True,
    )  # fmt: skip
    room.at_batch(memory, None)
    assert (room.tokens == 10) is saves


class _Growing:
    """Counters between which a step allocated something that stays."""

    def __init__(self, states: int) -> None:
        self.states, self.calls = states, 0

    def __call__(self, _rank: int) -> DeviceMemory:
        self.calls += 1
        return PLENTY._replace(peak=40 * GIB, allocated=GIB if self.calls < 5 else GIB + self.states)


@pytest.mark.parametrize(("states", "saves"), [(30, True), (33, False)])
def test_states_made_after_the_peak_count(ranks: Ranks, states: int, saves: bool) -> None:
    assert saved(ranks, [24] * 2, memory=_Growing(states * GIB)) == [[False, saves]] * 2


def test_a_model_without_attention_in_its_checkpoints_is_measured_once() -> None:
    """What the model and its optimizer hold is not taken for memory that the program took later."""
    room, memory = auto_saving._Room(), PLENTY._replace(allocated=10 * GIB)
    with mock.patch.object(auto_saving, "device_memory", return_value=memory):
        room.begin(12, torch.device("cpu"), memory)
        with auto_saving._Unsaved(12):  # a checkpoint is computed again, and counted no attention
            pass
        auto_saving._note_step(torch.optim.SGD([torch.zeros(1)]))
    for _ in range(2):
        room.at_batch(memory, None)
        assert (room.measurement, room.tried, room.tokens) == (None, 12, 0)


AWAY = {0.0: [1, 3, 3, 1, 3, 3], 5000 / GIB: [0.5, 3, 1.5, 0.5, 3, 3], 1.0: [0, 1.5, 0, 0, 0, 0]}
"""By GiB that may stay. The first batch that saves does not know yet how much, so its first layer leaves."""


@pytest.mark.parametrize("gib", AWAY)
def test_where_checkpoints_go_to_the_host_results_go_there_too_with_the_same_bits(ranks: Ranks, gib: float) -> None:
    lengths = [24, 24, 16, 32, 24, 32]
    never = ranks(2).run(run, lengths, save=False)
    for one, without in zip(ranks(2).run(run, lengths, offload_above=gib), never, strict=True):
        assert one.saved == [False, True, True, False, True, True]
        assert one.away == AWAY[gib]
        for got, want in zip(one.bits, without.bits, strict=True):
            assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("free", [None, 1000])
def test_a_rank_without_the_host_memory_decides_for_all(ranks: Ranks, free: int | None) -> None:
    assert saved(ranks, [24] * 3, offload_above=0, host=(100 * GIB, free)) == [[False] * 3] * 2


def test_host_memory_is_needed_for_what_waits_there() -> None:
    """Of 32 layers with inputs of 1 GiB and results as large; 8 GiB may stay on the GPU."""
    budget, each, calls = auto_saving.Budget(8 * GIB, 32.0, 32), 32.0, 32
    assert budget.takes(each, GIB, calls) == (3 * GIB, 32 * GIB)  # three layers' results are on their way
    assert budget._replace(limit=40 * GIB).takes(each, GIB, calls) == (11 * GIB, 24 * GIB)
    assert budget._replace(limit=40 * GIB).takes(2 * each, GIB, 2 * calls) == (19 * GIB, 48 * GIB)  # two batches
    shown = auto_saving._Measurement(torch.device("cpu"), 0, 0, per_token=each, calls=calls)
    with mock.patch.object(auto_saving, "free_bytes", return_value=64 * GIB):
        assert auto_saving._most(GIB, shown, 3 * GIB, budget) == GIB
        assert auto_saving._most(GIB, shown, 3 * GIB - 32, budget) == GIB - 11
        assert auto_saving._most(GIB, shown, 3 * GIB, budget._replace(inputs=0.0)) == 0
    with mock.patch.object(auto_saving, "free_bytes", return_value=32 * GIB):  # half of it stays free
        assert auto_saving._most(GIB, shown, 3 * GIB, budget) == GIB // 2


class _Other(NamedTuple):
    """Another kind of checkpointing."""

    kind: str

    def __call__(self, model: Any) -> Any:
        if self.kind == "reentrant":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            model.enable_input_require_grads()
        elif self.kind == "own":
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": _nothing}
            )
        return model


def _nothing() -> Any:
    return nullcontext(), nullcontext()


@pytest.mark.parametrize("kind", ["reentrant", "own"])
def test_other_checkpoints_stay_as_they_are_without_a_word(ranks: Ranks, kind: str) -> None:
    with mock.patch.object(log.logger, "warning") as warning:
        assert saved(ranks, [24] * 3, prepare=_Other(kind)) == [[False] * 3] * 2
    assert not warning.called


def test_a_process_alone_does_not_save(ranks: Ranks) -> None:
    ((alone,),) = [[one.saved for one in ranks(1).run(run, [24] * 3)]]
    assert alone == [False] * 3
