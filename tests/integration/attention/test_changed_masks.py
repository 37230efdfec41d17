"""Padding masks that a forward of the program's own, or a hook, changes inside of a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ring_attn
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, padded, tokens
from tests.helpers.models.tiny_models import tiny

CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hides more tokens": lambda mask, ids: mask * (ids % 7 != 0),
    "hides none": lambda mask, ids: torch.ones_like(mask),
    "of other rows": lambda mask, ids: mask.flip(0),
    "of one row": lambda mask, ids: mask[:1],
}
SAME: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of another dtype": lambda mask, ids: mask.bool(),
    "made from the padding's id": lambda mask, ids: (ids != 0).long(),
}


class Changes(nn.Module):
    """Calls a model with another mask. ``by_hook``: a hook of its text model changes it."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor], by_hook: bool = False) -> None:
        super().__init__()
        self.inner: Any = tiny("llama", "ring_fp32")
        self.change, self.by_hook = change, by_hook

        def hook(_model: nn.Module, args: Any, given: dict[str, Any]) -> Any:
            return args, {**given, "attention_mask": change(given["attention_mask"], given["input_ids"])}

        if by_hook:
            self.inner.model.register_forward_pre_hook(hook, with_kwargs=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Any:
        mask = attention_mask if self.by_hook or attention_mask is None else self.change(attention_mask, input_ids)
        return self.inner(input_ids=input_ids, attention_mask=mask, **rest)


def error_of(how: str, by_hook: bool = False, left: int = 3) -> tuple[str, str] | None:
    batch = padded(23, left=left) if left else tokens(23)
    batch["input_ids"] = batch["input_ids"].clamp(min=1)
    if left:
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 0)
    model = Changes({**CHANGES, **SAME}[how], by_hook)

    def step() -> None:
        with hf_ring_attn.shard(batch) as sharded:
            model(**sharded.inputs)

    return attempt(step)


@pytest.mark.parametrize("by_hook", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_another_mask_is_refused(ranks: Ranks, how: str, by_hook: bool) -> None:
    """The batch's stood for it, silently: weights of a tiny Llama were 0.1 off after four steps (of their size)."""
    for said in ranks(2).run(error_of, how, by_hook):
        assert said is not None and said[0] in ("OtherInputs", "RefusedElsewhere"), said
        assert "A model (LlamaConfig) was called in a ring with another attention_mask. One rank's " in said[1]


@pytest.mark.parametrize("how", SAME)
def test_a_mask_that_hides_the_same_tokens_is_the_batch_s(ranks: Ranks, how: str) -> None:
    assert ranks(2).run(error_of, how) == [None, None]


def test_without_padding_a_mask_that_hides_nothing_is(ranks: Ranks) -> None:
    assert ranks(2).run(error_of, "hides none", False, 0) == [None, None]


def error_of_documents(change: str) -> tuple[str, str] | None:
    """Of packed rows, whose documents a forward changes by position ids."""
    model, batch = tiny("llama", "ring_fp32"), tokens(20)
    lengths = torch.tensor([[5, 15], [12, 8]])
    batch["position_ids"] = torch.stack([torch.cat([torch.arange(int(n)) for n in row]) for row in lengths])
    changed: Any = {"other rows'": lambda x: x.flip(0), "offset": lambda x: x + 3}[change]

    def hook(_model: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        return args, {**given, "position_ids": changed(given["position_ids"])}

    model.model.register_forward_pre_hook(hook, with_kwargs=True)

    def step() -> None:
        with hf_ring_attn.shard(batch) as sharded:
            model(**sharded.inputs)

    return attempt(step)


def test_position_ids_with_other_documents_are_refused(ranks: Ranks) -> None:
    """The batch's documents stood for them, silently (weights 0.17 off after three steps)."""
    for said in ranks(2).run(error_of_documents, "other rows'"):
        assert said is not None and said[0] in ("OtherInputs", "RefusedElsewhere"), said
        assert "A model (LlamaConfig) was called in a ring with another position_ids. One rank's " in said[1]


def test_position_ids_with_the_same_documents_are_not(ranks: Ranks) -> None:
    assert ranks(2).run(error_of_documents, "offset") == [None, None]
