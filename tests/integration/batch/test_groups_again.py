"""Process groups that are destroyed and made again in one process, as in notebooks: torch gives their names again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_ring_attn
from hf_ring_attn import ring_attention
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.testing import relative_error
from hf_ring_attn.traffic import interruption_guard
from tests.helpers.jobs.plain_jobs import attempt, gradients_of, tokens
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import tiny
from tests.helpers.patience import patient

Gradients = dict[str, Tensor]
SECONDS = patient(20)


@pytest.fixture
def three(ranks: object) -> Iterator[LiveRanks]:
    """Three processes of their own, which leave their world."""
    with LiveRanks(3, timeout_seconds=3 * SECONDS) as world:
        yield world


def in_worlds(folder: Path, worlds: list[list[int]], job: Callable[..., Any], *args: Any) -> list[Any]:
    """The job's results in one world after another, each of some of these processes in any order; None outside."""
    me, found, memory = dist.get_rank(), list[Any](), dict[str, Any]()
    dist.destroy_process_group()
    for number, members in enumerate(worlds):
        if me not in members:
            found.append(None)
            continue
        store = dist.FileStore(str(folder / f"store_{number}"), len(members))
        timeout = timedelta(seconds=SECONDS)
        rank = members.index(me)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(members), timeout=timeout)
        found.append(job(number, memory, *args))
        dist.barrier()
        dist.destroy_process_group()
    return found


def gradients(model: Any) -> Gradients:
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        out = model(**sharded.inputs)
    out.loss.backward()
    sharded.reduce_gradients(model)
    return gradients_of(model)


@cache
def by_one_process() -> Gradients:
    model: Any = tiny("llama").double()
    model(**tokens(23), use_cache=False).loss.backward()
    return gradients_of(model)


def assert_right(found: list[list[Gradients | None]], worlds: list[list[int]]) -> None:
    for rank, of_rank in enumerate(found):
        for members, got in zip(worlds, of_rank, strict=True):
            assert (got is not None) == (rank in members)
            if got is not None:
                errors = {name: relative_error(got[name], want) for name, want in by_one_process().items()}
                assert max(errors.values()) < 1e-6, (rank, members, errors)


def training(number: int, memory: dict[str, Any], compiled: bool) -> Gradients:
    """Trains the model of the earlier worlds, if this process was in one."""
    if "model" not in memory:
        memory["model"] = model = tiny("llama", "ring_fp32").double()
        if compiled:
            model.model.compile(backend="aot_eager")
    model = memory["model"]
    gradients(model)
    return gradients(model)


WORLDS = [
    [[0, 1], [1, 0]],
    [[0, 1], [0, 1, 2]],
    [[0, 1], [2, 1]],
    [[0, 1, 2], [1, 0], [2, 0, 1]],
]


@pytest.mark.turns
@pytest.mark.parametrize("worlds", WORLDS, ids=str)
def test_a_model_trains_on_in_other_worlds(three: LiveRanks, tmp_path: Path, worlds: list[list[int]]) -> None:
    """Ranks that know the name agreed on kernels, weights and checks of it; one that does not waited for them."""
    assert_right(three.run(in_worlds, tmp_path, worlds, training, False), worlds)


@pytest.mark.turns
@pytest.mark.slow
def test_a_compiled_model_trains_on_in_another_world(three: LiveRanks, tmp_path: Path) -> None:
    """Compiled code holds the ring's name and its kernel."""
    worlds = [[0, 1], [0, 1, 2]]
    assert_right(three.run(in_worlds, tmp_path, worlds, training, True), worlds)


def drifting(number: int, memory: dict[str, Any]) -> Any:
    model = memory.setdefault("model", tiny("llama", "ring_fp32").double())
    if number and dist.get_rank():
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[0, 0] += 1
    raised = attempt(gradients, model)
    return raised and raised[0]


def test_weights_are_compared_anew(three: LiveRanks, tmp_path: Path) -> None:
    found = three.run(in_worlds, tmp_path, [[0, 1], [0, 1]], drifting)
    assert found == [[None, "RanksDiffer"], [None, "RanksDiffer"], [None, None]]


def scoring(number: int, memory: dict[str, Any]) -> Any:
    """Attention with a bias that one rank changes between two worlds."""
    from hf_ring_attn.attention.kernel_choice import agree_on_scores
    from hf_ring_attn.kernels import ScoreMod

    bias = memory.setdefault("bias", torch.zeros(2, dtype=torch.float64))

    def biased(score: Tensor, _b: Tensor, h: Tensor, _q: Tensor, _kv: Tensor) -> Any:
        return score + bias[h]

    function = memory.setdefault("function", biased)
    if number and dist.get_rank():
        bias += 1
    mod = ScoreMod.of(function, torch.device("cpu"), False)
    raised = attempt(agree_on_scores, Ring.of(None), mod, torch.device("cpu"))
    return raised and raised[0]


def test_a_score_mod_is_compared_anew(three: LiveRanks, tmp_path: Path) -> None:
    found = three.run(in_worlds, tmp_path, [[0, 1], [0, 1]], scoring)
    assert found == [[None, "RanksDiffer"], [None, "RanksDiffer"], [None, None]]


def interrupting(number: int, memory: dict[str, Any]) -> Any:
    """An exchange that ends half-way in the first world; its group is remembered in the second."""
    ring = Ring.of(None)
    memory.setdefault("kept", []).append((ring, dist.group.WORLD, hf_ring_attn.shard(tokens(23))))
    q = torch.randn(1, 4, 2, 3)
    if number == 0:
        interruption_guard(ring).begin()
    raised = attempt(ring_attention, q, q, q)
    return raised and raised[0]


def test_an_interrupted_ring_does_not_stop_the_next_one(three: LiveRanks, tmp_path: Path) -> None:
    found = three.run(in_worlds, tmp_path, [[0, 1], [1, 0], [0, 1]], interrupting)
    assert found == [["LeftHalfway", None, None]] * 2 + [[None] * 3]


def using_an_old_batch(number: int, memory: dict[str, Any]) -> Any:
    model = memory.setdefault("model", tiny("llama", "ring_fp32").double())
    if number == 0:
        memory["group"], memory["batch"] = dist.group.WORLD, hf_ring_attn.shard(tokens(23))
        batch = memory["batch"]
        with batch:
            memory["loss"] = model(**batch.inputs).loss
        return None
    old = memory["batch"]

    def forward() -> None:
        with old:
            model(**old.inputs)

    def attend() -> None:
        q = torch.randn(1, 4, 2, 3)
        ring_attention(q, q, q, group=memory["group"], length=8)

    ways = [memory["loss"].backward, forward, attend, lambda: old.reduce(torch.ones(()))]
    return [raised and raised[0] for raised in map(attempt, ways)]


def test_what_is_left_of_an_old_world_is_refused_by_name(three: LiveRanks, tmp_path: Path) -> None:
    """Its name is the new world's: with other ranks, numbers of both would mix."""
    for found in three.run(in_worlds, tmp_path, [[0, 1], [1, 0]], using_an_old_batch)[:2]:
        assert found == [None, ["GroupDestroyed"] * 4]


class State:
    """State of a ring."""


def keeping(number: int, memory: dict[str, Any]) -> Any:
    ring, gone = Ring.of(None), memory.get("state")
    state = ring.state(State)
    assert Ring(ring.name).state(State) is state is Ring.of(dist.group.WORLD).state(State)
    other = dist.new_group()
    assert Ring.of(other).state(State) is not state
    memory["state"] = weakref.ref(state)
    memory.setdefault("names", []).append(ring.name)
    assert len(set(memory["names"])) == number + 1, "a name is given once"
    return gone is None or gone() is None


def test_a_rings_state_goes_with_its_group(three: LiveRanks, tmp_path: Path) -> None:
    found = three.run(in_worlds, tmp_path, [[0, 1]] * 3, keeping)
    assert found == [[True] * 3] * 2 + [[None] * 3]
