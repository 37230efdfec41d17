"""Suspicious parts of a program's own model: the self-check decides, since the same part may be exact or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE  # under a name of the program's own

import hf_ring_attn
from hf_ring_attn import RingConfig
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.models.tiny_models import VOCABULARY, tiny
from tests.integration.losses.test_custom_forward import assert_same_step, step

WIDTH = 32


class Attends(nn.Module):
    """A layer that calls transformers' attention interface; ``local``: torch's attention in its place."""

    is_causal, num_key_value_groups = True, 1

    def __init__(self, config: Any, local: bool) -> None:
        super().__init__()
        self.config, self.local, self.qkv = config, local, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.local:
            found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            found, _ = INTERFACE[self.config._attn_implementation](self, q, k, v, mask, scaling=1.0)
        return x + found.flatten(2)


class Own(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A model without positions; ``local``: with a rank's places, as one row of numbers."""

    config_class = LlamaConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: Any, local: bool = False) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Attends(config, local) for _ in range(2))
        self.places = nn.Embedding(64, WIDTH) if local else None
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **inputs: Any) -> Any:
        x = self.embed(input_ids)
        if self.places is not None:
            x = x + self.places(torch.arange(x.shape[1]))
        mask = create_causal_mask(self.config, x, attention_mask, None)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x)
        given = {name: inputs.get(name) for name in ("shift_labels", "num_items_in_batch")}
        loss = None if labels is None else self.loss_function(logits, labels, VOCABULARY, **given)
        return CausalLMOutput(loss=loss, logits=logits)


def own(model: Any, local: bool = False) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH)
    attention = model.config._attn_implementation
    return Own._from_config(config, attn_implementation=attention, local=local)  # type: ignore[no-untyped-call]


class Beside(nn.Module):
    """Adds to an MLP's output what a module makes of it."""

    def __init__(self, mlp: nn.Module, module: nn.Module, over: str) -> None:
        super().__init__()
        self.mlp, self.module, self.over = mlp, module, over

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(x)
        return found if self.over == "nothing" else found + self.of(found)

    def of(self, x: Tensor) -> Tensor:
        module: Any = self.module
        if isinstance(module, nn.Conv1d):
            if self.over == "features":
                found: Tensor = module(x.flatten(0, 1)[:, None])
                return found.view_as(x)
            reach = module.dilation[0] * (module.kernel_size[0] - 1)
            of_tokens: Tensor = module(nn.functional.pad(x.mT, (reach, 0))).mT
            return of_tokens
        if isinstance(module, nn.GRU) and not module.batch_first:
            of_times: Tensor = module(x.transpose(0, 1))[0].transpose(0, 1)
            return of_times
        parts = x if self.over == "tokens" else x.view(-1, 4, WIDTH // 4).repeat(1, 1, 4)
        out: Tensor = module(*[parts] * (3 if isinstance(module, nn.MultiheadAttention) else 1))[0]
        return out[..., : x.numel() // parts[..., 0].numel()].reshape(x.shape)


class RecurrentBlock(nn.Module):
    """Recurrent in depth, not along the sequence."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor, **inputs: Any) -> Tensor:
        for _ in range(3):
            states = self.layer(states, **inputs)
        return states


def looped(model: Any) -> Any:
    model.model.layers[1] = RecurrentBlock(model.model.layers[1])
    model.config.use_cache = False  # a layer that runs three times would add to its cache three times
    return model


def beside(make: Callable[[], nn.Module], over: str, model: Any) -> Any:
    torch.manual_seed(3)
    model.model.layers[0].mlp = Beside(model.model.layers[0].mlp, make(), over)
    return model


OF_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "Conv1d": partial(nn.Conv1d, WIDTH, WIDTH, 3),
    "far Conv1d": partial(nn.Conv1d, WIDTH, WIDTH, 2, dilation=40),
    "GRU": partial(nn.GRU, WIDTH, WIDTH, batch_first=True),
    "GRU of times": partial(nn.GRU, WIDTH, WIDTH),
    "MultiheadAttention": partial(nn.MultiheadAttention, WIDTH, 4, batch_first=True),
}
EXACT: dict[str, Callable[[Any], Any]] = {
    "no positions, and the interface by another name": own,
    "recurrent in depth": looped,
    "a convolution over features": partial(beside, lambda: nn.Conv1d(1, 1, 3, padding=1), "features"),
    "a GRU over features": partial(beside, OF_TOKENS["GRU"], "features"),
    "attention over features": partial(beside, OF_TOKENS["MultiheadAttention"], "features"),
    "a convolution over whole rows": partial(beside, OF_TOKENS["Conv1d"], "tokens"),
    "a GRU over whole rows": partial(beside, OF_TOKENS["GRU"], "tokens"),
}


def step_of(what: str, attention: str | None) -> Any:
    return step(EXACT[what], attention)


@pytest.mark.parametrize("what", EXACT)
def test_what_the_check_finds_exact_trains(ranks: Ranks, what: str) -> None:
    """Each was refused by its structure alone."""
    assert_same_step(ranks(2).run(step_of, what, "ring_fp32"), step_of(what, None))


def refused(change: Callable[[Any], Any], checks: bool = True) -> tuple[str, str] | None:
    model = change(tiny("llama", "ring_fp32"))
    hf_ring_attn.configure(model, RingConfig(self_check=checks))

    def run() -> None:
        with hf_ring_attn.shard(tokens(23)) as sharded:
            model(**sharded.inputs)

    return attempt(run)


def refused_over(what: str, over: str, checks: bool) -> tuple[str, str] | None:
    return refused(partial(beside, OF_TOKENS[what], over), checks)


def assert_refused(raised: tuple[str, str] | None, why: str) -> None:
    assert raised is not None, "not refused"
    assert raised[0] == "UnsupportedModel"
    assert raised[1].endswith(f"cannot be trained in a ring exactly: {why}."), raised[1]


@pytest.mark.parametrize("what", ["far Conv1d", "GRU of times", "MultiheadAttention"])
def test_what_looks_along_the_sequence_is_refused_by_its_name(ranks: Ranks, what: str) -> None:
    kind = "GRU" if "GRU" in what else what.split()[-1]
    does = "mixes neighbouring tokens" if kind == "Conv1d" else "reads other tokens than its own"
    for raised in ranks(2).run(refused_over, what, "tokens", True):
        assert_refused(raised, f"model.layers.0.mlp.module ({kind}) {does}, which are on other ranks")


@pytest.mark.parametrize(("over", "checks"), [("nothing", True), ("features", False)])
def test_what_the_check_cannot_decide_is_refused(ranks: Ranks, over: str, checks: bool) -> None:
    for raised in ranks(2).run(refused_over, "GRU", over, checks):
        assert_refused(
            raised, "model.layers.0.mlp.module (GRU) reads other tokens than its own, which are on other ranks"
        )


def refused_attention() -> tuple[str, str] | None:
    return refused(partial(own, local=True))


def test_attention_of_a_program_is_refused_by_its_cause(ranks: Ranks) -> None:
    """The search for the first module that differs ended in an IndexError at a tensor of one dim."""
    for raised in ranks(2).run(refused_attention):
        assert raised is not None, "not refused"
        assert raised[0] == "UnsupportedModel"
        assert "its code does not use transformers' attention interface" in raised[1]
