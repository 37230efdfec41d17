"""MLPs in chunks compute in the backward by the attributes of their forward, and keep no tensor in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from tests.helpers.jobs import activation_jobs as jobs
from tests.helpers.jobs.activation_jobs import Step
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny


def rescale(model: Any) -> None:
    for part in model.modules():
        if isinstance(part, LoraLayer):
            part.set_scale("default", 0.3)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another scale of the adapter": rescale,
    "another mode": lambda model: model.eval(),
    "another adapter": lambda model: model.set_adapter("other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_backward_computes_as_the_forward_did(change: str) -> None:
    """It computed by what the program had changed since: an adapter had another gradient, or none."""
    found = []
    for changes in (False, True):
        model = jobs.model_of(Step(why="", lora={**jobs.LORA, "lora_dropout": 0.5}))
        model.add_adapter("other", LoraConfig(r=2, target_modules=jobs.LORA["target_modules"]))
        weights = {name: x for name, x in model.named_parameters() if x.requires_grad}
        torch.manual_seed(5)
        batch = hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=False, mlp_tokens=3), model=model)
        with batch:
            loss = model(**batch.inputs).loss
        if changes:
            CHANGES[change](model)
        for weight in weights.values():
            weight.requires_grad_()
        loss.backward()
        found.append({name: x.grad for name, x in weights.items()})
    for name, gradient in found[0].items():
        assert gradient.any() and torch.equal(found[1][name], gradient), name


class Balanced(nn.Module):
    """Keeps an auxiliary loss, which a program adds to that of the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden_states)
        self.kept = [result.square().mean()]
        return result


def test_an_mlp_that_keeps_a_tensor_is_refused() -> None:
    """What it kept was of the last chunk, and without a gradient."""
    model: Any = tiny("llama", "ring_fp32").train()
    model.model.layers[1].mlp = Balanced(model.model.layers[1].mlp)
    for _ in range(2):
        with pytest.raises(errors.NotByToken, match="it keeps a tensor of each call in its attribute kept"):
            jobs.run(model, mlp_tokens=3)
