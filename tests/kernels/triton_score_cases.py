"""score_mods by distance through the Triton kernels: on the GPU, or on the CPU in Triton's interpreter.

test_triton.py runs this file as it runs triton_cases.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.attention.kernel_choice import part_of
from hf_ring_attn.bench.replay import Transfer, replay
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels import KERNELS, Kernel, Request, ScoreMod, asking
from hf_ring_attn.kernels.score_mods.chosen_keys import ChosenKeys
from hf_ring_attn.kernels.score_mods.chosen_keys import packed as bits_of
from hf_ring_attn.kernels.triton import blocks
from hf_ring_attn.kernels.triton.choice import Keys, moved
from hf_ring_attn.testing import Case, inputs, packed, relative_error, sliding
from tests.helpers.checks import UNROUNDED
from tests.helpers.kernel_answers import mask_of, on, params_of
from tests.helpers.rank_functions import poisoned_memory
from tests.helpers.score_mods import Builder, Mod, alibi, relative_bias
from tests.kernels.flex_cases import Played, distances

TRITON, REFERENCE = KERNELS["triton"], KERNELS["reference"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL = Case(
    why="window, documents, padding, sinks, softcap, grouped queries", batch=2, length=36, heads=4, kv_heads=2,
    head_dim=8, value_dim=6, band=sliding(13), documents=(packed(3, 20, -1, 12), packed(-2, 30, 4)), softcap=2.5,
    sinks=True, scale=0.5, seed=3,
)  # fmt: skip
HOLES = Case(
    why="a hole every few keys", length=60, documents=(tuple((0 if n % 3 else -1, 4) for n in range(15)),), seed=2
)
LONG = Case(why="many blocks", length=110, heads=4, kv_heads=2, head_dim=16, value_dim=24, band=sliding(70), seed=1)


def several(make: Builder) -> Mod:
    """Added one after the other: a head's number and slope, a table read at a clamped distance, nothing far away."""
    slope, table, scalar = make.learned(make.case.heads), make.learned(9), make.learned()

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        back = q_idx - kv_idx
        moved = table[back.clamp(-4, 4) + 4] - slope[h] * torch.log(1.0 + back)  # nan for keys that come later
        moved = torch.where(kv_idx <= q_idx, moved, 1e3)
        return torch.where(back > 40, -torch.inf, moved) + score - scalar * (back % 2)

    return Mod(mod, {"slope": slope, "table": table, "scalar": scalar})


def chosen(make: Builder) -> Mod:
    """Some keys for each query, and for some queries none that they see."""
    case = make.case
    keys = make.indices(case.length, case.batch * case.length * 9).view(case.batch, case.length, 9)
    return Mod(ChosenKeys(keys, torch.arange(case.length, device=DEVICE), case.length))


CANCELLED = 50 * UNROUNDED
"""What a tensor learns sums terms of both signs, all of them in float32, so their errors do not cancel as they do."""
FUNCTIONS: dict[str, Callable[[Builder], Mod]] = {
    "alibi": alibi,
    "relative bias": relative_bias,
    "several": several,
    "chosen keys": chosen,
}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def simulated(kernel: Kernel, case: Case, name: str, size: int, path: Transfer = "ring") -> Played:
    """In float32, or for the reference from the same inputs in float64."""
    dtype = torch.float64 if kernel is REFERENCE else torch.float32
    x = on(DEVICE.type, inputs(case, torch.float32))
    q, k, v, dout = (x[of].to(dtype) for of in ("q", "k", "v", "dout"))
    made = FUNCTIONS[name](Builder(case, torch.float32, device=DEVICE))
    mod = ScoreMod.of(made.function, DEVICE)
    mod = mod.with_values(mod.captured, [y.requires_grad for y in mod.captured])
    params, extra = replace(params_of(case, x), score_mod=mod), mod.new_gradients()
    got = replay(kernel, q, k, v, dout, mask_of(case, x["documents"]), size, params, path=path, extra=extra)
    return Played(got, [extra[key] for key in sorted(extra)])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("case", "size", "path"),
    [(ALL, 2, "ring"), (HOLES, 2, "gather"), (LONG, 1, "ring"), (replace(LONG, length=108), 3, "sparse")],
    ids=["all", "holes", "long", "long, sparse"],
)
def test_it_is_the_reference(case: Case, size: int, path: Transfer, name: str) -> None:
    errors = distances(simulated(TRITON, case, name, size, path), simulated(REFERENCE, case, name, 1))
    learned = [errors.pop(key) for key in list(errors) if key.startswith("captured")]
    assert max(errors.values()) < UNROUNDED, errors
    assert bool(learned) == (name != "chosen keys") and max(learned, default=0.0) < CANCELLED, learned


def reasons(function: object, deterministic: bool = False) -> list[str]:
    request = Request(DEVICE.type, torch.float32, 4, 2, 16, 16, False, False, deterministic, score_mod=True)
    mod = ScoreMod.of(function, DEVICE)  # type: ignore[arg-type]
    case = Case(why="small", length=40)
    asked = asking(request, mod, 0.25, None, partial(part_of, mask_of(case, None), 1, case.length))
    assert asked.asked is not None
    return TRITON.unsupported(asked)


SLOPES = torch.linspace(0.1, 1, 4, device=DEVICE).requires_grad_()


class Lying(torch.autograd.Function):
    """A sum that passes twice the gradient on to the score."""

    generate_vmap_rule = True

    @staticmethod
    def forward(score: Tensor, more: Tensor) -> Tensor:
        return score + more

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * gradients[0], gradients[0]


LYING: Callable[..., Tensor] = Lying.apply


def written(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    more = (q_idx - kv_idx).new_zeros(1)
    more[0] = kv_idx % 7
    return score + more.sum()


def written_through_a_view(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    moved = score + SLOPES[h] * (q_idx - kv_idx)
    moved.view(1).mul_(3.0)
    return moved


def without_gradients(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    with torch.no_grad():
        return score + SLOPES[h] * (q_idx - kv_idx)


def test_it_takes_functions_of_head_and_distance() -> None:
    assert reasons(lambda score, b, h, q_idx, kv_idx: score - SLOPES[h] * (q_idx - kv_idx).abs()) == []


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda s, b, h, i, j: SLOPES[h] * (i - j) - s, "does more than to add something"),
        (lambda s, b, h, i, j: s * SLOPES[h], "does more than to add something"),
        (lambda s, b, h, i, j: s + s * (i - j), "does more than to add something"),
        (lambda s, b, h, i, j: SLOPES[h] * (i - j), "does more than to add something"),
        (written, "writes into a tensor"),
        (written_through_a_view, "writes into a tensor"),
        (lambda s, b, h, i, j: s + SLOPES[b], "depends on more than h and"),
        (lambda s, b, h, i, j: s + SLOPES[h] * (i - j) * (j % 3), "depends on more than h and"),
        (lambda s, b, h, i, j: s + SLOPES[h] * (i - 2 * j), "depends on more than h and"),
        (lambda s, b, h, i, j: s + SLOPES[h] * (i + j), "depends on more than h and"),
        (lambda s, b, h, i, j: s + SLOPES[h] * torch.sub(i, j, alpha=2), "depends on more than h and"),
        (lambda s, b, h, i, j: LYING(s, SLOPES[h] * (i - j)), "the gradient of a score is not"),
        (without_gradients, "the gradient of a score is not"),
    ],
)
def test_it_refuses_all_others(function: object, why: str) -> None:
    (reason,) = reasons(function)
    assert why in reason, reason


def test_functions_of_the_same_code_are_told_apart() -> None:
    """flex can write neither down, and their code is the same: what served one must not serve the other."""

    def made(by_distance: bool) -> Callable[..., Tensor]:
        def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            far = (SLOPES * (q_idx - kv_idx)).sum()  # makes a vector for a score
            return score + (far if by_distance else SLOPES[h] * q_idx + far)

        return mod

    assert reasons(made(True)) == []
    (reason,) = reasons(made(False))
    assert "depends on more than h and" in reason


def test_it_takes_the_choice_of_an_indexer() -> None:
    keys = torch.arange(40, device=DEVICE)
    choice = ChosenKeys(keys.view(1, 40, 1) // 2, keys, 40)
    assert reasons(choice) == reasons(choice, deterministic=True) == []


def test_what_learns_has_no_fixed_order() -> None:
    fixed = SLOPES.detach()
    assert reasons(lambda s, b, h, i, j: s + fixed[h] * (i - j), deterministic=True) == []
    (reason,) = reasons(lambda s, b, h, i, j: s + SLOPES[h] * (i - j), deterministic=True)
    assert "in no fixed order" in reason


def test_the_public_function_takes_it() -> None:
    case = replace(ALL, sinks=False, softcap=None)
    x, made = inputs(case, torch.float32), alibi(Builder(case, torch.float32, device=DEVICE))
    q, k, v = (x[of].to(DEVICE).requires_grad_() for of in ("q", "k", "v"))
    wanted = [q, k, v, *made.captured.values()]
    found = {}
    for kernel in ("triton", "reference"):
        out = ring_attention(
            q, k, v, score_mod=made.function, documents=x["documents"], window=(12, 0), config=RingConfig(kernel=kernel)
        )
        found[kernel] = torch.autograd.grad(out, wanted, x["dout"].to(DEVICE))
    for got, want in zip(found["triton"], found["reference"], strict=True):
        assert relative_error(got, want) < UNROUNDED


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has its own blocks")
@pytest.mark.parametrize("keys", [32, 64, 128])
def test_blocks_of_several_words_of_a_choice(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = blocks.Blocks(16, keys, 1, 1)
    monkeypatch.setattr(blocks, "INTERPRETER", blocks.Row(shape, shape, shape))
    case = replace(LONG, length=180, band=sliding(110))
    want = simulated(REFERENCE, case, "chosen keys", 1)
    for got in (simulated(TRITON, case, "chosen keys", 2), simulated(TRITON, case, "chosen keys", 3, "sparse")):
        errors = distances(got, want)
        assert max(errors.values()) < UNROUNDED, errors


@pytest.mark.parametrize("seed", range(20))
def test_bits_follow_their_keys(seed: int) -> None:
    draw = random.Random(seed)
    length, runs, offset = draw.randint(1, 200), [], 0
    cuts = sorted({0, length, *(draw.randint(0, length) for _ in range(draw.randint(0, 5)))})
    for start, stop in draw.sample(list(pairwise(cuts)), draw.randint(1, len(cuts) - 1)):
        runs.append(Keys(offset, start, stop - start))
        offset += stop - start
    chosen = torch.randint(-1, length, (2, 3, 40), generator=torch.Generator().manual_seed(seed))
    of_row = bits_of(chosen, length)
    of_tensor = moved(of_row, runs, offset)
    for run in runs:
        for n in range(run.length):
            here, there = run.offset + n, run.position + n
            assert torch.equal(of_tensor[..., here // 32] >> here % 32 & 1, of_row[..., there // 32] >> there % 32 & 1)
