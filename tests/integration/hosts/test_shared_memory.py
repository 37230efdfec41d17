"""Weights that share memory, as tied adapters do, train in a ring as in one process, or are refused by name.

Trainer and accelerate moved them from "cpu" to "cpu:0", to which torch copies: each became a weight of its own, and
weights were 0.03 off after four steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.integration.hosts import shared_memory
from tests.helpers.jobs.comparison import PARAMETER, Ranks, assert_trains_as_without_ring
from tests.helpers.jobs.fsdp2_trainers import weights_of
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, refusal_of, trainer_of
from tests.helpers.models.tiny_models import VOCABULARY, tiny


def with_tied_adapters(model: Any) -> Any:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    torch.manual_seed(5)
    targets = ["embed_tokens", "lm_head", "v_proj"]
    lora = LoraConfig(r=4, target_modules=targets, ensure_weight_tying=True, task_type="CAUSAL_LM")
    net: Any = get_peft_model(model, lora)
    with torch.no_grad():  # a matrix of zeros would hide its partner
        for name, x in net.named_parameters():
            if x.requires_grad and "lm_head" not in name:
                x.add_(0.05 * torch.randn(x.shape))
    return net


def tied_run(**options: Any) -> Run:
    return Run(why="", change=with_tied_adapters, arguments={"eval_strategy": "no"}, **options)


def train_by_accelerate(mesh: Mesh) -> dict[str, Tensor]:
    """A loop's three steps. Of one process, it has no ring."""
    torch.manual_seed(7)
    rows = torch.randint(0, VOCABULARY, (3, 2, 24))
    with launched(mesh):
        accelerator = Accelerator(cpu=True)
        model = with_tied_adapters(tiny("llama", "ring_fp32" if mesh.cp > 1 else None)).train()
        optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        for ids in rows:
            batch = {"input_ids": ids, "labels": ids.clone()}
            with hf_ring_attn.shard(batch) if mesh.cp > 1 else nullcontext() as sharded:
                accelerator.backward(model(**(sharded.inputs if sharded else batch)).loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(accelerator.unwrap_model(model))


def refused_under_fsdp2() -> tuple[str, int]:
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        return refusal_of(trainer_of(tied_run(fsdp2=True), Mesh(cp=2), folder))


def test_a_trainer_keeps_what_adapters_share(ranks: Ranks) -> None:
    assert_trains_as_without_ring(ranks, tied_run(), Mesh(cp=2))


def test_accelerate_keeps_it_in_a_loop(ranks: Ranks) -> None:
    (want,) = ranks(1).run(train_by_accelerate, Mesh())
    for got in ranks(2).run(train_by_accelerate, Mesh(cp=2)):
        assert len(want) > 4
        for name, x in want.items():
            assert float((got[name] - x).abs().max()) < 10 * PARAMETER, name  # AdamW divides by small gradients


def test_fsdp2_is_refused_where_one_process_shares(ranks: Ranks) -> None:
    for said, steps in ranks(2).run(refused_under_fsdp2):
        assert said.startswith("SharedMemoryLost: these weights of LlamaForCausalLM share memory"), said
        assert "lm_head.lora_B.default.weight and base_model.model.model.embed_tokens.lora_embedding_A.default" in said
        assert steps == 0


# ---- which weights share ---------------------------------------------------------------------------------------------


def views(*of: Callable[[Tensor], Tensor], trains: bool = True) -> nn.Module:
    flat, model = torch.zeros(8, 6), nn.Module()
    for number, view in enumerate(of):
        model.register_parameter(f"w{number}", nn.Parameter(view(flat), requires_grad=trains))
    return model


APART = {
    "rows": (lambda x: x[:4], lambda x: x[4:]),
    "columns": (lambda x: x[:, :3], lambda x: x[:, 3:]),
    "one inside of another's steps": (lambda x: x[::2], lambda x: x[1::2]),
}
SHARED = {
    "one transposed": (lambda x: x, lambda x: x.t()),
    "a part": (lambda x: x, lambda x: x[3:]),
    "a corner": (lambda x: x[:5], lambda x: x[4:, 2:]),
}


@pytest.mark.parametrize("of", APART.values(), ids=APART)
def test_views_without_a_common_element_share_nothing(of: tuple[Any, Any]) -> None:
    assert not [*shared_memory.sharing(views(*of), "cpu")]


@pytest.mark.parametrize("of", SHARED.values(), ids=SHARED)
def test_a_copied_view_is_a_view_again(of: tuple[Any, Any]) -> None:
    """Of the values that it has after the move: DDP gives it those of the first rank."""
    model: Any = views(*of)
    assert [[*weights] for weights in shared_memory.sharing(model, "cpu")] == [["w0", "w1"]]
    with shared_memory.keeping([model], torch.device("cpu", 0)):
        with torch.no_grad():
            model.w0.fill_(2.0)
        model.to("cpu:0")
        assert not [*shared_memory.sharing(model, "cpu")]
    assert [*shared_memory.sharing(model, "cpu")]
    with torch.no_grad():
        model.w1.fill_(3.0)
    assert (model.w0 == 3.0).any()


def test_what_one_process_copies_too_is_copied() -> None:
    """To another kind of device, for which "meta" stands; and frozen weights may be copied."""
    model = views(*SHARED["a part"])
    with shared_memory.keeping([model], torch.device("meta")):
        model.to("cpu:0")
    assert not [*shared_memory.sharing(model, "cpu")]
    assert not [*shared_memory.sharing(views(*SHARED["a part"], trains=False), "cpu")]


def test_tensors_that_hold_others_have_no_memory_to_share() -> None:
    """Quantized weights, for example: torch refuses to give the address of their storage."""
    model = nn.Module()
    for name in ("a", "b"):
        model.register_parameter(name, nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3))))
    assert not [*shared_memory.sharing(model, "cpu")]


def test_a_weight_replaced_by_another_is_refused() -> None:
    model: Any = views(*SHARED["one transposed"])
    with (
        pytest.raises(errors.SharedMemoryLost, match="w0 and w1"),
        shared_memory.keeping([model], torch.device("cpu")),
    ):
        model.w1 = nn.Parameter(model.w1.detach().clone())
