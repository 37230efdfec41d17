"""The inputs with which the self-check calls a model."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn.integration.selfcheck import row
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.jobs.self_check_jobs import shards
from tests.helpers.models.remote_models import remote
from tests.helpers.models.tiny_models import tiny


def step(with_key: bool) -> tuple[float, list[str]]:
    """The loss of a batch, and warnings; the loop takes ``target`` out, with which the call would fail."""
    model = tiny("llama", "ring_fp32")
    batch: dict[str, Any] = tokens(23)
    if with_key:
        batch["target"] = batch["labels"].clone()
    with mock.patch.object(row, "warn") as said, hf_ring_attn.shard(batch) as sharded:
        inputs = {name: x for name, x in sharded.inputs.items() if name != "target"}
        loss = model(**inputs).loss
    return float(sharded.reduce(loss)), [call.args[0] for call in said.call_args_list]


def refused() -> tuple[str, str] | None:
    """What a model is refused with that takes no row of the check, whatever the inputs."""
    model: Any = tiny("llama", "ring_fp32")
    forward = model.model.forward

    def picky(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] != 12:  # a rank's share of 23 tokens
            raise TypeError("a row of another length")
        return forward(*args, **kwargs)

    model.model.forward = picky

    def one_step() -> None:
        with hf_ring_attn.shard(tokens(23)) as sharded:
            model(**sharded.inputs)

    return attempt(one_step)


def test_a_key_that_the_program_takes_out_is_no_input(ranks: Ranks) -> None:
    want = ranks(2).run(step, False)
    for (loss, said), (expected, nothing) in zip(ranks(2).run(step, True), want, strict=True):
        assert loss == expected and not nothing and len(said) == 1
        assert said[0].startswith("the self-check called LlamaForCausalLM without ['target'], since with all ")


class PassesCache(nn.Module):
    """A program's own module that passes use_cache itself, as Medusa's heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.base: Any = tiny("llama", "ring_fp32")

    def forward(self, **inputs: Any) -> Any:
        return self.base(**inputs, use_cache=False)


def step_of_own_module() -> tuple[float, int]:
    """The loss of a module of a program's own, and how many warnings there were."""
    module = PassesCache()
    with mock.patch.object(row, "warn") as said, hf_ring_attn.shard(tokens(23)) as sharded:
        loss = module(**{name: x for name, x in sharded.inputs.items() if name != "use_cache"}).loss
    return float(sharded.reduce(loss)), said.call_count


def test_a_module_that_passes_use_cache_itself(ranks: Ranks) -> None:
    """It was refused: "got multiple values for keyword argument 'use_cache'", and in Trainer it got whole rows."""
    (want, _), *_ = ranks(2).run(step, False)
    assert ranks(2).run(step_of_own_module) == [(want, 0)] * 2


def second_batch_with_more(wrapped: bool) -> tuple[str, list[str]]:
    """What a model is refused with whose error shows with an input that its second batch brings."""
    model: Any = shards(remote().train()) if wrapped else remote().train()
    batch, passed = tokens(23), list[str]()
    for more in ({}, {"paces": torch.ones(2, 23)}):
        try:
            with hf_ring_attn.shard({**batch, **more}) as sharded:
                model(**sharded.inputs).loss.backward()
        except hf_ring_attn.RingAttentionError as error:
            return type(error).__name__, passed
        passed.append(sharded.context.state(row.SelfCheckState).verdict)
    return "", passed


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_input_that_a_later_batch_brings_is_tried(ranks: Ranks, wrapped: bool) -> None:
    """Only the first batch's inputs were: a loss of 5.14 for 5.08, silently."""
    assert ranks(2).run(second_batch_with_more, wrapped) == [("SelfCheckFailed", ["passed"])] * 2


def test_a_model_that_takes_no_row_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(refused):
        assert said is not None and said[0] == "SelfCheckNotRun" and "a row of another length" in said[1]


class Named(nn.Module):
    """Adds an embedding of each row's speaker, and of a number of it, to its words."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.inner: Any = tiny("llama", attention)
        torch.manual_seed(0)
        self.speakers = nn.Embedding(5, 32)

    def forward(self, input_ids: Tensor, speakers: list[str], about: dict[str, Any], **rest: Any) -> Any:
        ids = torch.tensor([len(name) for name in speakers])
        one = self.speakers(ids) * about["loudness"][:, None] * about["gain"]
        return self.inner(inputs_embeds=self.inner.get_input_embeddings()(input_ids) + one[:, None], **rest)


def loss_of_speakers(attention: str) -> float:
    batch = {**tokens(23), "speakers": ["a", "bcd"], "about": {"loudness": torch.tensor([1.0, 0.5]), "gain": 2.0}}
    model = Named(attention).double()
    if attention == "eager":
        return float(model(**batch).loss.detach())
    with hf_ring_attn.shard(batch) as sharded:
        return float(model(**sharded.inputs).loss.detach())


def test_lists_and_dicts_with_an_entry_for_each_row_are_inputs(ranks: Ranks) -> None:
    """The check's row got the entries of all rows: BadShape, of a mask that nobody had given."""
    assert ranks(2).run(loss_of_speakers, "ring_fp32") == [pytest.approx(loss_of_speakers("eager"), rel=1e-6)] * 2
