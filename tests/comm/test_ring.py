"""The traffic between ranks: what arrives, in which order and in which dtype, and what they tell each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.comm import ring as ring_module
from hf_ring_attn.comm.ring import LOCAL, Ring, world_rank
from hf_ring_attn.errors import RanksDiffer, RefusedElsewhere
from tests.helpers.checks import Ranks
from tests.helpers.live_bytes import peak_bytes

CPU = torch.device("cpu")


@contextmanager
def watched(name: str, log: list[str]) -> Iterator[None]:
    """Notes in ``log`` each call of a method of Ring."""
    method = getattr(Ring, name)

    def noted(self: Ring, *args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return method(self, *args, **kwargs)

    with mock.patch.object(Ring, name, noted):
        yield


# ---- gathers -----------------------------------------------------------------------------------------------------


def gathered() -> Tensor:
    ring = Ring.of(None)
    mine = torch.arange(12.0).view(3, 4).T + 100 * ring.rank  # not contiguous
    (everyone,) = ring.gather(mine).wait()
    return everyone


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_gather_is_in_rank_order(ranks: Ranks, size: int) -> None:
    want = torch.stack([torch.arange(12.0).view(3, 4).T + 100 * rank for rank in range(size)])
    assert all(torch.equal(got, want) for got in ranks(size).run(gathered))


def total_of_a_transposed_one() -> Tensor:
    ring, x = Ring.of(None), torch.arange(6.0).view(2, 3)
    return ring.total(x.T.contiguous().T if ring.rank == 0 else x)


def test_a_sum_has_the_order_of_tensors_not_of_memory(ranks: Ranks) -> None:
    """A rank whose tensor was a transposed one had its numbers added to others' in other places."""
    assert all(torch.equal(got, 2 * torch.arange(6.0).view(2, 3)) for got in ranks(2).run(total_of_a_transposed_one))


def test_the_time_to_collect_tensors_grows_with_their_number() -> None:
    """Not with its square: 20,000 small ones, as of adapters of experts, took 22 s a step."""
    tensors: list[Any] = [
        mock.Mock(dtype=torch.float32, device=CPU, numel=mock.Mock(return_value=1)) for _ in range(50)
    ]
    assert list(map(len, ring_module._together(tensors))) == [50]
    assert sum(one.numel.call_count for one in tensors) <= 100


def mean_of_integers() -> Tensor:
    return Ring.of(None).mean(torch.tensor([2**24 + 1, -(2**40) - 1]))


def test_a_mean_of_integers_keeps_their_digits(ranks: Ranks) -> None:
    """It was a float32: 16777216 for 16777217 on every rank."""
    assert all(got.tolist() == [2**24 + 1, -(2**40) - 1] for got in ranks(2).run(mean_of_integers))


def bytes_of_a_mean() -> float:
    """The most that it makes, as a multiple of what it averages."""
    ring, x = Ring.of(None), torch.ones(4000, dtype=torch.bfloat16)
    return peak_bytes(lambda: ring.means([x])) / x.nbytes


def test_a_mean_makes_one_float32_copy(ranks: Ranks) -> None:
    """Beside what it returns. A second one was 2 GiB for the gradient of a head of 8B."""
    assert all(got < 3.1 for got in ranks(2).run(bytes_of_a_mean))


def gathered_by_heads(heads: int, heads_per_gather: int) -> tuple[list[str], list[tuple[slice, list[Tensor]]]]:
    ring, log, yielded = Ring.of(None), list[str](), []
    k = torch.arange(2 * 3 * heads * 2.0).view(2, 3, heads, 2) + 1000 * ring.rank
    with watched("gather", log):
        groups = [slice(h, min(h + heads_per_gather, heads)) for h in range(0, heads, heads_per_gather)]
        for group, arrived in ring.by_heads((k, -k[..., :1]), groups, ring.gather):
            log.append(f"attend {group.start} to {group.stop}")
            yielded.append((group, arrived))
    return log, yielded


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("heads", "heads_per_gather"), [(5, 2), (4, 1), (3, 3), (2, 7)])
def test_heads_are_gathered_in_order_each_once(ranks: Ranks, size: int, heads: int, heads_per_gather: int) -> None:
    k = torch.arange(2 * 3 * heads * 2.0).view(2, 3, heads, 2)
    everyone = torch.stack([k + 1000 * rank for rank in range(size)])
    for _, yielded in ranks(size).run(gathered_by_heads, heads, heads_per_gather):
        assert [h for group, _ in yielded for h in range(group.start, group.stop)] == list(range(heads))
        for group, (keys, values) in yielded:
            assert torch.equal(keys, everyone[:, :, :, group])
            assert torch.equal(values, -everyone[:, :, :, group, :1])


def test_the_next_heads_are_on_their_way_while_these_are_attended(ranks: Ranks) -> None:
    """One group ahead, and no more: memory is bounded by two groups."""
    launch = ["gather", "gather"]
    want = [*launch, *launch, "attend 0 to 2", *launch, "attend 2 to 4", "attend 4 to 5"]
    assert [log for log, _ in ranks(2).run(gathered_by_heads, 5, 2)] == [want, want]


def summed() -> tuple[Tensor, Tensor]:
    ring = Ring.of(None)
    rows = torch.stack([torch.full((3, 2), 2.0**12 * ring.rank + mine + 1 / 16) for mine in range(ring.size)])
    apart = rows.transpose(1, 2).contiguous().transpose(1, 2)
    return ring.reduce_scatter(apart), apart


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_the_sum_of_its_entry(ranks: Ranks, size: int) -> None:
    for mine, (got, given) in enumerate(ranks(size).run(summed)):
        assert got.shape == (3, 2)
        assert (got == sum(2.0**12 * rank + mine + 1 / 16 for rank in range(size))).all()
        assert (given[0] == 2.0**12 * mine + 1 / 16).all(), "the input is not written to"


def numbers(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(200, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def averaged(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ring = Ring.of(None)
    mine = numbers(ring.rank, dtype)
    return ring.mean(mine), mine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_means_are_summed_in_float32(ranks: Ranks, dtype: torch.dtype) -> None:
    """A sum in bfloat16 would differ from the rounded mean in a third of the numbers."""
    exact = torch.stack([numbers(rank, dtype).double() for rank in range(4)]).mean(0)
    for rank, (mean, given) in enumerate(ranks(4).run(averaged, dtype)):
        assert mean.dtype == dtype
        if dtype == torch.bfloat16:
            assert torch.equal(mean, exact.bfloat16())
        else:
            assert (mean.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps
        assert torch.equal(given, numbers(rank, dtype)), "the input is not written to"


def averaged_together() -> tuple[list[str], list[Tensor]]:
    ring, log = Ring.of(None), list[str]()
    shapes = [(3, 2), (4,), (), (0,), (2, 5)]
    mine = [torch.full(shape, ring.rank + number / 8) for number, shape in enumerate(shapes)]
    mine += [mine[0].bfloat16(), mine[1].double(), mine[4]]
    all_reduce = dist.all_reduce

    def noted(x: Tensor, **options: Any) -> Any:
        log.append(f"{x.numel()} of {x.dtype}")
        return all_reduce(x, **options)

    with mock.patch.object(dist, "all_reduce", noted), mock.patch.object(ring_module, "TOGETHER", 20):
        return log, ring.means(mine)


def test_small_tensors_are_averaged_together(ranks: Ranks) -> None:
    for log, means in ranks(2).run(averaged_together):
        assert log == ["11 of torch.float32", "16 of torch.float32", "4 of torch.float64", "10 of torch.float32"]
        assert [tuple(x.shape) for x in means] == [(3, 2), (4,), (), (0,), (2, 5), (3, 2), (4,), (2, 5)]
        assert [x.dtype for x in means[5:]] == [torch.bfloat16, torch.float64, torch.float32]
        for number, x in zip((0, 1, 2, 3, 4, 0, 1, 4), means, strict=True):
            assert (x == 0.5 + number / 8).all()


def test_a_ring_of_one_needs_no_traffic() -> None:
    ring, x = Ring.of(None), torch.arange(6.0).view(1, 6)
    assert (ring.name, ring.size, ring.rank) == (LOCAL, 1, 0)
    assert ring.mean(x) is x
    assert torch.equal(ring.gather(x).wait()[0], x[None])
    ring.agree({"tokens": 1}, CPU, doing="")
    assert ring.numbers(7, CPU, "") == [7]
    assert world_rank() == 0


def equal() -> list[bool]:
    ring, other = Ring.of(None), Ring.of(dist.new_group([0, 1]))
    return [ring == Ring.of(None), hash(ring) == hash(Ring.of(None)), ring != other, ring != Ring(LOCAL)]


def test_rings_of_one_group_are_equal(ranks: Ranks) -> None:
    """They are keys: one weight was averaged once for each object."""
    assert ranks(2).run(equal) == [[True] * 4] * 2
    assert Ring.simulated(4, 1) == Ring.simulated(4, 1) != Ring.simulated(4, 2)
    assert Ring.simulated(4, 1) != Ring(LOCAL) == Ring(LOCAL)


def named() -> tuple[str, int, int, int]:
    ring = Ring.of(None)
    return ring.name, ring.size, ring.rank, world_rank()


def test_a_world_of_one_is_a_ring_of_one_and_others_go_by_name(ranks: Ranks) -> None:
    assert ranks(1).run(named) == [(LOCAL, 1, 0, 0)]
    (name, *_), other = ranks(2).run(named)
    assert name != LOCAL
    assert other == (name, 2, 1, 1)


# ---- agreement ---------------------------------------------------------------------------------------------------


def agreed(facts: Sequence[Mapping[str, object]], failures: list[Exception | None]) -> tuple[str, str, list[str]]:
    """The kind and the text of what a rank raises, and its collectives."""
    ring, log = Ring.of(None), list[str]()
    mine, failure = facts[ring.rank], failures[ring.rank]
    try:
        with watched("gather", log):
            found = ring.agree(
                mine, ring.small_device(CPU), "Give them the same.", failure, [ring.rank, 7], doing="agreed"
            )
    except (RanksDiffer, RefusedElsewhere, MemoryError) as error:
        return type(error).__name__, str(error), log
    assert found == [list(range(ring.size)), [7] * ring.size]
    return "", "", log


def test_ranks_that_agree_go_on_after_one_collective(ranks: Ranks) -> None:
    same = {"rows": 2, "tokens": -(2**62)}
    assert ranks(3).run(agreed, [same] * 3, [None] * 3) == [("", "", ["gather"])] * 3
    assert agreed([same], [None]) == ("", "", [])
    assert agreed([same], [MemoryError("full.")]) == ("MemoryError", "full.", [])


def test_ranks_that_differ_all_say_so(ranks: Ranks) -> None:
    facts = [{"rows": 2, "tokens": 8, "labels": n} for n in (8, 8, 9)]
    text = "the ranks of one ring must hold the same labels, but got ranks 0, 1: 8, rank 2: 9. Give them the same."
    assert ranks(3).run(agreed, facts, [None] * 3) == [("RanksDiffer", text, ["gather"])] * 3


def test_an_error_of_one_rank_stops_all_with_its_words(ranks: Ranks) -> None:
    facts = [{"rows": 2}, {"rows": 0}, {"rows": 2}]
    text = "this rank stops because other ranks of its ring raised an error:\n  rank 1: MemoryError: full."
    answers = ranks(3).run(agreed, facts, [None, MemoryError("full."), None])
    elsewhere = ("RefusedElsewhere", text)
    assert [answer[:2] for answer in answers] == [elsewhere, ("MemoryError", "full."), elsewhere]


def test_all_errors_are_listed(ranks: Ranks) -> None:
    answers = ranks(3).run(agreed, [{"rows": 2}] * 3, [MemoryError("one."), MemoryError("two."), None])
    assert [text for _, text, _ in answers[:2]] == ["one.", "two."]
    assert answers[2][1].endswith("  rank 0: MemoryError: one.\n  rank 1: MemoryError: two.")


def test_a_reason_of_several_ranks_is_told_once() -> None:
    assert str(RefusedElsewhere({0: "one.", 1: "two.", 3: "one.", 4: "one."})) == (
        "this rank stops because other ranks of its ring raised an error:\n  ranks 0, 3, 4: one.\n  rank 1: two."
    )
    told = str(RefusedElsewhere(dict.fromkeys(range(8), "images cannot be sharded.")))
    assert told.endswith(":\n  ranks 0, 1, 2, 3, 4, 5, 6, 7: images cannot be sharded.")


def lengths() -> list[int]:
    ring = Ring.of(None)
    return ring.numbers(10 * ring.rank, CPU, "")


def test_ranks_tell_each_other_their_lengths(ranks: Ranks) -> None:
    assert ranks(3).run(lengths) == [[0, 10, 20]] * 3
