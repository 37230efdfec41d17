"""The Triton kernels on small tensors: on the GPU, or on the CPU in Triton's interpreter.

The interpreter must be chosen before triton is first imported, so test_triton.py runs this file in processes of their
own. By hand: TRITON_INTERPRET=1 pytest tests/kernels/triton_cases.py, or on a GPU without the variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hf_ring_attn.kernels import Kernel
from hf_ring_attn.kernels.triton import Triton, launch
from hf_ring_attn.kernels.triton.blocks import NARROWER_VALUES, TABLE
from hf_ring_attn.sharding.layout import Layout, Owners
from hf_ring_attn.sharding.mask import tiles
from hf_ring_attn.testing import Case, Inputs, inputs, packed, relative_error, sliding
from tests.helpers.cases import CASES
from tests.helpers.checks import UNROUNDED, same_bits
from tests.helpers.kernel_answers import Answer, computed, mask_of, on, params_of, table_of, unit, vanishing, wanted
from tests.helpers.rank_functions import poisoned_memory
from tests.helpers.triton_rows import computed_with

KERNEL: Kernel = Triton()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = Case(why="many blocks", length=110, heads=4, kv_heads=2, head_dim=16, value_dim=24, band=sliding(70), seed=1)
HOLES = Case(
    why="a hole every few keys", length=60, documents=(tuple((0 if n % 3 else -1, 4) for n in range(15)),), seed=2
)
BOTH = Case(why="window and documents", length=70, band=sliding(25), documents=(packed(41, 29),), seed=3)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def far(case: Case, x: Inputs, got: Answer) -> dict[str, float]:
    """The relative error of everything, in units of its terms where the true value is zero."""
    want = wanted(case, x, got["out"].cpu())
    errors = {name: relative_error(got[name], want[name]) for name in want}
    for name in vanishing(case):
        errors[name] = float((got[name].cpu().double() - want[name]).abs().max()) / unit(case, x)
    return errors


@pytest.mark.parametrize("case", [BOTH, LONG, HOLES, CASES[-1], CASES[-2]], ids=lambda case: case.why)
def test_it_does_not_matter_how_the_mask_is_cut(case: Case) -> None:
    x = inputs(case, torch.float32)
    errors = far(case, x, computed(KERNEL, case, on(DEVICE, x), table_of(case, 7)))
    assert max(errors.values()) < UNROUNDED, errors


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize("case", [LONG, CASES[-1], CASES[-2]], ids=lambda case: case.why)
def test_16_bits_round_probabilities_and_nothing_else(case: Case, dtype: torch.dtype) -> None:
    """Each weight is off by half an ulp at most, eps / 2 relatively, and so is each weight's gradient; out as well."""
    x = inputs(case, dtype)
    errors = far(case, x, computed(KERNEL, case, on(DEVICE, x), table_of(case)))
    assert errors.pop("lse") < UNROUNDED
    assert max(errors.values()) < torch.finfo(dtype).eps, errors


BENT = replace(BOTH, why="softcap and sinks", softcap=2.0, sinks=True, documents=())


@pytest.mark.parametrize("case", [LONG, HOLES, BOTH, BENT], ids=lambda case: case.why)
@pytest.mark.parametrize(("ring", "owners"), [(2, ()), (3, ()), (5, ()), (2, (1, 0, 0, 1, 0, 1, 1, 0)), (3, (2, 0, 1))])
def test_a_chunk_of_queries_gives_the_bits_of_the_whole_row(case: Case, ring: int, owners: Owners) -> None:
    x = on(DEVICE, inputs(case, torch.float32))
    layout = Layout(case.length, ring, 0, owners)
    q, k, v = (layout.pad(y, 1) for y in (x["q"], x["k"], x["v"]))
    ids = torch.zeros(case.batch, case.length, dtype=torch.int64) if x["documents"] is None else x["documents"].cpu()
    padded = replace(case, length=layout.padded, documents=())
    mask, params = mask_of(padded, layout.pad(ids, 1, -1)), params_of(case, x)
    whole = KERNEL.forward(q, k, v, tiles(mask, layout.whole(), layout.whole()), params)
    for rank in range(ring):
        mine = Layout(case.length, ring, rank, owners)
        out, lse = KERNEL.forward(mine.shard(q, 1), k, v, tiles(mask, mine.runs(), mine.whole()), params)
        assert same_bits(out, mine.shard(whole[0], 1)) and same_bits(lse, mine.shard(whole[1], 2))


def test_blocks_fetched_by_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper: the same numbers, zeros past the end of a row and of a head, and nothing of the next head."""
    case = replace(LONG, head_dim=24, value_dim=8, batch=2, length=37, heads=2, kv_heads=2)
    x, table = on(DEVICE, inputs(case, torch.float32)), table_of(case)
    monkeypatch.setattr(launch, "descriptors_possible", lambda *_: False)
    want = computed(KERNEL, case, x, table)
    monkeypatch.setattr(launch, "descriptors_possible", lambda *_: True)
    got = computed(KERNEL, case, x, table)
    assert all(same_bits(got[name], want[name]) for name in want)


def test_nan_in_nan_out_and_nowhere_else() -> None:
    """A nan may spread to the queries and keys that share a block with those it meets, and no further."""
    length, largest_block = (400, 128) if DEVICE == "cuda" else (110, 32)
    case = replace(LONG, band=sliding(4), length=length)
    x, at = on(DEVICE, inputs(case, torch.float32)), length - 30
    x["k"][0, at, 1] = torch.nan
    got = computed(KERNEL, case, x, table_of(case))
    heads, met = slice(2, 4), slice(at, at + 4)  # those that read key head 1, and see the key
    assert got["out"][0, met, heads].isnan().all() and got["lse"][0, heads, met].isnan().all()
    assert got["dq"][0, met, heads].isnan().all() and got["dk"][0, at - 3 : at + 4, 1].isnan().all()
    clean = (at - 3) // largest_block * largest_block
    assert not any(got[name][:, :clean].isnan().any() for name in ("out", "dq", "dk", "dv"))
    assert not got["out"][:, :, :2].isnan().any() and not got["dv"][:, :, 0].isnan().any()


@pytest.mark.parametrize("key", [key for key in TABLE if key[0] in ("ampere", "ada")], ids=str)
def test_rows_of_gpus_that_are_not_at_hand_are_right(key: tuple[str, int, int]) -> None:
    width, row = key[2], TABLE[key]
    case = Case(
        why="unequal blocks", length=150, heads=2, kv_heads=1, head_dim=width,
        value_dim=NARROWER_VALUES.get(width, width), seed=4,
    )  # fmt: skip
    x, table = inputs(case, torch.float32), table_of(case)
    errors = far(case, x, computed_with(row, case, on(DEVICE, x), table))
    assert max(errors.values()) < UNROUNDED, errors
