"""Tokens that a program changes between `shard` and the model: a ring cannot see whether by others, so it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import Trainer

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.errors import OtherInputs
from hf_ring_attn.integration.model import changed_tokens
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, trainer_of
from tests.helpers.models.tiny_models import tiny

Change = Callable[[Any, Tensor], dict[str, Tensor]]


def embedded(net: Any, ids: Tensor) -> Tensor:
    found: Tensor = net.get_input_embeddings()(ids)
    return found


def first_token(net: Any, ids: Tensor) -> dict[str, Tensor]:
    """A token by its place in the tensor."""
    ids = ids.clone()
    ids[:, 0] = 5
    return {"input_ids": ids}


def in_place(net: Any, ids: Tensor) -> dict[str, Tensor]:
    ids[:, 0] = 5
    return {"input_ids": ids}


def centred(net: Any, ids: Tensor) -> dict[str, Tensor]:
    """Embeddings without their mean."""
    found = embedded(net, ids)
    return {"inputs_embeds": found - found.mean(1, keepdim=True)}


def shifted(net: Any, ids: Tensor) -> dict[str, Tensor]:
    """Each with its left neighbour's."""
    found = embedded(net, ids)
    return {"inputs_embeds": found + found.roll(1, 1)}


def unchanged(net: Any, ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids}


def copied(net: Any, ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids.clone()}


def own_embeddings(net: Any, ids: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds": embedded(net, ids)}


def in_half(net: Any, ids: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds": embedded(net, ids).bfloat16().float()}


def placed(net: Any, ids: Tensor) -> dict[str, Tensor]:
    """With positions of its own, of a rank's length."""
    found = embedded(net, ids)
    return {"inputs_embeds": found + torch.linspace(0, 1, found.shape[1])[:, None]}


def mixed_rows(net: Any, ids: Tensor) -> dict[str, Tensor]:
    """Each token with that at its place in another row."""
    found = embedded(net, ids)
    return {"inputs_embeds": 0.7 * found + 0.3 * found.flip(0)}


CHANGES = [first_token, in_place, placed, mixed_rows, in_half]


def refused(change: Change) -> str:
    """What a loop's call raises."""
    net = tiny("llama", "ring_fp32")
    rows = Rows(count=2, length=23)
    sharded = hf_ring_attn.shard(rows.collate(rows.make()))
    inputs = dict(sharded.inputs)
    with sharded:
        given = change(net, inputs.pop("input_ids"))
        try:
            net(**inputs, **given)
        except OtherInputs as error:
            return str(error)
    return ""


def warned(change: Change, model: str) -> list[str]:
    """What a loop's step says whose call has changed tokens."""
    net = tiny(model, "ring_fp32")
    rows = Rows(count=2, length=23)
    sharded = hf_ring_attn.shard(rows.collate(rows.make()))
    inputs = dict(sharded.inputs)
    with mock.patch.object(changed_tokens, "warn") as warn, sharded:
        given = change(net, inputs.pop("input_ids"))
        net(**inputs, **given).loss.backward()
    sharded.reduce_gradients(net)
    return [str(call.args[0]) for call in warn.call_args_list]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_tokens_are_said(ranks: Ranks, change: Change) -> None:
    """Silent, losses were off by 0.02 to 0.06 of their value in the first steps."""
    name = "input_ids" if change in (first_token, in_place) else "inputs_embeds"
    for said in ranks(2).run(warned, change, "llama"):
        assert [f"other {name} than those of the batch" in text for text in said] == [True], said


@pytest.mark.parametrize("model", ["llama", "gemma2"])
@pytest.mark.parametrize("change", [unchanged, copied, own_embeddings], ids=lambda change: change.__name__)
def test_others_are_not(ranks: Ranks, change: Change, model: str) -> None:
    """Gemma's embeddings are scaled in their module."""
    assert ranks(2).run(warned, change, model) == [[], []]


@pytest.mark.parametrize("change", [centred, shifted], ids=lambda change: change.__name__)
def test_embeddings_of_other_tokens_are_refused(ranks: Ranks, change: Change) -> None:
    for text in ranks(2).run(refused, change):
        assert "another inputs_embeds (mixed tokens)" in text


class Hides(Trainer):
    """Hides words that are their left neighbours: the self-check's row has none at a chunk's border."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = inputs["input_ids"]
        like = torch.nn.functional.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
        return super().compute_loss(model, {**inputs, "input_ids": ids.masked_fill(like, 7)}, *args, **kwargs)


def said_by(kind: type[Trainer], loss: Any) -> list[str]:
    with launched(Mesh(cp=2)), a_folder(None) as folder, mock.patch.object(changed_tokens, "warn") as warn:
        run = Run(why="", steps=1, ring=RingConfig(loss=loss))
        rows = run.rows.make()
        for row in rows:
            row["input_ids"][9] = row["input_ids"][8]
        trainer_of(run, Mesh(cp=2), folder, kind=kind, train_dataset=rows).train()
        return [str(call.args[0]) for call in warn.call_args_list]


def test_a_trainer_says_so_if_its_loss_must_not_be_of_whole_rows(ranks: Ranks) -> None:
    assert all(any("input_ids" in text for text in said) for said in ranks(2).run(said_by, Hides, "sharded"))
    assert ranks(2).run(said_by, Hides, "auto") == [[], []]
    assert ranks(2).run(said_by, Trainer, "sharded") == [[], []]
