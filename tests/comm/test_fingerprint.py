"""Fingerprints of tensors and values, and the search for the first value that differs from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy
import pytest
import torch
from torch import Tensor

from hf_ring_attn.comm import fingerprint as fingerprint_module
from hf_ring_attn.comm.fingerprint import PIECE, fingerprint
from tests.comm.test_ring import agreed
from tests.helpers.checks import Ranks
from tests.helpers.live_bytes import peak_bytes

TOKENS, ZEROS = torch.arange(24).view(2, 12), torch.zeros(2, 2, dtype=torch.float64)
OTHER = TOKENS.clone()
OTHER[1, 5] = -7


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (TOKENS, OTHER, "x[1, 5], but got rank 0: 17, rank 1: -7."),
        (TOKENS.T, OTHER.T, "x[5, 1], but got rank 0: 17, rank 1: -7."),
        (ZEROS, ZEROS.nextafter(ZEROS + 1), "x[0, 0], but got rank 0: 0.0, rank 1: 5e-324."),
        (TOKENS[0, 3], TOKENS[0, 4], "x, but got rank 0: 3, rank 1: 4."),
        (TOKENS, TOKENS[:, :9], "x, but got rank 0: torch.int64 [2, 12], rank 1: torch.int64 [2, 9]."),
        (TOKENS, None, "x, but got rank 0: torch.int64 [2, 12], rank 1: None."),
        (0.1, 0.1 + 2e-17, "x, but got rank 0: 0.1, rank 1: 0.10000000000000002."),
        (None, 0, "x, but got rank 0: None, rank 1: 0."),
        (numpy.int64(3), numpy.int64(4), "x, but got rank 0: 3, rank 1: 4."),
        ((numpy.float32(0.5), None), (0.25, None), "x, but got rank 0: (np.float32(0.5), None), rank 1: (0.25, None)."),
        (numpy.array([1.5, 2.5]), numpy.array([1.5, 3.5]), "x, but got rank 0: [1.5 2.5], rank 1: [1.5 3.5]."),
        (numpy.True_, numpy.False_, "x, but got rank 0: True, rank 1: False."),
        (1 + 2j, 1 + 3j, "x, but got rank 0: (1+2j), rank 1: (1+3j)."),
        (b"a", b"b", "x, but got rank 0: b'a', rank 1: b'b'."),
        (torch.tensor([0, 0.25j]), torch.tensor([0, 0.5 + 0.25j]), "x[1], but got rank 0: 0.25j, rank 1: (0.5+0.25j)."),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), "x[0], but got rank 0: (1+2j), rank 1: (1+3j)."),
        (2**80, 2**80 + 1, f"x, but got rank 0: {2**80}, rank 1: {2**80 + 1}."),
        (torch.float16, torch.bfloat16, "x, but got rank 0: torch.float16, rank 1: torch.bfloat16."),
        ("a" * 90 + "b", "a" * 90 + "c", f"x, but got rank 0: ...{'a' * 20}b, rank 1: ...{'a' * 20}c."),
        ((None, 3), (None, 4), "x, but got rank 0: (None, 3), rank 1: (None, 4)."),
        ([*range(99)], [*range(98), 0], "x[98], but got rank 0: 98, rank 1: 0."),
        ({"b": [0, TOKENS]}, {"b": [0, OTHER]}, "x['b'][1][1, 5], but got rank 0: 17, rank 1: -7."),
        ({"a": TOKENS}, {"b": TOKENS}, "x, but got rank 0: ['a'], rank 1: ['b']."),
        ([TOKENS], [], "x, but got rank 0: 1 values, rank 1: []."),
    ],
    ids=str,
)
def test_the_first_value_that_differs_is_shown(ranks: Ranks, first: object, second: object, text: str) -> None:
    facts = [{"rows": 2, "x": first, "y": 0}, {"rows": 2, "x": second, "y": 1}]
    for kind, told, _ in ranks(2).run(agreed, facts, [None] * 2):
        assert (kind, told) == ("RanksDiffer", f"the ranks of one ring must hold the same {text} Give them the same.")


def test_equal_values_are_found_equal(ranks: Ranks) -> None:
    held = {"a": [TOKENS, 0.5], "b": (None, "text", 2**80), "c": torch.float16, "d": True, "e": TOKENS.T, "f": len}
    alike = {**held, "e": TOKENS.T.contiguous()}
    held["n"], alike["n"] = [numpy.int64(3), numpy.float32(0.5)], [3, 0.5]
    assert ranks(2).run(agreed, [held, alike], [None] * 2) == [("", "", ["gather"])] * 2


def test_the_first_fact_that_differs_is_named(ranks: Ranks) -> None:
    facts = [{"rows": n, "tokens": 7 - n} for n in (2, 3)]
    for _, text, _ in ranks(2).run(agreed, facts, [None] * 2):
        assert "the same rows, but got rank 0: 2, rank 1: 3." in text


def test_fingerprints_tell_tensors_apart() -> None:
    x = torch.arange(12)
    other = x.clone()
    other[7] = 0
    tensors = [
        None, x, other, x.view(3, 4), x.view(4, 3), x.flip(0), x[:-1], x.float(), x.double() / 3, torch.zeros(12),
        torch.zeros(13), torch.zeros(0), x > 3, x - 2**62, x[[1, 0, *range(2, 12)]],
    ]  # fmt: skip
    prints = [fingerprint(tensor) for tensor in tensors]
    assert len(set(prints)) == len(tensors)
    assert all(-(2**63) <= number < 2**63 for number in prints)
    assert prints == [fingerprint(tensor) for tensor in tensors]
    assert fingerprint(x.view(4, 3).T.contiguous()) == fingerprint(x.view(4, 3).T)


def test_every_value_of_a_large_tensor_is_in_its_fingerprint() -> None:
    """Of more than 2**24 values, as many pixels are, only a sample was: here each third."""
    x = torch.zeros(2**25 + 1, dtype=torch.uint8)
    want = fingerprint(x)
    for place in (1, 2**18 - 1, 2**18, 2**24 + 1, 2**25 - 1):
        x[place] = 1
        assert fingerprint(x) != want, place
        x[place] = 0
    assert fingerprint(x) == want


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x, "rows swapped for columns": lambda x: x.T, "every second": lambda x: x[::2, 1:],
    "one row for all": lambda x: x[:1].expand(9, -1), "three dims turned": lambda x: x.view(6, 5, 4).permute(2, 0, 1),
    "flat": lambda x: x.flatten(), "one value": lambda x: x[0, 0], "nothing": lambda x: x[:0].T,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("why", LAYOUTS)
def test_a_fingerprint_knows_no_pieces_and_no_memory_order(
    why: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = LAYOUTS[why](torch.randn(12, 10, generator=torch.Generator().manual_seed(3)).mul(50).to(dtype))
    want = fingerprint(x)
    for values in (1, 4, 7, 64):
        monkeypatch.setattr(fingerprint_module, "PIECE", values)
        assert fingerprint(x) == fingerprint(x.clone(memory_format=torch.contiguous_format)) == want


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fingerprints_of_many_values_that_differ_little_differ_all_over(dtype: torch.dtype) -> None:
    """Each of their 64 bits, though floats of few digits differ in their high bits only."""
    x = torch.arange(64).to(dtype).repeat(2, 1)
    prints = []
    for step in range(512):
        x[step % 2, step % 64] += 1
        prints.append(fingerprint(x))
    flips = torch.tensor([[(a ^ b) >> bit & 1 for bit in range(64)] for a, b in pairwise(prints)])
    assert (flips.double().mean(0) - 0.5).abs().max() < 0.1


def test_a_fingerprint_needs_memory_for_one_piece() -> None:
    x = torch.zeros(4096, 1024, dtype=torch.uint8)
    for large in (x, x.T, x.view(2, 2048, 1024).permute(0, 2, 1)):
        assert peak_bytes(lambda: fingerprint(large)) < 100 * PIECE  # noqa: B023  called at once


def test_fingerprints_are_the_same_in_every_process(ranks: Ranks) -> None:
    """Ranks are forked from a process with a seed of its own for Python's hashes."""
    x = torch.arange(12).view(3, 4)
    assert set(ranks(2).run(fingerprint, x)) == {fingerprint(x)}
