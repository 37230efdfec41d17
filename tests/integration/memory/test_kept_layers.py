"""keep_layers: the last checkpointed layers keep their activations, with the same bits on every rank of a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.attention.op import attentions
from hf_ring_attn.errors import BadOption
from hf_ring_attn.integration import log
from hf_ring_attn.integration.memory import auto_saving
from hf_ring_attn.integration.memory.auto_saving import DeviceMemory
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny

GIB = 2**30
PLENTY = DeviceMemory(usable=80 * GIB, allocated=GIB, peak=20 * GIB, lost=0, retries=0)


class Run(NamedTuple):
    """Of each step: the forwards of all layers, first and again, the attentions, and the loss with all gradients."""

    forwards: list[int]
    attended: list[int]
    bits: list[list[torch.Tensor]]
    warnings: list[str]


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def run(
    keep: Any, memory: Any = None, reentrant: bool = False, checkpoints: bool = True, fsdp2: bool = False,
    **options: Any,
) -> Run:  # fmt: skip
    """Three steps of a model of two layers. ``memory``: makes the counters of a rank."""
    model: Any = tiny("llama", "ring_fp32").train()
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    if fsdp2:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    hf_ring_attn.configure(model, RingConfig(keep_layers=keep, self_check=False, **options))
    found, forwards = Run([], [], [], []), []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    counters = (lambda _device: None) if memory is None else memory(torch.distributed.get_rank())
    with (
        mock.patch.object(auto_saving, "device_memory", counters),
        mock.patch.object(log.logger, "warning", found.warnings.append),
    ):
        for place in range(3):
            before = attentions()
            forwards.clear()
            with (sharded := hf_ring_attn.shard(tokens(24, seed=place), model=model)):
                loss = model(**sharded.inputs).loss
            loss.backward()
            if not fsdp2:
                sharded.reduce_gradients(model)
            found.forwards.append(len(forwards))
            found.attended.append(attentions() - before)
            gradients = [_whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
            found.bits.append([loss.detach(), *gradients])
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.turns(4)
@pytest.mark.parametrize("kind", ["", "reentrant", "fsdp2"])
@pytest.mark.parametrize("save", [False, True])
def test_kept_layers_run_once_with_the_same_bits(ranks: Ranks, save: bool, kind: str) -> None:
    options: dict[str, Any] = {"reentrant": kind == "reentrant", "fsdp2": kind == "fsdp2", "save_attention": save}
    plain = ranks(2).run(run, 0, **options)
    saves = save and kind != "reentrant"
    for keep in (1, 2, 5):
        for one, without in zip(ranks(2).run(run, keep, **options), plain, strict=True):
            again = max(0, 2 - keep)
            assert without.forwards == [4] * 3
            assert one.forwards == [2 + again] * 3
            assert one.attended == [2 if saves else 2 + again] * 3
            for got, want in zip(one.bits, without.bits, strict=True):
                assert all(map(torch.equal, got, want))


def test_a_number_of_layers_is_kept_whatever_fits(ranks: Ranks) -> None:
    for one in ranks(2).run(run, 1, memory=Counters()):
        assert one.forwards == [3] * 3
        assert one.attended == [3, 2, 2]


class Counters(NamedTuple):
    """Makes counters of which each reading finds 8 MiB more: so much a recompute allocates, and a step 48 MiB.

    ``left``: MiB that rank 1 has at the peak; the other one has plenty.
    """

    left: int = 50 << 10

    def __call__(self, rank: int) -> Callable[[torch.device], DeviceMemory | None]:
        readings: list[int] = []

        def read(_device: torch.device) -> DeviceMemory:
            readings.append(1)
            left = self.left if rank else 50 << 10
            return PLENTY._replace(allocated=GIB + (len(readings) << 23), peak=72 * GIB - (left << 20))

        return read


@pytest.mark.parametrize("size", [1, 2])
def test_as_many_are_kept_as_fit_after_a_measured_step(ranks: Ranks, size: int) -> None:
    plain = ranks(size).run(run, 0, save_attention=False)
    for one, without in zip(ranks(size).run(run, "auto", memory=Counters()), plain, strict=True):
        assert one.forwards == [4, 2, 2]
        assert one.attended == [4, 2, 2]
        for got, want in zip(one.bits, without.bits, strict=True):
            assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("left", "forwards"), [(50, 4), (60, 3), (70, 2)])
def test_a_rank_with_less_memory_decides_for_all(ranks: Ranks, left: int, forwards: int) -> None:
    """Its attention fits, and none, one or both of the layers."""
    for one in ranks(2).run(run, "auto", memory=Counters(left)):
        assert one.attended == [4, 2, 2]
        assert one.forwards[:2] == [4, forwards]


@pytest.mark.parametrize(
    ("free", "tokens", "calls", "kept"),
    [
        (32 * GIB, GIB, 8, 3),  # 8 GiB of results, then (32 - 8) / 7
        (32 * GIB, GIB, 16, 0),  # two graphs lived at once
        (32 * GIB, GIB // 2, 8, 8),  # (32 - 4) / 3.5
        (32 * GIB, 2 * GIB, 8, 0),  # was not measured
        (8 * GIB, GIB, 8, 0),
        (1000 * GIB, GIB, 8, 8),
    ],
)
def test_layers_take_what_their_recompute_allocated(free: int, tokens: int, calls: int, kept: int) -> None:
    """A recompute allocated 8 bytes for each token, one of them for results."""
    room = auto_saving._Room()
    shown = auto_saving._Measurement(torch.device("cpu"), 0, 0, per_token=8.0, calls=calls, of_layer=7 + 8 / calls)
    room.tokens, room.shown = GIB, (shown, free)
    assert room.kept(tokens, 8) == kept


def test_a_recompute_that_allocated_nothing_shows_nothing() -> None:
    room = auto_saving._Room()
    room.tokens, room.shown = 10, (auto_saving._Measurement(torch.device("cpu"), 0, 0, per_token=8.0, calls=1), GIB)
    assert room.kept(10, 8) == 0


def test_without_checkpoints_a_warning_says_that_nothing_is_kept(ranks: Ranks) -> None:
    for one in ranks(2).run(run, 1, checkpoints=False):
        assert one.forwards == [2] * 3
        assert any("keep_layers has no effect: nothing checkpoints a layer" in line for line in one.warnings)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_layers": -1}, "a number of layers, or 'auto'"),
        ({"keep_layers": "all"}, "a number of layers, or 'auto'"),
        ({"keep_layers": True}, "a number of layers, or 'auto'"),
        ({"keep_layers": "auto", "save_attention": True}, "needs save_attention='auto'"),
        ({"keep_layers": 2, "offload_above": 1.0}, "0 with offload_above"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        RingConfig(**options)
