"""What ranks run to compare the loss in chunks with that of all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM, PhiConfig, PhiForCausalLM

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.config import Loss
from hf_ring_attn.integration.batch.announce import loss_in_words
from hf_ring_attn.integration.losses import head
from hf_ring_attn.integration.losses.head import ChunkedLoss
from hf_ring_attn.integration.losses.lazy_logits import LazyLogits
from hf_ring_attn.layers import chunked_loss
from tests.helpers.hosts import stays_float64
from tests.helpers.jobs.plain_jobs import Batch, gradients_of, tokens
from tests.helpers.live_bytes import Largest
from tests.helpers.models.tiny_models import SIZES, tiny

OTHERS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "phi": (PhiForCausalLM, PhiConfig, {}),  # its head has a bias
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.4}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 3.0}),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a model of `tiny_models` or of `OTHERS`.

    ``lora``: what LoraConfig is given; None for a full fine-tuning. ``wrap``: "", "DDP", or a way of `sharded`.
    ``change``: changes the model first. ``autocast``: to float16. ``forwards``: whose losses are added up.
    """

    why: str
    model: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    batch: Batch = field(default_factory=lambda: tokens(23))
    lora: dict[str, Any] | None = None
    wrap: str = ""
    trains: bool = True
    change: Callable[[Any], None] | None = None
    autocast: bool = False
    forwards: int = 1


@dataclass
class Answer:
    """Of one rank: the loss, gradients by parameter, losses in chunks, the most logits made at once, why more were."""

    loss: Tensor
    gradients: dict[str, Tensor]
    losses: int
    made: int
    why: str


def model_of(step: Step) -> Any:
    torch.manual_seed(3)
    if step.model in OTHERS:
        kind, config, more = OTHERS[step.model]
        options = {name: x for name, x in {**SIZES, **more, **step.config}.items() if name != "head_dim"}
        model: Any = kind._from_config(config(**options), attn_implementation="ring_fp32")
    else:
        model = tiny(step.model, "ring_fp32", **step.config)
    model.to(torch.float64)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        nn.init.normal_(model.get_output_embeddings().bias)
    if step.lora is not None:
        model = get_peft_model(model, LoraConfig(r=4, **step.lora)).to(torch.float64)
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # it would be 0
                nn.init.normal_(weight, std=0.1)
    if step.change is not None:
        step.change(model)
    return model.train(step.trains)


def sharded(model: Any, way: str) -> None:
    """Under FSDP2: the layers, and the head "with the rest", "by itself", with the norm ("tail"), or "in parts"."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    if way == "by itself":
        fully_shard(inner.lm_head, mesh=mesh)
    if way == "tail":
        fully_shard([inner.model.norm, inner.lm_head], mesh=mesh, reshard_after_forward=False)
    if way == "in parts":  # as accelerate wraps a PEFT model
        for part in inner.lm_head.modules():
            if not part._modules and any(weight.requires_grad for weight in part.parameters()):
                fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


@contextmanager
def in_float64(rows: int = 5) -> Iterator[list[int]]:
    """Losses stay in float64, and chunks are short. Gives the numbers of tokens whose logits were made at once."""
    made: list[int] = []
    logits_of = head.Head.logits_of

    def counted(self: Any, hidden: Tensor, weights: Any) -> Tensor:
        made.append(len(hidden))
        return logits_of(self, hidden, weights)

    with (
        mock.patch.object(Tensor, "float", stays_float64),
        mock.patch.object(head, "rows_per_chunk", return_value=rows),
        mock.patch.object(head.Head, "logits_of", counted),
    ):
        yield made


def step_of(step: Step, loss: Loss) -> Answer:
    """One rank's step; gradients are averaged over ranks."""
    model = model_of(step)
    if step.wrap == "DDP":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif step.wrap:
        sharded(model, step.wrap)
    with in_float64() as made:
        batch = hf_ring_attn.shard(step.batch, config=RingConfig(loss=loss, self_check=False))
        half = torch.autocast("cpu", torch.float16, enabled=step.autocast)
        with batch, torch.set_grad_enabled(step.trains), half:
            loss_of_all = torch.stack([model(**batch.inputs).loss for _ in range(step.forwards)]).sum()
        state = batch.context.state(ChunkedLoss)
        if step.trains:
            loss_of_all.backward()
            if not step.wrap:
                batch.reduce_gradients(model)
    gradients = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients_of(model).items()}
    return Answer(loss_of_all.detach(), gradients, state.losses, max(made, default=0), state.why)


def both(step: Step) -> tuple[Answer, Answer]:
    """With the loss in chunks, as by default, and with all logits."""
    return step_of(step, "auto"), step_of(step, "sharded")


def reading_the_embedding(model: Any) -> None:
    """Gives a head that reads a weight of another module, beside its own."""
    head, embedding = model.lm_head, model.get_input_embeddings()
    head.forward = lambda x: nn.functional.linear(x, head.weight + embedding.weight)


def in_float32(model: Any) -> None:
    """Autocast leaves float64 alone."""
    model.float()


def normalized(model: Any) -> None:
    """Gives a head whose weight a hook computes from a trained one."""
    nn.utils.spectral_norm(model.lm_head)


def normalized_in_each_call(model: Any) -> None:
    """Gives a head whose own forward computes its weight, and writes to buffers for that."""
    nn.utils.parametrizations.spectral_norm(model.lm_head)


def most_values(loss: Loss) -> int:
    """The most values of any tensor that one step makes."""
    model = model_of(Step(why=""))
    batch = hf_ring_attn.shard(tokens(57), config=RingConfig(loss=loss))
    with in_float64(), Largest() as largest:
        with batch:
            out = model(**batch.inputs)
        out.loss.backward()
    found: int = largest.values
    return found


def with_a_defect() -> str:
    """The error of a model whose gradients are too large in chunks."""
    model = model_of(Step(why=""))
    batch = hf_ring_attn.shard(tokens(23))
    wrong = mock.patch.object(chunked_loss, "_scaled", lambda x, factor, dtype, _rows: (x * factor * 1.5).to(dtype))
    try:
        with wrong, batch:
            model(**batch.inputs)
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class OddHead(nn.Module):
    """A head that is no linear layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def odd_head(loss: Loss) -> str:
    """Says how the loss was computed, or the error."""
    model = model_of(Step(why=""))
    model.lm_head = OddHead(model.lm_head.weight.detach())
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(loss=loss))
    try:
        with batch:
            out = model(**batch.inputs)
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    assert not isinstance(out.logits, LazyLogits)
    return loss_in_words(batch.context)
