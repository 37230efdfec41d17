"""What is exact in one mode only, training or evaluation: refused by name, in whichever batch it is called so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import hf_ring_attn
import tests.helpers.jobs.refusal_jobs as jobs
from hf_ring_attn import errors
from hf_ring_attn.integration.model import training_mode
from tests.helpers.contexts import ring_of_two
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.jobs.refusal_jobs import Forward, Training
from tests.helpers.models.tiny_models import tiny

OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "attention_dropout": 0.0, "layerdrop": 0.3}
SKIPS = "skips layers at random, and each rank would skip others"

STATISTICS = "normalises by statistics of many tokens, and each rank has its own tokens only: freeze it, by eval()"


class DropPath(nn.Module):
    """As in transformers and timm; what it drops is not asked here."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return x


class StochasticDepth(nn.Module):
    """As in torchvision."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p


class Decoder(nn.Module):
    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop = layerdrop


INEXACT: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Decoder(0.1), f"(Decoder) {SKIPS}"),
    (lambda: DropPath(0.1), f"(DropPath) {SKIPS}"),
    (lambda: StochasticDepth(0.1), f"(StochasticDepth) {SKIPS}"),
    (lambda: nn.BatchNorm1d(32), f"(BatchNorm1d) {STATISTICS}"),
    (lambda: nn.SyncBatchNorm(32), f"(SyncBatchNorm) {STATISTICS}"),
    (lambda: nn.InstanceNorm1d(32, track_running_stats=True), f"(InstanceNorm1d) {STATISTICS}"),
    (nn.Dropout1d, "(Dropout1d) drops the same channels of many tokens at random, and each rank would drop others"),
]
EXACT: dict[str, Callable[[], nn.Module]] = {
    "no layer skipped": lambda: Decoder(0.0),
    "no path dropped": DropPath,
    "dropout": lambda: nn.Dropout(0.5),
    "no channel dropped": lambda: nn.Dropout1d(0.0),
    "groups of a token's numbers": lambda: nn.GroupNorm(4, 32),
}


@pytest.mark.parametrize(("make", "text"), INEXACT, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_inexact_in_training(make: Callable[[], nn.Module], text: str) -> None:
    model: Any = tiny("llama", "ring_fp32")
    for layer in model.model.layers:
        layer.mlp.own = make()
    assert list(training_mode.unsupported(model.eval(), ring_of_two())) == []
    (reason,) = training_mode.unsupported(model.train(), ring_of_two())
    assert reason.startswith(f"model.layers.0.mlp.own {text}")


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_what_is_exact_in_training_too(make: Callable[[], nn.Module]) -> None:
    model = tiny("llama", "ring_fp32").train()
    model.model.layers[0].mlp.own = make()
    assert list(training_mode.unsupported(model, ring_of_two())) == []


@pytest.mark.parametrize(("make", "text"), INEXACT, ids=lambda x: x if isinstance(x, str) else "")
def test_towers_may_do_so_since_every_rank_runs_them_whole(make: Callable[[], nn.Module], text: str) -> None:
    model: Any = tiny("gemma3 vision", "ring_fp32").train()
    model.model.vision_tower.own = make()
    assert list(training_mode.unsupported(model, ring_of_two())) == []
    model.model.language_model.own = make()
    (reason,) = training_mode.unsupported(model.model, ring_of_two())
    assert reason.startswith(f"language_model.own {text}")


# ---- in a ring -------------------------------------------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self, mlp: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.mlp, self.own = mlp, own

    def forward(self, x: Tensor) -> Any:
        return self.own(self.mlp(x).transpose(1, 2)).transpose(1, 2)


BY_TURNS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: DropPath(0.1), "a batch norm": lambda: nn.BatchNorm1d(32), "channels": nn.Dropout1d,
}  # fmt: skip


def refused_by_turns(what: str, late: bool) -> list[bool]:
    """Of batches of one model, whether each was refused, while one of its modules changes its mode to and fro.

    ``late``: it changes once the batch was made for this model, as by a Trainer.
    """
    model, found = tiny("llama", "ring_fp32").train(), list[bool]()
    around = model.model.layers[1].mlp = Around(model.model.layers[1].mlp, BY_TURNS[what]())
    for trains in (False, True, False, True):
        around.own.train(trains and not late)
        try:
            sharded = hf_ring_attn.shard(tokens(12), model=model)
            around.own.train(trains)
            with sharded:
                model(**sharded.inputs)
        except errors.UnsupportedModel:
            found.append(True)
        else:
            found.append(False)
    return found


@pytest.mark.parametrize("what", BY_TURNS)
@pytest.mark.parametrize("late", [False, True])
def test_modes_are_looked_at_in_each_batch(ranks: Ranks, what: str, late: bool) -> None:
    assert ranks(2).run(refused_by_turns, what, late) == [[False, True, False, True]] * 2


def test_a_model_that_skips_layers_is_refused_in_training(ranks: Ranks) -> None:
    text = f"OPTForCausalLM cannot be trained in a ring exactly: model.decoder (OPTDecoder) {SKIPS}"
    forward = Forward(why="", kind="OPTForCausalLM", config=OPT, text="")
    for raised in ranks(2).run(jobs.refused, forward):
        assert raised is not None and raised[0] == "UnsupportedModel" and raised[1].startswith(text)


def test_a_model_that_skips_layers_may_be_evaluated(ranks: Ranks) -> None:
    forward = Forward(why="", kind="OPTForCausalLM", config=OPT, change=jobs.in_evaluation_mode, text="")
    assert ranks(2).run(jobs.refused, forward) == [None, None]


def test_a_trainer_refuses_what_it_sets_into_training(ranks: Ranks) -> None:
    """It does so once it has its first batch: from_pretrained leaves models in the mode of evaluation."""
    training = Training(
        why="", kind=jobs.WithoutWrapper, model="OPTForCausalLM", config=OPT, change=jobs.in_evaluation_mode,
        error="", text="",
    )  # fmt: skip
    for raised in ranks(2).run(jobs.refused_training, training):
        assert raised is not None and raised[0] == "UnsupportedModel" and raised[2] == 0
        assert raised[1].startswith(
            f"OPTForCausalLM cannot be trained in a ring exactly: model.decoder (OPTDecoder) {SKIPS}"
        )
