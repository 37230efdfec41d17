"""flex on a CPU: tables become masks, and FlexAttention's definition gives the reference."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.bench.replay import Transfer
from hf_ring_attn.biases import Alibi
from hf_ring_attn.config import RingConfig
from hf_ring_attn.errors import UnsupportedAttention
from hf_ring_attn.kernels import KERNELS, Gradients, Params, Request, ScoreMod
from hf_ring_attn.kernels.flex import Flex, leaves, mask_table
from hf_ring_attn.kernels.flex.mask_table import BEYOND, MaskTable
from hf_ring_attn.sharding import plan as plan_module
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Band, Mask, Tile, tiles
from hf_ring_attn.sharding.mask import UNBOUNDED as FAR
from hf_ring_attn.testing import Case, inputs, packed, sliding
from tests.helpers.checks import Ranks
from tests.helpers.kernel_answers import NO_HOLES, without_padding
from tests.helpers.rank_functions import held, qkv
from tests.helpers.score_mods import MODS, Builder, Mod, only_where_seen
from tests.kernels.flex_cases import distances, mixed, on_cpu, simulated

CPU = torch.device("cpu")
EXACT = 1e-12
REQUEST = Request(
    "cuda", torch.bfloat16, 8, 2, 128, 128, softcap=False, sinks=False, deterministic=False, score_mod=True
)
KNOWN = "2.13.0"
ALL = Case(
    why="window, documents, padding, sinks, softcap, grouped queries", batch=2, length=36, heads=4, kv_heads=2,
    head_dim=8, value_dim=6, band=sliding(13), documents=(packed(3, 20, -1, 12), packed(-2, 30, 4)), softcap=2.5,
    sinks=True, scale=0.5, seed=3,
)  # fmt: skip


# ---- attention, by FlexAttention's definition ------------------------------------------------------------------------


FUNCTIONS = ("worked_example", "several", "documents_of_its_own", "score_ignored", "relative_bias")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.turns
def test_functions_give_the_reference(name: str) -> None:
    with on_cpu() as flex:
        got = simulated(flex, ALL, MODS[name](Builder(ALL, torch.float64)), 2)
    errors = distances(got, simulated(KERNELS["reference"], ALL, MODS[name](Builder(ALL, torch.float64)), 1))
    assert max(errors.values()) < EXACT, errors


WAYS: list[tuple[int, Transfer]] = [(1, "ring"), (2, "ring"), (2, "gather"), (2, "sparse")]
MASKS = [case for case in NO_HOLES if case.documents or case.band not in ((0, None), (None, None))][::3]


@pytest.mark.slow
@pytest.mark.turns
def test_masks_give_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function, compiled a few times for all of them: lengths, masks, tables and ring sizes are data."""
    monkeypatch.setattr(plan_module, "KEY_BLOCK", 12)  # cases are shorter than the real one
    monkeypatch.setattr(leaves, "MOST_COPIES", 128)
    same = {"heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6, "softcap": None, "scale": None}
    worst: dict[tuple[str, int, str], float] = {}
    before = counters["stats"]["unique_graphs"]
    with on_cpu() as flex:
        for turn, case in enumerate(MASKS):
            size, path = WAYS[turn % len(WAYS)]
            cut = without_padding(replace(case, **same), size)  # type: ignore[arg-type]
            if not cut.length:
                continue
            errors = distances(
                simulated(flex, cut, mixed(Builder(cut, torch.float64)), size, path),
                simulated(KERNELS["reference"], cut, mixed(Builder(cut, torch.float64)), 1),
            )
            # What is given back by gathers is summed in float32 by the replay.
            worst[case.why, size, path] = max(errors.values()) * (1 if path == "ring" else 1e-6)
        graphs = counters["stats"]["unique_graphs"] - before
    assert max(worst.values()) < EXACT, max(worst.items(), key=lambda item: item[1])
    assert graphs <= 12, "each length compiled for itself"


def test_what_a_function_says_of_hidden_pairs_plays_no_part() -> None:
    case = Case(why="causal", length=23, heads=4, kv_heads=2, seed=1)
    with on_cpu() as flex:
        got = simulated(flex, case, only_where_seen(Builder(case, torch.float64)), 1)
    errors = distances(got, simulated(KERNELS["reference"], case, only_where_seen(Builder(case, torch.float64)), 1))
    assert max(errors.values()) < EXACT, errors


def test_what_a_function_detaches_gets_no_gradient() -> None:
    """By default torch 2.14 and later drop detach from graphs: the tensor and the score got gradients of both terms."""

    def detached(make: Builder) -> Mod:
        slope, scale = make.learned(4), make.learned(4)

        def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + slope[h] * torch.tanh(score.detach()) + scale[h] * slope.detach()[h] * kv_idx

        return Mod(mod, {"slope": slope, "scale": scale})

    case = Case(why="causal", length=24, heads=4, kv_heads=2, seed=1)
    with on_cpu() as flex:
        got = simulated(flex, case, detached(Builder(case, torch.float64)), 2)
    errors = distances(got, simulated(KERNELS["reference"], case, detached(Builder(case, torch.float64)), 1))
    assert max(errors.values()) < EXACT, errors


def test_contributions_are_rounded_and_captured_gradients_are_not() -> None:
    q, k, v, dout = (torch.randn(1, 40, heads, 8).bfloat16() for heads in (4, 2, 2, 4))
    bias = Alibi(4, learnable=True)
    table = tiles(Mask.of(CAUSAL, 1, 40), Layout(40, 1, 0).whole(), Layout(40, 1, 0).whole())
    mod = ScoreMod.of(bias, CPU)
    params = Params(0.3, score_mod=mod.with_values(mod.captured, [True]))
    with on_cpu() as flex:
        dq, dk, dv = (flex.new_gradient(x) for x in (q, k, v))
        into = Gradients(dq, dk, dv, extra={"captured 0": torch.zeros(4).double()})
        out, lse = flex.forward(q, k, v, table, params)
        flex.backward(dout, q, k, v, lse, flex.delta(dout, out), table, params, into, out)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    for total in (into.dq, into.dk, into.dv):
        assert total.dtype == torch.float32 and torch.equal(total, total.bfloat16().float())
    found = into.extra["captured 0"]
    assert found.ne(0).all() and not torch.equal(found, found.bfloat16().double())
    assert flex.rounds_gradients


def through_the_ring(backward: str) -> dict[str, Tensor]:
    """This rank's share by the public function; gathered a head at a time, so that a function sees later heads."""
    mine = held(ALL.length, dist.get_rank(), dist.get_world_size())
    x, mod = inputs(ALL), mixed(Builder(ALL, torch.float64))
    leaves = {name: x[name][:, mine].requires_grad_() for name in ("q", "k", "v")}
    config = RingConfig(kernel="flex", backward=backward, heads_per_gather=1)  # type: ignore[arg-type]
    with on_cpu():
        out = ring_attention(
            *leaves.values(), score_mod=mod.function, documents=x["documents"], window=(12, 0), softcap=2.5, scale=0.5,
            config=config,
        )  # fmt: skip
        wanted = {**leaves, **mod.captured}
        return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), x["dout"][:, mine]), strict=True))


@pytest.mark.parametrize("backward", ["ring", "gather"])
@pytest.mark.turns
def test_real_ranks(ranks: Ranks, backward: str) -> None:
    shares = ranks(2).run(through_the_ring, backward)
    case = replace(ALL, sinks=False)
    want = simulated(KERNELS["reference"], case, mixed(Builder(case, torch.float64)), 1)
    for name, exact in zip(("q", "k", "v"), want.answer[2:], strict=True):
        whole_row = torch.empty_like(exact)
        for rank, share in enumerate(shares):
            whole_row[:, held(case.length, rank, 2)] = share[name]
        torch.testing.assert_close(whole_row, exact, rtol=1e-9, atol=1e-9)
    for name, exact in zip(("limit", "weight", "rows", "scalar"), _by_name(want, case), strict=True):
        torch.testing.assert_close(sum(share[name] for share in shares), exact, rtol=1e-9, atol=1e-9)


def _by_name(want: object, case: Case) -> list[Tensor]:
    """The captured gradients in the order of their names; a function captures them in the order of their use."""
    mod = mixed(Builder(case, torch.float64))
    order = [id(x) for x in ScoreMod.of(mod.function, CPU).captured]
    return [want.captured[order.index(id(x))] for x in mod.captured.values()]  # type: ignore[attr-defined]


# ---- tables ---------------------------------------------------------------------------------------------------------


def dense(table: Tensor, batch: int, tokens: int, keys: int) -> Tensor:
    """[B, T, S]: which keys each query sees, tile by tile; and -1 or the distance of the pair."""
    pairs = torch.zeros(batch, tokens, keys, dtype=torch.bool)
    for tile in map(Tile._make, table.tolist()):
        i, j = torch.arange(tile.q_length)[:, None], torch.arange(tile.k_length)
        distance = tile.q_position + i - tile.k_position - j
        of_q = slice(tile.q_offset, tile.q_offset + tile.q_length)
        of_k = slice(tile.k_offset, tile.k_offset + tile.k_length)
        pairs[tile.row, of_q, of_k] |= (tile.lo <= distance) & (distance <= tile.hi)
    return pairs


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", NO_HOLES, ids=lambda case: case.why)
def test_tables_and_blocks_of_a_mask(case: Case, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    side = 4
    monkeypatch.setattr(mask_table, "BLOCK", side)
    layout = Layout(case.length, size, size - 1)
    documents = inputs(case)["documents"]
    lo, hi = case.band
    band = Band(-FAR if lo is None else lo, FAR if hi is None else hi)
    if documents is None:
        documents = torch.zeros(case.batch, case.length, dtype=torch.int64)
    mask = Mask.of(band, case.batch, layout.padded, layout.pad(documents, 1, -1))
    for keys in (layout.whole(), layout.runs(0)):
        table = tiles(mask, layout.runs(), keys)
        tokens, number = layout.local_length, sum(run.length for run in keys)
        want = dense(table, case.batch, tokens, number)
        found = MaskTable.of(table, case.batch, tokens, number, CPU)
        if found is None:
            assert not want.any()
            continue
        at, queries = found.keys[:, None], layout.positions(size - 1)
        seen = (found.first[..., None] <= at) & (at <= found.last[..., None])
        assert torch.equal(seen, want)
        some = want.any(2)
        assert torch.equal(found.queries[some], queries.int().expand(case.batch, -1)[some])
        told = torch.minimum(torch.maximum(at, found.low[..., None]), found.high[..., None])
        assert torch.equal(told[want], at.expand_as(want)[want]), "of a pair that is seen the function is told itself"
        # Of any other it is told one that is seen.
        row, query = found.rows.long(), found.queries
        real = {(b, q, k) for b, q, k in _positions(want, queries, found.keys)}
        asked = torch.stack((row[..., None].expand_as(told), query[..., None].expand_as(told), told), -1).flatten(0, 2)
        assert {tuple(line) for line in asked.tolist()} <= real
        _blocks_are_right(found, want, side)


def _positions(pairs: Tensor, queries: Tensor, keys: Tensor) -> list[tuple[int, int, int]]:
    return [(b, int(queries[i]), int(keys[b, j])) for b, i, j in pairs.nonzero().tolist()]


def _blocks_are_right(found: MaskTable, want: Tensor, side: int) -> None:
    """Each pair that is seen lies in one block, and blocks said to be whole are seen as a whole."""
    padded = torch.nn.functional.pad(want, (0, -want.shape[2] % side, 0, -want.shape[1] % side))
    by_block = padded.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
    counts, lists, full_counts, full_lists = found.blocks
    for b in range(want.shape[0]):
        for i in range(by_block.shape[1]):
            part = lists[b, 0, i, : counts[b, 0, i]].tolist()
            full = full_lists[b, 0, i, : full_counts[b, 0, i]].tolist()
            assert len({*part, *full}) == len(part) + len(full)
            assert {j for j in range(by_block.shape[2]) if by_block[b, i, j].any()} <= {*part, *full}
            assert {j for j in range(by_block.shape[2]) if by_block[b, i, j].all()} == {*full}


def test_a_dense_mask_is_made_nowhere() -> None:
    """A million tokens: two numbers a query and one a key."""
    table = torch.tensor([Tile(0, 0, 2**20, 0, 0, 2**20, 0, 0, 4095)])
    with mock.patch.object(mask_table, "BLOCK", 2**14):
        found = MaskTable.of(table, 1, 2**20, 2**20, CPU)
    assert found is not None and found.first.shape == (1, 2**20) and found.blocks[0].shape == (1, 1, 64)
    assert int(found.blocks[0].sum()) == 2 * 64 - 1


def test_a_hole_is_noticed() -> None:
    table = torch.tensor([Tile(0, 0, 4, 4, at, 2, at, 0, FAR) for at in (0, 4)] + [Tile(0, 4, 1, 9, 2, 1, 2, 0, FAR)])
    with pytest.raises(AssertionError, match="a hole"):
        MaskTable.of(table, 1, 5, 8, CPU)
    assert BEYOND > 2**29


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu"}, "needs a GPU, got tensors on cpu"),
        ({"dtype": torch.float64}, "computes in bfloat16, float16 or float32, got torch.float64"),
        ({"score_mod": False}, "it computes only attention with a score_mod"),
        ({"deterministic": True}, "it adds the gradients of what a score_mod uses in no fixed order"),
        ({"holes": True}, "a document's keys must be one run, and here others or hidden keys are between them"),
        ({"head_dim": 8}, "heads of keys are 16 to 256 wide, got 8"),
        ({"value_dim": 512}, "heads of values are 16 to 256 wide, got 512"),
    ],
)
def test_what_it_cannot_do_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object], reason: str
) -> None:
    monkeypatch.setattr(torch, "__version__", KNOWN)
    assert Flex().unsupported(replace(REQUEST, **change)) == [reason]  # type: ignore[arg-type]


def test_all_reasons_are_given_and_other_torches_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", KNOWN)
    assert len(Flex().unsupported(replace(REQUEST, holes=True, head_dim=8, deterministic=True))) == 3
    monkeypatch.setattr(torch, "__version__", "3.1.0")
    assert Flex().unsupported(REQUEST) == ["torch 3.1.0 is not known here (2.11., 2.12., 2.13.x are)"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", KNOWN)
    assert Flex().unsupported(REQUEST) == ["needs a GPU, and torch finds none"]
    with pytest.raises(UnsupportedAttention, match="flex: needs a GPU, got tensors on cpu"):
        ring_attention(**qkv(), score_mod=Alibi(4), config=RingConfig(kernel="flex"))
