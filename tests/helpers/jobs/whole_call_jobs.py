"""Loops of a program's own whose models get whole rows, for live ranks: in a ring, or without the plugin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn import functional as dist_functions
from torch.distributed.tensor import DTensor
from torch.nn.functional import kl_div, normalize
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.biases import Alibi
from hf_ring_attn.integration.batch.announce import loss_in_words
from tests.helpers.jobs.plain_jobs import Batch, padded, tokens
from tests.helpers.jobs.whole_row_jobs import SEPARATOR, next_token_losses
from tests.helpers.models.tiny_models import SIZES, build, tiny

Loss = Callable[[Any, Batch], Tensor]


def weighed(model: Any, batch: Batch) -> Tensor:
    """Shifts by hand, weighs tokens by separators before them and by places, and divides by a count of its own."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    each = next_token_losses(model(**inputs).logits, batch["labels"])
    weights = 1 + (batch["input_ids"] == SEPARATOR).cumsum(1)[:, 1:] + torch.linspace(0, 1, each.shape[1]).to(each)
    total: Tensor = (each * weights).sum() / (batch["labels"][:, 1:] != -100).sum()
    return total


def of_the_model(model: Any, batch: Batch) -> Tensor:
    """The model's loss, and a spread of states over all rows."""
    outputs = model(**batch, output_hidden_states=True)
    total: Tensor = outputs.loss + outputs.hidden_states[1].std() + outputs.logits[:, -1].logsumexp(-1).mean()
    return total


class _Squares(torch.autograd.Function):
    """Mean squares with a backward of its own, as of a fused cross entropy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = gradients[0] * 2 * x / x.numel()
        return found


def of_a_function(model: Any, batch: Batch) -> Tensor:
    outputs = model(**batch)
    total: Tensor = outputs.loss + _Squares.apply(outputs.logits)  # type: ignore[no-untyped-call]
    return total


def of_the_model_alone(model: Any, batch: Batch) -> Tensor:
    total: Tensor = model(**batch).loss
    return total


def of_a_tuple(model: Any, batch: Batch) -> Tensor:
    """Positional inputs, and outputs without names."""
    mask = torch.ones_like(batch["input_ids"])
    loss, logits = model(batch["input_ids"], mask, labels=batch["labels"], return_dict=False)[:2]
    total: Tensor = loss + logits.roll(1, 1).square().mean()
    return total


def of_two_calls(model: Any, batch: Batch) -> Tensor:
    """Rows of two lengths, one of them as long as a rank's share of the other."""
    ids = batch["input_ids"]
    longer, shorter = model(input_ids=ids).logits, model(input_ids=ids[:, : (ids.shape[1] + 1) // 2].flip(1)).logits
    total: Tensor = longer.logsumexp(-1).max(1).values.sum() - shorter[:, 0].log_softmax(-1)[:, 5].sum()
    return total


def of_kept_logits(model: Any, batch: Batch) -> Tensor:
    """The head makes logits of the last tokens only, and of some."""
    ids = batch["input_ids"]
    last, some = model(ids, logits_to_keep=3).logits, model(input_ids=ids, logits_to_keep=torch.tensor([2, 11])).logits
    assert last.shape[1] == 3
    assert some.shape[1] == 2
    total: Tensor = last.logsumexp(-1).square().sum() + some.softmax(-1).square().sum()
    return total


def of_embeddings(model: Any, batch: Batch) -> Tensor:
    """Pools the states of a base model over each row, and compares rows."""
    states = model(**{name: x for name, x in batch.items() if name != "labels"}).last_hidden_state
    mask = batch["attention_mask"][..., None]
    pooled = normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    return (pooled @ pooled.T).exp().sum()


def distilled(model: Any, batch: Batch) -> Tensor:
    """A teacher that is no model of the ring, and text that the student generates on the way."""
    teacher: Any = tiny("llama", "eager", num_hidden_layers=1).to(next(model.parameters()))
    ids = batch["input_ids"]
    with torch.no_grad():
        wanted = teacher(ids).logits.softmax(-1)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        text = inner.generate(ids[:, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert text.shape == (2, 9)
    again = torch.cat([ids, text], 1)
    of_text = next_token_losses(model(input_ids=again).logits, again).mean()
    return kl_div(model(input_ids=ids).logits.log_softmax(-1), wanted, reduction="batchmean") + of_text


def of_a_chain(model: Any, batch: Batch) -> Tensor:
    """What a call returns goes into another one, and the gradient of its input is a part of the loss (FGM)."""
    ids = batch["input_ids"]
    table = (model.module if isinstance(model, DistributedDataParallel) else model).get_input_embeddings()
    soft = model(input_ids=ids).logits.softmax(-1) @ table.weight
    again = model(inputs_embeds=soft[:, ::2]).logits
    (slope,) = torch.autograd.grad(again.square().mean(), soft, retain_graph=True)
    total: Tensor = again.logsumexp(-1).mean() + (slope.detach() * soft).sum()
    return total


def of_gradients(model: Any, batch: Batch) -> Tensor:
    """Weighs two losses by their gradients of a layer's weights and of the head's (GradNorm, VQGAN)."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    weights = [inner.model.layers[-1].mlp.up_proj.weight, inner.lm_head.weight]
    logits = model(input_ids=batch["input_ids"]).logits
    first, second = next_token_losses(logits, batch["labels"]).mean(), logits.logsumexp(-1).square().mean()
    sizes = [torch.autograd.grad(one, weights, retain_graph=True) for one in (first, second)]
    ratio = sum(a.norm() / b.norm() for a, b in zip(*sizes, strict=True))
    total: Tensor = first + ratio.detach() * second
    return total


def of_states(model: Any, batch: Batch) -> Tensor:
    """The gradient by the last states, which are there twice: nothing is computed from the copy."""
    outputs = model(input_ids=batch["input_ids"], output_hidden_states=True)
    last = outputs.hidden_states[-1]
    (slope,) = torch.autograd.grad(last.square().sum() + outputs.last_hidden_state.std(), last, retain_graph=True)
    total: Tensor = last.std() + (slope * last).mean()
    return total


def of_a_forward(model: Any, batch: Batch) -> Tensor:
    """The program calls the model by its forward, and the model below its head alone."""
    ids = batch["input_ids"]
    total: Tensor = model.forward(ids).logits.std() + model.model(ids[:, :9]).last_hidden_state.std()
    return total


@dataclass(frozen=True, eq=False)
class Case:
    """A loss and how its model is wrapped, and why it is here.

    Args:
        wrap: "", "DDP", "static DDP", "FSDP2", "compiled", "compiled in place", "LoRA" or "checkpointed".
        base: without its head. clips: gradients are clipped before `reduce_gradients`.
    """

    why: str
    loss: Loss
    model: str = "llama"
    wrap: str = ""
    base: bool = False
    batch: Batch = field(default_factory=lambda: tokens(23))
    dtype: torch.dtype = torch.float64
    clips: bool = False


@dataclass
class Answer:
    """The loss, and gradients by name."""

    loss: Tensor
    gradients: dict[str, Tensor]


def made(case: Case, in_ring: bool, device: str) -> tuple[Any, Any]:
    """The model, and what the program calls."""
    model: Any = tiny(case.model, "ring_fp32" if in_ring else None)
    model.to(device, case.dtype).config.use_cache = False  # else documents see each other without a ring
    model = model.model if case.base else model
    if case.wrap == "LoRA":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if case.wrap == "checkpointed":
        model.train().gradient_checkpointing_enable({"use_reentrant": True})
    if case.wrap == "compiled in place":
        model.compile(backend="eager")
    if not in_ring:
        return model, torch.compile(model, backend="eager") if case.wrap == "compiled" else model
    if case.wrap == "FSDP2":
        for part in (*model.model.layers, model):
            fully_shard(part)
    wraps: dict[str, Callable[[Any], Any]] = {
        "DDP": DistributedDataParallel,
        "static DDP": lambda model: DistributedDataParallel(model, static_graph=True),
        "compiled": lambda model: torch.compile(model, backend="eager"),
    }  # fmt: skip
    return model, wraps.get(case.wrap, lambda model: model)(model)


def answer(case: Case, in_ring: bool = True, device: str = "cpu") -> Answer:
    """The loss and the gradients on this rank; or without the plugin."""
    torch.manual_seed(0)
    model, called = made(case, in_ring, device)
    batch = {name: x.to(device) for name, x in case.batch.items()}
    with hf_ring_attn.whole_rows(called) if in_ring else nullcontext() as rows:
        loss = case.loss(called, batch)
    loss.backward()
    if case.clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if rows is not None and case.wrap not in ("DDP", "static DDP", "FSDP2"):
        rows.reduce_gradients(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients.items()}
    return Answer(loss.detach(), whole)


class Around(nn.Module):
    """A program's own module around a transformers model, with a weight of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.scale = model, nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, rows: Batch) -> Tensor:
        return self.scale * weighed(self.inner, rows)


def around(wrap: str, in_ring: bool = True) -> Answer:
    """The sum of two batches' losses, and its gradients."""
    torch.manual_seed(0)
    module: Any = Around(tiny("llama", "ring_fp32" if in_ring else None).double())
    wraps: dict[str, Callable[[Any], Any]] = {
        "DDP": DistributedDataParallel,
        "compiled": lambda module: torch.compile(module, backend="eager"),
    }
    called, total = wraps[wrap](module) if in_ring and wrap else module, torch.zeros(())
    for batch in (padded(23, 3, 4), tokens(19)):
        with hf_ring_attn.whole_rows(module) if in_ring else nullcontext() as rows:
            loss = called(batch)
        loss.backward()
        if rows is not None and wrap != "DDP":
            rows.reduce_gradients(module)
        total = total + loss.detach()
    return Answer(total, {name: p.grad for name, p in module.named_parameters()})


class Parser(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model of a program's own: it returns scores of pairs of tokens and a number, too, and keeps another one."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        states = self.model(input_ids, **inputs).last_hidden_state
        self.spread = states.std(1).mean()
        return {"arcs": states @ states.mT, "penalty": states.square().mean(), "logits": self.lm_head(states)}


def parsed(in_ring: bool = True) -> Answer:
    model = build(Parser, "ring_fp32" if in_ring else "sdpa", **SIZES).double()
    with hf_ring_attn.whole_rows(model) if in_ring else nullcontext() as rows:
        found = model(tokens(23)["input_ids"])
    loss = found["arcs"].softmax(-1).square().sum() + found["penalty"] + model.spread + found["logits"].std()
    loss.backward()
    if rows is not None:
        rows.reduce_gradients(model)
    return Answer(loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def steered(loss_of: Loss, in_ring: bool = True, by_grad: bool = False) -> Answer:
    """Vectors that a hook adds to a layer's output, clipped right after the backward, beside a frozen model.

    The third step has another vector. Each step has two backwards of one call.
    """
    model: Any = tiny("llama", "ring_fp32" if in_ring else None).double().requires_grad_(False)
    vectors = [nn.Parameter(torch.zeros(model.config.hidden_size, dtype=torch.float64)) for _ in range(2)]
    added = vectors[:1]
    model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output + added[0])
    optimizer = torch.optim.SGD(vectors, 0.5)
    for turn in range(3):
        added[0] = vectors[turn // 2]
        optimizer.zero_grad()
        with hf_ring_attn.whole_rows(model) if in_ring else nullcontext():
            loss = loss_of(model, tokens(23))
        if by_grad:
            (added[0].grad,) = torch.autograd.grad(loss, added)
        else:
            loss.backward(retain_graph=True)
            torch.autograd.backward([torch.autograd.graph.get_gradient_edge(0.1 * loss)])
        nn.utils.clip_grad_norm_(vectors, 0.3)
        optimizer.step()
    assert added[0].grad is not None
    return Answer(loss.detach(), {"vector": added[0].grad})


def error_of(how: str) -> str:
    """What a program is refused with, as "Type: text"; "" if it is not."""
    model: Any = tiny("llama", "ring_fp32")
    batch = tokens(23)
    rank, everyone = dist.get_rank(), [torch.empty(()) for _ in range(dist.get_world_size())]
    states: list[Tensor] = []
    if how.startswith("states of a hook"):
        model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: states.append(output))
    try:
        with hf_ring_attn.whole_rows(model) as rows:
            if how == "no call":
                rows.reduce_gradients(model)
            if how == "other rows":
                batch = tokens(23, seed=rank)
            if how == "a cache":
                cache = model(input_ids=batch["input_ids"]).past_key_values
                model(input_ids=batch["input_ids"][:, :1], past_key_values=cache)
            bias = {"score_mod": Alibi(4)} if how.endswith("biased scores") else {}
            outputs = model(input_ids=batch["input_ids"], output_hidden_states=True, **bias)
            logits, state = outputs.logits, outputs.hidden_states[1]
        if how == "a penalty on a gradient":
            (found,) = torch.autograd.grad(logits.std(), [model.lm_head.weight], create_graph=True)
            logits = logits + found.square().sum()
        if how == "a gradient for each row":
            with hf_ring_attn.whole_rows(model):
                torch.func.vmap(lambda ids: model(input_ids=ids[None]).logits)(batch["input_ids"].repeat(2, 1))
        if how == "a gradient for each row, in one backward":
            pair = torch.stack([logits.std(), logits.mean()])
            torch.autograd.grad(pair, [model.lm_head.weight], torch.eye(2), is_grads_batched=True)
        if how == "a gradient by a state":
            torch.autograd.grad(logits.std() + state.std(), state, retain_graph=True)
        if how == "a kept gradient of a state":
            state.retain_grad()
            (logits.std() + state.std()).backward(retain_graph=True)
        if how == "rows of a queue":
            rows = logits.detach().mean(1)
            dist.all_gather([torch.empty_like(rows) for _ in everyone], rows)
        factor: Any = 1 + rank if how == "another loss on each rank" else 1
        if how == "other signs on each rank":
            factor = torch.randn(logits.shape, generator=torch.Generator().manual_seed(rank)).sign()
        if how == "a number of each rank":
            dist.all_gather(everyone, logits.mean().detach())
        if how == "rows of all ranks":
            everyone = [torch.empty_like(logits) for _ in everyone]
            dist.all_gather(everyone, logits)
        if how == "rows of all ranks, in one tensor":
            with torch.no_grad():  # as in a function with a backward of its own
                output = torch.empty(len(everyone) * len(logits), *logits.shape[1:])
                dist.all_gather_into_tensor(output_tensor=output, input_tensor=logits)
        if how == "rows of all ranks, by a function with gradients":
            logits = torch.cat(dist_functions.all_gather(logits))
        logits = logits + sum(one.std() for one in states)
        (logits * factor).square().sum().add((logits * factor).sum()).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def of_options(loss: Any) -> tuple[str, float]:
    """How the loss was computed, in words, and its value, with an option of the model for its loss."""
    model: Any = tiny("llama", "ring_fp32")
    hf_ring_attn.configure(model, RingConfig(loss=loss))
    with hf_ring_attn.whole_rows(model) as rows:
        found = weighed(model, tokens(23))
    assert rows.latest is not None
    return loss_in_words(rows.latest.context), float(found)
