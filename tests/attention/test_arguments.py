"""Public functions called with what they cannot take: each call ends in a refusal that names the argument, or well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import hf_ring_attn
from hf_ring_attn import Refused, RingConfig, ring_attention
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from tests.helpers.rank_functions import qkv

IDS = torch.arange(16).view(2, 8)


class Config:
    _attn_implementation = "ring_fp32"


MODEL = nn.Linear(1, 1)
MODEL.__dict__["config"] = Config()


class Entry(NamedTuple):
    """A function, arguments that it takes, and which of them are tried; a wrong one may be named by its partners."""

    call: Callable[..., object]
    valid: dict[str, Any]
    tried: tuple[str, ...] = ()
    partners: tuple[str, ...] = ()


def shard_of(**batch: Any) -> object:
    return hf_ring_attn.shard({name: x for name, x in batch.items() if x is not None})


ENTRIES = {
    "ring_attention": Entry(
        ring_attention,
        {
            **qkv(), "group": None, "causal": True, "window": (None, None), "documents": None, "softcap": None,
            "sinks": None, "score_mod": None, "scale": None, "length": None, "return_lse": False,
            "config": RingConfig(),
        },
        partners=("q", "k", "v"),
    ),
    "positions": Entry(hf_ring_attn.positions, {"length": 8, "rank": 0, "world_size": 2}, partners=("rank",)),
    "RingConfig": Entry(RingConfig, {
        "backward": "ring", "heads_per_gather": None, "traffic": "auto", "loss": "sharded", "layout": "auto",
        "pad": True, "deterministic": False, "save_attention": False, "self_check": True,
    }),
    "configure": Entry(hf_ring_attn.configure, {"model": MODEL, "config": RingConfig()}),
    "shard": Entry(
        hf_ring_attn.shard, {"batch": {"input_ids": IDS}, "group": None, "config": None, "model": None},
        partners=("input_ids",),
    ),
    "shard of": Entry(
        shard_of,
        {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS), "position_ids": IDS % 8},
        partners=("shape", "input_ids"),
    ),
    "Layout": Entry(Layout, {"length": 8, "world_size": 2, "rank": 0, "owners": ()}, partners=("rank",)),
    "Layout.runs": Entry(Layout(8, 2, 0).runs, {"rank": 0}),
    "Layout.positions": Entry(Layout(8, 2, 0).positions, {"rank": 0}),
    "Layout.pad": Entry(Layout(7, 2, 0).pad, {"row": IDS[:, :7], "dim": 1, "value": 0}, partners=("row",)),
    "Layout.shard": Entry(Layout(8, 2, 0).shard, {"row": IDS, "dim": 1}, partners=("row",)),
    "Layout.merge": Entry(Layout(8, 2, 0).merge, {"gathered": IDS.view(2, 2, 4)}),
    "Layout.split": Entry(Layout(8, 2, 0).split, {"row": IDS}),
    "Mask.of": Entry(
        Mask.of, {"band": CAUSAL, "batch": 2, "length": 8, "documents": IDS, "hidden": IDS > 3},
        partners=("documents",),
    ),
}  # fmt: skip

VALUES: dict[str, Any] = {
    "None": None, "text": "x", "no text": "", "bytes": b"x", "list": [1, 2], "no list": [], "dict": {"a": 1},
    "no dict": {}, "tuple": (), "a pair of texts": ("x", "y"), "a pair below 0": (-1, -1), "three": (1, 2, 3),
    "a pair of huge": (2**80, 2**80), "a pair of floats": (1.5, torch.nan), "set": {1}, "0": 0, "1": 1, "-1": -1,
    "9": 9, "huge": 2**70, "-huge": -(2**70), "too large for a float": 10**400, "1.5": 1.5, "0.0": 0.0,
    "nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "True": True, "False": False, "complex": 1j,
    "object": object(), "function": len, "function of nothing": lambda: 0, "type": int, "dtype": torch.float32,
    "numpy integer": np.int64(4), "numpy float": np.float32(0.5), "array": np.zeros((2, 8)), "config": RingConfig(),
    "a module": nn.Linear(1, 1), "a mask": torch.ones(2, 8, dtype=torch.bool), "of no dim": torch.tensor(1),
    "empty": torch.zeros(0), "of one dim": torch.zeros(8), "of three dims": torch.zeros(2, 8, 6),
    "of five dims": torch.zeros(1, 2, 8, 4, 6), "integers": torch.zeros(2, 8, 4, 6, dtype=torch.int64),
    "bools": torch.zeros(2, 8, 4, 6, dtype=torch.bool), "complex numbers": torch.zeros(2, 8, 4, 6).to(torch.complex64),
    "double": torch.zeros(2, 8, 4, 6).double(), "half": torch.zeros(2, 8, 4, 6).half(),
    "float8": torch.zeros(2, 8, 4, 6).to(torch.float8_e4m3fn), "no heads": torch.zeros(2, 8, 0, 6),
    "no width": torch.zeros(2, 8, 4, 0), "no tokens": torch.zeros(2, 0, 4, 6), "no rows": torch.zeros(0, 8, 4, 6),
    "nans": torch.full((2, 8, 4, 6), torch.nan), "sparse": torch.zeros(2, 8, 4, 6).to_sparse(),
    "sparse ids": IDS.to_sparse(), "meta": torch.zeros(2, 8, 4, 6, device="meta"),
    "meta of a row": torch.zeros(2, 8, device="meta", dtype=torch.int64), "meta sinks": torch.zeros(4, device="meta"),
    "float ids": IDS.float(), "other ids": IDS[:, :5], "unsigned": torch.zeros(2, 8, dtype=torch.uint64),
    "nested": torch.nested.nested_tensor([torch.zeros(8, 4, 6), torch.zeros(8, 4, 6)]),
    "quantized": torch.quantize_per_tensor(torch.zeros(2, 8, 4, 6), 0.1, 0, torch.qint8),
    "complex sinks": torch.zeros(4).to(torch.complex64), "integer sinks": torch.zeros(4, dtype=torch.int32),
}  # fmt: skip


def outcome(call: Callable[..., object], given: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Nothing where the call ends well, or in a refusal that has one of these names; else what it ended in."""
    try:
        call(**given)
    except Refused as error:
        return "" if any(name in str(error) for name in names) else f"refused without a name: {error}"
    except Exception as error:  # noqa: BLE001  each is what is looked for
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("which", "name"), [(which, name) for which, entry in ENTRIES.items() for name in entry.tried or entry.valid]
)
def test_every_argument_is_refused_by_name_or_served(which: str, name: str) -> None:
    entry = ENTRIES[which]
    ends = {
        value: outcome(entry.call, entry.valid | {name: VALUES[value]}, (name, *entry.partners)) for value in VALUES
    }
    assert {value: end for value, end in ends.items() if end} == {}


def test_the_valid_calls_are_served() -> None:
    for entry in ENTRIES.values():
        entry.call(**entry.valid)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", 1), ("causal", "False"), ("return_lse", 1), ("window", (True, None)), ("window", [1.0, None]),
        ("scale", True), ("scale", torch.nan), ("softcap", True), ("documents", IDS.float()), ("documents", IDS > 3),
        ("score_mod", "alibi"), ("config", {"kernel": "auto"}), ("group", "world"), ("sinks", [0.0] * 4),
        ("length", 8.0), ("k", qkv()["k"].to("meta")),
    ],
)  # fmt: skip
def test_what_would_be_taken_for_something_else_is_refused(name: str, value: object) -> None:
    with pytest.raises(Refused, match=rf"^{name}(=|\.dtype=|\.device=)"):
        ring_attention(**{**qkv(), name: value})


@pytest.mark.parametrize("pad", ["no", 1, None])
def test_a_flag_is_true_or_false(pad: object) -> None:
    with pytest.raises(Refused, match=r"^pad="):
        RingConfig(pad=pad)  # type: ignore[arg-type]
