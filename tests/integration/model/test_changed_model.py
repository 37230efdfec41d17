"""A model that is changed after its first batch is looked at again: refused, or exact, never silently different."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn import RingConfig
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.models.tiny_models import tiny


class Mixing(nn.Module):
    """A convolution over far tokens, around a layer's MLP: which the self-check might not see."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.conv = inner, nn.Conv1d(32, 32, 3, padding=40, dilation=40)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.inner(x) + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return mixed


def convolved(model: Any) -> None:
    torch.manual_seed(0)
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)


def dropped(model: Any) -> None:
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, nn.Dropout1d(0.5))


def hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda _module, _args, output: output + output.roll(1, 1))


def with_another_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + x.roll(1, 1)


def hooked_anew(model: Any) -> None:
    """As many hooks as before: one that does nothing gives way to one that mixes tokens."""
    model.quiet.remove()
    hooked(model)


def mixes(shift: int, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output + output.roll(shift, 1)


def hooked_by_another_partial(model: Any) -> None:
    model.partial.remove()
    model.model.layers[1].register_forward_hook(partial(mixes, 1))


def with_another_class(model: Any) -> None:
    mlp = type(model.model.layers[1].mlp)
    forward = mlp.forward
    mlp.forward = lambda self, x: forward(self, x) + x.roll(1, 1)
    model.undo = lambda: setattr(mlp, "forward", forward)


def silu(x: Any) -> Any:
    return nn.functional.silu(x)


def with_another_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = lambda x: nn.functional.silu(x + x.roll(1, 1))


def local_mean(weight: float, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """The mean over a rank's own tokens."""
    return weight * nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def with_another_loss(model: Any) -> None:
    model.loss_function = lambda **given: local_mean(1.0, **given)


def with_a_partial_loss(model: Any) -> None:
    model.loss_function = partial(local_mean, 1.0)


def with_another_loss_type(model: Any) -> None:
    model.loss_type = "ForMaskedLM"


def configured(model: Any) -> None:
    model.config.is_encoder_decoder = True


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a convolution": (convolved, "UnsupportedModel"),
    "a dropout of channels": (dropped, "UnsupportedModel"),
    "a hook": (hooked, "SelfCheckFailed"),
    "a forward": (with_another_forward, "SelfCheckFailed"),
    "a hook in place of another": (hooked_anew, "SelfCheckFailed"),
    "a partial in place of another": (hooked_by_another_partial, "SelfCheckFailed"),
    "an activation that is no module": (with_another_activation, "SelfCheckFailed"),
    "a forward of a class": (with_another_class, "SelfCheckFailed"),
    "a loss": (with_another_loss, "LossNotSharded"),
    "a loss that is a partial": (with_a_partial_loss, "LossNotSharded"),
    "a type of loss": (with_another_loss_type, "UnnamedModel"),
    "a field of its config": (configured, "UnsupportedModel"),
}


def step(model: Any) -> None:
    sharded = hf_ring_attn.shard(tokens(24))
    with sharded:
        model(**sharded.inputs).loss.backward()
    sharded.reduce_gradients(model)


def after(change: str) -> tuple[str, str] | None:
    model: Any = tiny("llama", "ring_fp32").train()
    del model.model.layers[1].mlp.act_fn  # a module
    model.model.layers[1].mlp.act_fn = silu
    model.quiet = model.model.layers[1].register_forward_hook(lambda *_: None)
    model.partial = model.model.layers[1].register_forward_hook(partial(print, end="", file=StringIO()))
    model.undo = lambda: None
    step(model)
    CHANGES[change][0](model)
    try:
        return attempt(step, model)
    finally:
        model.undo()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.turns
def test_a_change_after_the_first_batch_is_refused(ranks: Ranks, change: str) -> None:
    for raised in ranks(2).run(after, change):
        assert raised is not None, "not refused"
        assert raised[0] == CHANGES[change][1], raised


def options_used(options: RingConfig) -> tuple[RingConfig, str]:
    """The options with which a loop's batch ran, and the refusal of a row that must be padded."""
    model = tiny("llama", "ring_fp32").train()
    hf_ring_attn.configure(model, options)
    sharded = hf_ring_attn.shard(tokens(24))
    with sharded:
        model(**sharded.inputs)
    uneven = hf_ring_attn.shard(tokens(23))
    with uneven:
        raised = attempt(lambda: model(**uneven.inputs))
    return sharded.context.config, "" if raised is None else raised[0]


@pytest.mark.parametrize(
    ("options", "uneven"),
    [
        (RingConfig(self_check=False), ""),
        (RingConfig(pad=False), "UnevenLength"),
        (RingConfig(kernel="reference", backward="gather", deterministic=True), ""),
    ],
    ids=str,
)
def test_options_set_on_a_model_hold_in_a_loop(ranks: Ranks, options: RingConfig, uneven: str) -> None:
    assert ranks(2).run(options_used, options) == [(options, uneven)] * 2
