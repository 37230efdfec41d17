"""What PEFT saves of adapters in layers that torch's checkpoint wrapper holds."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_ring_attn.integration.model import wrapped_adapters
from hf_ring_attn.integration.patching import changes
from tests.helpers.models.tiny_models import tiny

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
ADAPTERS = {
    "LoRA": LORA,
    "DoRA, a whole head": {**LORA, "use_dora": True, "modules_to_save": ["lm_head"]},
    "a whole norm in a layer": {**LORA, "modules_to_save": ["input_layernorm"]},
}


def adapted(options: dict[str, Any], wrapped: bool) -> Any:
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(tiny("llama"), peft.LoraConfig(**options))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    if wrapped:
        layers = model.base_model.model.model.layers
        layers[0].mlp = checkpoint_wrapper(layers[0].mlp)  # one in another; and a subclass, as of `fully_shard`
        layers[0].mlp.__class__ = type("FSDPCheckpointWrapper", (type(layers[0].mlp),), {})
        for number, layer in enumerate(layers):
            layers[number] = checkpoint_wrapper(layer)
    return model


@pytest.fixture
def changed() -> None:
    """They stay: without wrapped layers they change nothing."""
    changes.install(wrapped_adapters.PATCHES)


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.usefixtures("changed")
def test_a_wrapped_adapter_is_saved_as_any_other(options: dict[str, Any], given: bool) -> None:
    want = peft.get_peft_model_state_dict(adapted(options, False))
    model = adapted(options, True)
    got = peft.get_peft_model_state_dict(model, state_dict=model.state_dict() if given else None)
    assert len(want) > 4 and got.keys() == want.keys()
    assert all(torch.equal(got[name], x) for name, x in want.items())


@pytest.mark.usefixtures("changed")
def test_the_folder_of_an_adapter_has_its_weights(tmp_path: Any) -> None:
    adapted(LORA, True).save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny("llama"), tmp_path)
    want = peft.get_peft_model_state_dict(adapted(LORA, False))
    got = peft.get_peft_model_state_dict(loaded)
    assert got.keys() == want.keys() and all(torch.equal(got[name], x) for name, x in want.items())
