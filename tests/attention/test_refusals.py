"""What `ring_attention` refuses, and in which words: alone, and on every rank where ranks were called differently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_ring_attn import kernels
from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.attention.kernel_choice import kernel_for
from hf_ring_attn.config import KERNEL_NAMES, RingConfig
from hf_ring_attn.errors import BadOption, BadShape, RanksDiffer, Refused, UnsupportedAttention
from hf_ring_attn.kernels import Request
from hf_ring_attn.kernels.reference import Reference
from tests.helpers.checks import Ranks
from tests.helpers.rank_functions import held, qkv

SAME = "Call ring_attention with the same options on every rank."

SHAPES = [
    ({"q": torch.zeros(8, 4, 6)}, "q has shape (8, 4, 6), but it must be [B, T, H, D]."),
    ({"k": torch.zeros(2, 8, 6)}, "k has shape (2, 8, 6), but it must be [2, 8, G, 6] to go with q."),
    ({"k": torch.zeros(2, 7, 2, 6)}, "k has shape (2, 7, 2, 6), but it must be [2, 8, G, 6] to go with q."),
    ({"k": torch.zeros(1, 8, 2, 6)}, "k has shape (1, 8, 2, 6), but it must be [2, 8, G, 6] to go with q."),
    ({"k": torch.zeros(2, 8, 2, 5)}, "k has shape (2, 8, 2, 5), but it must be [2, 8, G, 6] to go with q."),
    ({"v": torch.zeros(2, 8, 1, 5)}, "v has shape (2, 8, 1, 5), but it must be [2, 8, 2, Dv] to go with k."),
    ({"v": torch.zeros(2, 8, 10)}, "v has shape (2, 8, 10), but it must be [2, 8, 2, Dv] to go with k."),
    (qkv(kv_heads=3), "k has shape (2, 8, 3, 6), but q's 4 heads must be a multiple of its 3 heads."),
    (qkv(kv_heads=0), "k has shape (2, 8, 0, 6), but q's 4 heads must be a multiple of its 0 heads."),
    ({"sinks": torch.zeros(2)}, "sinks has shape (2,), but it must be [4], one for each query head."),
    ({"sinks": torch.zeros(1, 4)}, "sinks has shape (1, 4), but it must be [4], one for each query head."),
    ({"documents": torch.zeros(3, 8).int()}, "documents has shape (3, 8), but it must be [2, 8], the whole row."),
    ({"documents": torch.zeros(7).int()}, "documents has shape (7,), but it must be [2, 8], the whole row."),
    (
        {"length": 9},
        "q has shape (2, 8, 4, 6), but rank 0 of 1 holds 9 tokens of a row of length 9: see hf_ring_attn.positions.",
    ),
]
OPTIONS = [
    ({"k": qkv()["k"].double()}, "k.dtype=torch.float64 is not possible: it must be torch.float32."),
    ({"v": qkv()["v"].half()}, "v.dtype=torch.float16 is not possible: it must be torch.float32."),
    (
        {name: x.long() for name, x in qkv().items()},
        "q.dtype=torch.int64 is not possible: it must be torch.bfloat16 or torch.float16 or torch.float32 or "
        "torch.float64.",
    ),
    *(
        (
            {"window": window},
            f"window={window} is not possible: it must be (left, right) in tokens, each 0 or more, or None for no "
            "bound.",
        )
        for window in ((-1, 0), (None, -1))
    ),
    *(
        ({"softcap": cap}, f"softcap={cap} is not possible: it must be a number above 0, or None for no cap.")
        for cap in (0.0, -2.0, torch.inf, torch.nan)
    ),
    ({"length": -1}, "length=-1 is not possible: it must be a number of tokens, 0 to 2**40."),
]


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [(BadShape, *line) for line in SHAPES] + [(BadOption, *line) for line in OPTIONS],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_refused(kind: type[Exception], change: dict[str, Any], text: str) -> None:
    with pytest.raises(kind) as error:
        ring_attention(**(qkv() | change))
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            {"kernel": "flash3"},
            f"kernel='flash3' is not possible: it must be 'auto' or one of {KERNEL_NAMES}.",
        ),
        ({"backward": "both"}, "backward='both' is not possible: it must be one of ('ring', 'gather')."),
        (
            {"loss": "none"},
            "loss='none' is not possible: it must be one of ('auto', 'chunked', 'sharded', 'gathered').",
        ),
        (
            {"heads_per_gather": 0},
            "heads_per_gather=0 is not possible: it must be a positive number of heads, or None.",
        ),
    ],
)
def test_an_option_that_does_not_exist_is_refused(option: dict[str, Any], text: str) -> None:
    with pytest.raises(BadOption) as error:
        RingConfig(**option)
    assert str(error.value) == text


class Picky(Reference):
    """A kernel that can do little, and says so."""

    name = "picky"

    def unsupported(self, request: Request) -> list[str]:
        return [f"{request.heads} over {request.kv_heads} heads", f"{request.dtype} on {request.device}"]


@pytest.fixture
def only_picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel but `Picky`; what other tests' requests chose before is forgotten, and so is what is chosen here."""
    monkeypatch.setattr(kernels, "KERNELS", {"picky": Picky()})
    kernel_for.cache_clear()
    yield
    kernel_for.cache_clear()


@pytest.mark.usefixtures("only_picky")
def test_a_kernel_that_cannot_says_why() -> None:
    with pytest.raises(UnsupportedAttention) as error:
        ring_attention(**qkv())
    assert str(error.value) == (
        "no kernel can compute this attention exactly:\n  picky: 4 over 2 heads; torch.float32 on cpu"
    )


def called_differently(change: dict[str, Any], same: dict[str, Any] | None = None) -> str:
    """The last rank is called in another way; the text of what every rank raises."""
    x = {name: row[:, held(8, dist.get_rank(), dist.get_world_size())] for name, row in qkv().items()}
    arguments: dict[str, Any] = x | (same or {}) | (change if dist.get_rank() == dist.get_world_size() - 1 else {})
    try:
        ring_attention(**arguments)
    except Refused as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (qkv(4, batch=1), "number of rows (B), but got rank 0: 2, rank 1: 1."),
        (qkv(4, heads=2), "number of query heads (H), but got rank 0: 4, rank 1: 2."),
        (qkv(4, kv_heads=4), "number of key heads (G), but got rank 0: 2, rank 1: 4."),
        (
            {name: qkv(4)[name][..., :3] for name in ("q", "k")},
            "width of a query head (D), but got rank 0: 6, rank 1: 3.",
        ),
        ({"v": qkv(4)["v"][..., :1]}, "width of a value head (Dv), but got rank 0: 5, rank 1: 1."),
        (
            {name: x.double() for name, x in qkv(4).items()},
            "dtype, but got rank 0: torch.float32, rank 1: torch.float64.",
        ),
        ({"causal": False}, "causal, but got rank 0: True, rank 1: False."),
        ({"window": (3, None)}, "window, but got rank 0: (None, None), rank 1: (3, None)."),
        ({"window": (None, 2)}, "window, but got rank 0: (None, None), rank 1: (None, 2)."),
        ({"softcap": 30.0}, "softcap, but got rank 0: None, rank 1: 30.0."),
        ({"scale": 0.5}, f"scale, but got rank 0: {6**-0.5}, rank 1: 0.5."),
        ({"sinks": torch.zeros(4)}, "sinks, but got rank 0: None, rank 1: torch.float32 [4]."),
        ({"config": RingConfig(deterministic=True)}, "deterministic, but got rank 0: False, rank 1: True."),
        ({"config": RingConfig(kernel="reference")}, "kernel, but got rank 0: auto, rank 1: reference."),
        ({"config": RingConfig(backward="gather")}, "backward, but got rank 0: ring, rank 1: gather."),
        ({"config": RingConfig(heads_per_gather=1)}, "heads_per_gather, but got rank 0: None, rank 1: 1."),
        ({"documents": torch.zeros(8).int()}, "documents, but got rank 0: None, rank 1: torch.int32 [8]."),
        ({"q": qkv(4)["q"].requires_grad_()}, "needs a gradient, but got rank 0: False, rank 1: True."),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_ranks_that_are_called_differently_all_say_so(ranks: Ranks, change: dict[str, Any], what: str) -> None:
    first, second = ranks(2).run(called_differently, change)
    assert first == second
    assert first.startswith(f"the ranks of one ring must hold the same {what}")
    assert first.endswith(SAME)


ZEROS, IDS = torch.zeros(4), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 2, 2, 2, 2, 2]])


@pytest.mark.parametrize(
    ("same", "change", "what"),
    [
        ({"scale": 0.3}, {"scale": 0.3 + 1e-16}, "scale, but got rank 0: 0.3, rank 1: 0.3000000000000001."),
        ({"scale": 1e-12}, {"scale": 2e-12}, "scale, but got rank 0: 1e-12, rank 1: 2e-12."),
        ({"softcap": 30.0}, {"softcap": 30.0 + 1e-9}, "softcap, but got rank 0: 30.0, rank 1: 30.000000001."),
        ({"sinks": ZEROS}, {"sinks": torch.tensor([0, 0, 1e-9, 0])}, "sinks[2], but got rank 0: 0.0, rank 1: "),
        ({"sinks": ZEROS}, {"sinks": ZEROS.double() + 1}, "sinks, but got rank 0: torch.float32 [4], "),
        ({"documents": IDS}, {"documents": IDS.clamp(max=1)}, "documents[1, 3], but got rank 0: 2, rank 1: 1."),
        ({"documents": IDS[0]}, {"documents": IDS}, "documents, but got rank 0: torch.int64 [8], rank 1: torch.int64 "),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_values_that_differ_are_noticed_and_shown(
    ranks: Ranks, same: dict[str, Any], change: dict[str, Any], what: str
) -> None:
    first, second = ranks(2).run(called_differently, change, same)
    assert first == second
    assert first.startswith(f"the ranks of one ring must hold the same {what}") and first.endswith(SAME)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"documents": torch.zeros(8)}, "documents.dtype=torch.float32 is not possible"),
        (
            {"documents": torch.tensor([0, 0, -2, -2, -1, -1, 1, 1])},
            "documents=-2 is not possible: it must be ids of 0 or",
        ),
        ({"q": qkv(4)["q"].to(torch.complex64)}, "q.dtype=torch.complex64 is not possible"),
        ({"k": None}, "k=None is not possible: it must be a tensor."),
    ],
)
def test_what_one_rank_refuses_all_ranks_do(ranks: Ranks, change: dict[str, Any], text: str) -> None:
    """Ranks that are given something else must not wait for this one."""
    *others, refused = ranks(3).run(called_differently, change)
    assert refused.startswith(text)
    for other in others:
        assert re.search(
            r"other ranks of its ring raised an error:\n  rank 2: Bad(Option|Shape): " + re.escape(text), other
        )


def half_precisions() -> str:
    dtype = (torch.float16, torch.bfloat16)[dist.get_rank()]
    try:
        ring_attention(**{name: x.to(dtype) for name, x in qkv(4).items()})
    except RanksDiffer as error:
        return str(error)
    return ""


def test_float16_is_not_taken_for_bfloat16(ranks: Ranks) -> None:
    """They have the same size, so that one read as the other would go unnoticed."""
    for text in ranks(2).run(half_precisions):
        assert "dtype, but got rank 0: torch.float16, rank 1: torch.bfloat16." in text


def test_a_share_of_the_wrong_length_is_refused_on_all_ranks(ranks: Ranks) -> None:
    """Three and four tokens: a row of seven is held as four, of which the last chunk is short, and three."""
    text = (
        "the ranks of one ring must hold the same zigzag share of a row, but got rank 0: 4, rank 1: 3. "
        "A row of 7 tokens is held as [3, 4]: see hf_ring_attn.positions."
    )
    assert ranks(2).run(called_differently, {name: x[:, :3] for name, x in qkv().items()}) == [text] * 2


# ---- meshes ----------------------------------------------------------------------------------------------------------


def of_a_mesh() -> tuple[bool, str, str]:
    """If a mesh of one axis is its group, and what is said of one of two axes and of a DTensor."""
    world, rank = dist.get_world_size(), dist.get_rank()
    row = qkv()
    x = {name: whole[:, held(8, rank, world)] for name, whole in row.items()}
    mesh = init_device_mesh("cpu", (world,))
    same = torch.equal(ring_attention(**x, group=mesh), ring_attention(**x))
    texts = []
    for change in (
        {"group": init_device_mesh("cpu", (1, world))}, {"q": distribute_tensor(row["q"], mesh, [Shard(1)])},
    ):  # fmt: skip
        with pytest.raises(BadOption) as refused:
            ring_attention(**{**x, **change})
        texts.append(str(refused.value))
    return same, texts[0], texts[1]


def test_a_mesh_of_one_axis_is_a_group_and_a_dtensor_is_refused_by_name(ranks: Ranks) -> None:
    for same, two_axes, dtensor in ranks(2).run(of_a_mesh):
        assert same
        assert "must be a process group that this rank is in, a mesh of one axis, or None" in two_axes
        assert (
            dtensor.startswith("q='DTensor' is not possible: it must be this rank's part") and ".to_local()" in dtensor
        )
