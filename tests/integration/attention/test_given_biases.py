"""A score_mod that the call of a model is given: for all of its layers, the same on every rank, or refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.biases import Alibi, RelativeBias
from hf_ring_attn.integration.selfcheck import tolerance
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks, alone
from tests.helpers.jobs.plain_jobs import Batch, Step, attempt, gradients_of, packed, ready, tokens, told
from tests.helpers.models import vision_models
from tests.helpers.models.tiny_models import SIZES, build
from tests.helpers.models.vision_models import KINDS


def with_alibi(batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of a model whose call is given learned slopes for all layers, and the slopes' gradient."""
    model, bias = ready(Step(why=""), "ring_fp32"), Alibi(4, learnable=True).double()
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        out = model(**sharded.inputs, score_mod=bias)
    out.loss.backward()
    sharded.reduce_gradients(nn.ModuleList([model, bias]))
    return sharded.gather(out.logits).detach(), gradients_of(bias)["slopes"]


def test_a_call_of_a_model_takes_a_score_mod_for_all_layers(ranks: Ranks) -> None:
    batch = packed(9, 3, 11)
    want, slopes = with_alibi(batch)
    for got, gradient in ranks(2).run(with_alibi, batch):
        assert relative_error(got, want) < 1e-11
        assert relative_error(gradient, slopes) < 1e-6
    assert relative_error(alone(Step(why="", batch=batch)).logits, want) > 0.1


def logits_of_a_family(name: str, wrapped: bool) -> Tensor:
    torch.manual_seed(0)
    model: Any = vision_models.build(KINDS[name], "ring_fp32")
    bias = Alibi(model.get_decoder().config.num_attention_heads, learnable=True)
    function = (lambda *scalars: bias(*scalars)) if wrapped else bias
    sharded = hf_ring_attn.shard(vision_models.batch_of(KINDS[name]))
    with sharded, torch.no_grad():
        return sharded.gather(model(**sharded.inputs, score_mod=function).logits)


@pytest.mark.parametrize("name", ["LLaVA", "Idefics 3"])
def test_a_bias_with_weights_is_no_model(ranks: Ranks, name: str) -> None:
    """Each module that is called in a batch's context was looked at as if it were a model that runs in the ring."""
    if name == "LLaVA" and "cache" in inspect.signature(LlavaForConditionalGeneration.forward).parameters:
        with pytest.raises(errors.UnsupportedArgument, match="CLIPAttention called attention with score_mod"):
            logits_of_a_family(name, wrapped=False)  # since transformers 5.24 the vision tower gets it, too
        return
    want = logits_of_a_family(name, wrapped=False)
    for got in ranks(2).run(logits_of_a_family, name, False):
        assert relative_error(got, want) < 1e-6
    assert relative_error(logits_of_a_family(name, wrapped=True), want) < 1e-6


def test_the_self_check_leaves_a_bias_as_it_is() -> None:
    bias, batch = Alibi(4, learnable=True).double(), tokens(23)
    model = ready(Step(why=""), "ring_fp32")
    with torch.no_grad():
        want = model(**batch, score_mod=bias).logits
        with tolerance.rounded_anew(torch.device("cpu")):
            got = model(**batch, score_mod=bias).logits
    assert 0 < relative_error(got, want) < 1e-9


# ---- refusals --------------------------------------------------------------------------------------------------------


def called(kind: str, compiled: str = "", named: bool = False) -> None:
    torch._dynamo.reset()
    config: dict[str, Any] = {**SIZES, "state_size": 4}
    model = build(kind, **config)
    hf_ring_attn.configure(model, hf_ring_attn.RingConfig())
    call: Any = model
    if compiled == "in place":
        model.compile(backend="eager")
    elif compiled:
        call = torch.compile(model, backend="eager")
    sharded = hf_ring_attn.shard(tokens(24), model=call if named else None)
    with sharded:
        call(**sharded.inputs, score_mod=Alibi(4))


DROPPED = {
    "NemotronForCausalLM": "reached 0 of its 2 attentions",
    "StableLmForCausalLM": "reached 0 of its 2 attentions",
    "MambaForCausalLM": "reached none of its attentions",
}


@pytest.mark.parametrize("kind", DROPPED)
def test_models_that_do_not_hand_it_on_are_refused(ranks: Ranks, kind: str) -> None:
    for refusal in ranks(2).run(attempt, called, kind):
        assert refusal is not None
        name, text = refusal
        assert name == "ScoreModDropped"
        assert text.startswith(f"{kind} was called with a score_mod, which {DROPPED[kind]}: its layers do not pass on")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("compiled", ["in place", "wrapped"])
@pytest.mark.turns
def test_so_are_they_compiled(ranks: Ranks, compiled: str, named: bool) -> None:
    for refusal in ranks(2).run(attempt, called, "NemotronForCausalLM", compiled, named):
        assert refusal is not None
        assert refusal[0] == "ScoreModDropped"
        assert refusal[1].startswith("NemotronForCausalLM was called with a score_mod, which reached 0 of its 2 ")


def other_numbers() -> None:
    torch.manual_seed(dist.get_rank())
    model, bias = ready(Step(why=""), "ring_fp32"), RelativeBias(4, 8, 12)
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(bias.weight)
    sharded = hf_ring_attn.shard(tokens(24))
    with sharded:
        model(**sharded.inputs, score_mod=bias)


def test_ranks_with_other_numbers_all_say_so(ranks: Ranks) -> None:
    """As a bias has that nobody seeded."""
    for refusal in ranks(2).run(attempt, other_numbers):
        assert refusal is not None
        name, text = refusal
        assert name == "RanksDiffer"
        assert "must hold the same tensors of the score_mod[0][0, 0], but got rank 0: " in text
        assert "seed a learned bias alike, or make it a part of the model" in text


def bias_loop(reduces: bool) -> None:
    model, bias = ready(Step(why=""), "ring_fp32"), Alibi(4, learnable=True)
    optimizer = torch.optim.SGD([*model.parameters(), *bias.parameters()], lr=0.1)
    for _ in range(2):
        sharded = hf_ring_attn.shard(tokens(23))
        with sharded:
            loss = model(**sharded.inputs, score_mod=bias).loss
        loss.backward()
        sharded.reduce_gradients(nn.ModuleList([model, bias]) if reduces else model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("reduces", [True, False])
def test_no_bias_drifts_that_is_not_reduced(ranks: Ranks, reduces: bool) -> None:
    """It drifted, with a warning; now its gradient is averaged at the end of the backward."""
    assert ranks(2).run(told, bias_loop, reduces) == [[], []]
