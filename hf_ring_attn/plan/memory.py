"""Peak memory of a GPU in a training step, by part, counted tensor by tensor; nothing here is fitted.

T: tokens of a rank; a "number" is one value per token. Weights and the optimizer's states are there all the time. On
top of them comes one of these moments, the largest of which is the peak: the loss; in the last layer and in the first
one the backward of the MLP, after its layer was recomputed, and the backward (or gather) of attention. A backward
begins with the last layer: the checkpoints of all layers are there, and no gradients but the head's. In the first layer
there is one checkpoint, and almost all gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..layers.chunked_loss import rows_per_chunk
from ..traffic.base import PULLED, WHOLE
from ..traffic.head_groups import head_groups, ring_pass_groups, ring_pass_halves
from .hardware import CONTEXT_GIB, GIB, SLACK
from .setup import OPTIMIZERS, Setup
from .shape import AttentionShape, LayerShape, ModelShape

Parts = dict[str, float]
"""Bytes by name."""

FLOAT32 = 4
FOUR_BIT = 0.5 + 1 / 64 + FLOAT32 / (64 * 256)
"""Bytes per parameter in NF4: a byte of scale per 64 of them, quantized in turn with a float32 per 256."""
LOSS_COPIES = 3
"""Float32 tensors of the logits' size in the backward of a cross entropy: its log-softmax, and two gradients."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU.

    Args:
        always: during the whole step. moments: parts of each moment that may be the peak. outside: not in torch's
            allocator. host: in host memory, per GPU.
    """

    always: Parts
    moments: dict[str, Parts]
    outside: Parts
    host: Parts

    @property
    def moment(self) -> str:
        """The name of the moment with the most memory."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def allocated(self) -> float:
        """Peak bytes of torch's allocator, as torch.cuda.max_memory_allocated gives them."""
        return sum(self.always.values()) + sum(self.moments[self.moment].values())

    @property
    def parts(self) -> Parts:
        """All parts at the peak: their sum is what the GPU needs."""
        passing = {**self.moments[self.moment]}
        moving = sum(size for name, size in passing.items() if name != GRADIENTS)
        parts = {**self.always, **passing, "allocator slack": SLACK * moving, **self.outside}
        return {name: size for name, size in parts.items() if size}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


CHECKPOINTS, SAVED, ACTIVATIONS = "layer checkpoints", "saved attention", "activations of all layers"
GRADIENTS, BUCKETS = "gradients", "gradient buckets"


def memory_of(model: ModelShape, setup: Setup, accumulates: bool = False) -> Memory:
    """Counts the memory of a step.

    Args:
        accumulates: the step has several batches, so that the gradients of the first are there all the time.
    """
    states, of_host = _states(model, setup)
    gradients = states.pop(GRADIENTS, 0.0)
    layers = model.layers
    largest = max(layers, key=lambda layer: layer.parameters)
    layer_weights, head_weights = _gathered(model, largest, setup)
    away = offloaded_layers(model, setup)
    of_host.update({name: float(away * size) for name, size in _kept(model, setup).items()})
    of_last, of_first = (gradients if accumulates else part * gradients for part in _made(model, setup))
    # The last layers' checkpoints stay, and are used first; then one is in use and one on its way back.
    at_last = {GRADIENTS: of_last, **_waiting(model, setup, max(len(layers) - away, min(2, away)))}
    at_first = {GRADIENTS: of_first, **_waiting(model, setup, 1)}
    widest = max(layers, key=lambda layer: mlp_bytes(layer, setup) + hidden_bytes(model, layer, setup))
    hidden = hidden_bytes(model, widest, setup)
    qkv = setup.tokens_per_rank * max(qkv_numbers(one, setup) for one in model.attentions) * setup.itemsize
    of_mlp = {
        "hidden states of a layer": hidden, "queries, keys, values": qkv,
        "MLP intermediates": mlp_bytes(widest, setup) + chunk_bytes(model, setup),
        "gathered weights": layer_weights,
    }  # fmt: skip
    buffers = max(attention_bytes(one, setup) for one in model.attentions)
    of_attention = {
        "hidden states of a layer": hidden / 2, "queries, keys, values": qkv,
        "attention buffers": buffers, "gathered weights": layer_weights,
    }  # fmt: skip
    of_loss = {
        "hidden states of the head": 5.0 * setup.tokens_per_rank * model.hidden * setup.itemsize,
        "logits": logits_bytes(model, setup), "gathered weights": head_weights,
    }  # fmt: skip
    moments: dict[str, Parts] = {
        "backward of the last layer's MLP": {**at_last, **of_mlp},
        "backward of the last layer's attention": {**at_last, **of_attention},
        "backward of the first layer's MLP": {**at_first, **of_mlp},
        "backward of the first layer's attention": {**at_first, **of_attention},
        "loss": {**at_last, GRADIENTS: of_last if accumulates else 0.0, **of_loss},
    }
    outside = {
        "peer-to-peer buffers": max(peer_bytes(one, setup) for one in model.attentions),
        "CUDA and NCCL": CONTEXT_GIB * GIB,
    }
    return Memory(states, moments, outside, {name: size for name, size in of_host.items() if size})


def _made(model: ModelShape, setup: Setup) -> tuple[float, float]:
    """The parts of all gradients that are there in the backward of the last layer, and of the first one."""
    if setup.method != "full":  # of adapters: all but the layer's own
        count = len(model.layers)
        return 0.0, (count - 1) / count
    later = sum(layer.parameters for layer in model.layers[1:])
    return model.head / model.parameters, (model.head + model.others + later) / model.parameters


def _waiting(model: ModelShape, setup: Setup, layers: int) -> Parts:
    """Bytes that so many layers hold for their backwards."""
    if setup.checkpointing:
        return {name: float(layers * size) for name, size in _kept(model, setup).items()}
    saved = sorted((_saved_bytes(model, layer, setup) for layer in model.layers), reverse=True)
    return {ACTIVATIONS: float(sum(saved[:layers]))}


def _kept(model: ModelShape, setup: Setup) -> Parts:
    """Bytes that checkpointing keeps of one layer, on average."""
    sizes = [saved_attention_bytes(layer.attention, setup) for layer in model.layers] if setup.save_attention else [0]
    saved = sum(sizes) / len(sizes)
    return {CHECKPOINTS: checkpoint_bytes(model, setup), SAVED: saved}


# ---- states ---------------------------------------------------------------------------------------------------------


def trained_parameters(model: ModelShape, setup: Setup) -> int:
    return model.parameters if setup.method == "full" else model.adapter_parameters(setup.lora_rank)


def weight_bytes(model: ModelShape, setup: Setup) -> float:
    """Bytes of all weights, before they are sharded: frozen ones in their dtype, trained ones as hosts hold them.

    PEFT holds its matrices in float32, and accelerate's FSDP2 all trained weights; DDP leaves them as loaded.
    """
    if setup.method == "full":
        return model.parameters * float(_master_itemsize(setup))
    quantized = sum(layer.quantizable for layer in model.layers) if setup.method == "qlora" else 0
    frozen = (model.parameters - quantized) * setup.itemsize + quantized * FOUR_BIT
    return frozen + model.adapter_parameters(setup.lora_rank) * FLOAT32


def _master_itemsize(setup: Setup) -> int:
    return FLOAT32 if setup.is_sharded or setup.method != "full" else setup.itemsize


def _states(model: ModelShape, setup: Setup) -> tuple[Parts, Parts]:
    """Weights, gradients and optimizer states of one GPU, and those in host memory."""
    trained = trained_parameters(model, setup) / setup.shards
    weights = weight_bytes(model, setup) / setup.shards
    gradients = trained * _master_itemsize(setup)
    states = trained * OPTIMIZERS[setup.optimizer]
    if setup.optimizer == "adamw":
        states = trained * 2 * _master_itemsize(setup)
    found = {"weights": weights, GRADIENTS: gradients, "optimizer": states}
    if setup.offload_params:
        return {}, found
    if setup.gpus > 1 and not setup.is_sharded:
        found[BUCKETS] = gradients  # DDP reduces copies
    of_host = {"optimizer": found.pop("optimizer")} if setup.optimizer.startswith("paged") else {}
    return found, of_host


def _gathered(model: ModelShape, layer: LayerShape, setup: Setup) -> tuple[float, float]:
    """Unsharded weights and gradients under FSDP2: of the layers in a backward, and of the head in the loss.

    Two layers: the one that runs, and the one that is gathered ahead. The head: in the forward, where a loss in chunks
    has its peak, also the flat buffer of its gather, which stays until the next. A trained layer has its gradient, and
    its float32 input of the reduce-scatter.
    """
    quantized = layer.quantizable if setup.method == "qlora" else 0
    of_layer = (layer.parameters - quantized) * setup.itemsize + quantized * FOUR_BIT
    dequantized = max((a * b for a, b in layer.adapted), default=0) * setup.itemsize if quantized else 0
    head_gradient = model.head * (FLOAT32 + setup.itemsize) if setup.method == "full" else 0
    if not setup.is_sharded:
        return float(dequantized), float(head_gradient)
    trained = layer.parameters * (FLOAT32 + setup.itemsize) if setup.method == "full" else 0
    copies = 1.0 if setup.makes_logits else 2.0
    return 2 * of_layer + trained + dequantized, copies * model.head * setup.itemsize + head_gradient


def checkpoint_bytes(model: ModelShape, setup: Setup) -> int:
    """The input of one layer."""
    return setup.tokens_per_rank * model.hidden * setup.itemsize


def kept_bytes(model: ModelShape, setup: Setup) -> int:
    """A layer's checkpoint, with its saved attention: they are on the GPU or on the host together."""
    return int(sum(_kept(model, setup).values()))


def offloaded_layers(model: ModelShape, setup: Setup) -> int:
    """How many layers' checkpoints wait in host memory."""
    if setup.offload_above is None or not setup.checkpointing:
        return 0
    stay = setup.offload_above * GIB // kept_bytes(model, setup)
    return max(0, len(model.layers) - int(stay))


# ---- one layer ------------------------------------------------------------------------------------------------------


def saved_attention_bytes(attention: AttentionShape, setup: Setup) -> int:
    """Attention's output and log-sum-exp of one layer."""
    return setup.tokens_per_rank * (attention.out_numbers * setup.itemsize + attention.heads * FLOAT32)


def qkv_numbers(attention: AttentionShape, setup: Setup) -> int:
    """Numbers that attention saves for its backward; its output is not among them if checkpointing saves it."""
    out = 0 if setup.checkpointing and setup.save_attention else attention.out_numbers
    return attention.query_numbers + attention.kv_numbers + out


def hidden_bytes(model: ModelShape, layer: LayerShape, setup: Setup) -> float:
    """Bytes that a layer holds beside its MLP and its attention, for its backward.

    Each norm: its input in float32, and its output; the gradient of the layer's output. Queries and keys with norms:
    their inputs, in float32 likewise. Where adapters cast their inputs, each linear layer has a copy of its own. Norms
    in chunks (mlp_tokens), or fused: no float32, but the input of the second; the gradient of the MLP's input beside
    chunks.
    """
    wide = FLOAT32 // setup.itemsize
    if setup.chunk or setup.liger:
        numbers = (layer.hidden_norms + 2 + bool(setup.chunk)) * model.hidden
    else:
        each = wide + 1 + (setup.method == "full")  # the normed input, for the gradient of the norm's weight
        numbers = (layer.hidden_norms * each + 1) * model.hidden
    if layer.head_norms:
        each = 1 if setup.liger or setup.chunk else wide
        numbers += each * (layer.attention.query_numbers + layer.attention.kv_heads * layer.attention.key_width)
    if setup.casts_for_adapters:
        numbers += 4 * model.hidden
    return float(setup.tokens_per_rank * numbers * setup.itemsize)


def mlp_bytes(layer: LayerShape, setup: Setup) -> float:
    """The MLP at the worst moment of its backward.

    With a gate: gate, its activation (fused: not), up and their product, with two gradients; without: before and after
    the activation, and two gradients. Where adapters cast their input, it is there in float32, too. Experts: a token's
    copies, what they become, and their gradients.
    """
    each = (6 - setup.liger if layer.gated else 4) + (2 if setup.casts_for_adapters else 0)
    tokens = setup.chunk or setup.tokens_per_rank
    return float(tokens * (each * layer.mlp + 4 * layer.routed) * setup.itemsize)


def chunk_bytes(model: ModelShape, setup: Setup) -> float:
    """Hidden states of one chunk of an MLP: a copy of its input, its output, and the gradient of its input."""
    return float(3 * setup.chunk * model.hidden * setup.itemsize)


def _saved_bytes(model: ModelShape, layer: LayerShape, setup: Setup) -> float:
    """Without checkpointing: bytes that a layer saves from its forward to its backward. Liger's MLP computes the
    activation again, and chunks of one compute all but its input again."""
    numbers = qkv_numbers(layer.attention, setup)
    if setup.chunk:
        numbers -= model.hidden  # the gradient of the MLP's input is there in one layer alone
    else:
        numbers += (4 - setup.liger if layer.gated else 2) * layer.mlp + 2 * layer.routed
    return hidden_bytes(model, layer, setup) + setup.tokens_per_rank * numbers * setup.itemsize


def attention_bytes(attention: AttentionShape, setup: Setup) -> float:
    """Buffers of a layer's attention: the larger of its gather (forward) and its ring pass (backward).

    The gather: two groups of heads of the whole row. The ring pass: gradient of the output; dq, dk and dv; keys and
    values of two other ranks; in float32, dq of a group and two sets of accumulators of its dk and dv. One GPU computes
    all heads in one group.
    """
    tokens, size = setup.tokens_per_rank, setup.itemsize
    q, k, v = _meta(attention, setup)
    chunk = max(1, tokens // 2)
    heads, around, copies = attention.kv_heads, 0, 1
    if setup.ring_size > 1:
        heads = max(part.stop - part.start for part in ring_pass_groups(q, k, v, chunk, FLOAT32))
        around, copies = 2, 2
    group = tokens * heads * (attention.key_width + attention.value_width)
    wide = tokens * attention.query_numbers * heads / attention.kv_heads
    backward = (
        tokens * (attention.out_numbers + attention.query_numbers + attention.kv_numbers) * size
        + wide * FLOAT32 + around * group * size + copies * group * FLOAT32
    )  # fmt: skip
    if setup.ring_size == 1:
        return float(backward)
    groups = head_groups(q, k, v, _pulls(setup), 0, setup.padded, chunk)
    gathered = setup.padded * (attention.key_width + attention.value_width) * size * (groups[0].stop - groups[0].start)
    return float(max(backward, min(2, len(groups)) * gathered))


def peer_bytes(attention: AttentionShape, setup: Setup) -> float:
    """Buffers of peer-to-peer copies, in one node: two of a rank's keys and values, one of a group's accumulators."""
    if setup.ring_size == 1 or not setup.in_one_node:
        return 0.0
    q, k, v = _meta(attention, setup)
    chunk = max(1, setup.tokens_per_rank // 2)
    first = ring_pass_groups(q, k, v, chunk, FLOAT32)[0]
    halves = ring_pass_halves(q, k[:, :, first], _pulls(setup), chunk)
    sums = len(halves) * (halves[0].stop - halves[0].start) * (attention.key_width + attention.value_width) * FLOAT32
    return float(setup.tokens_per_rank * (2 * attention.kv_numbers * setup.itemsize + sums))


def _pulls(setup: Setup) -> Any:
    """A transport by peer-to-peer copies, as far as functions that choose groups of heads ask for it."""
    ring = SimpleNamespace(size=setup.ring_size)
    return SimpleNamespace(ring=ring, groups=2, bytes_per_gather=PULLED, whole_below=WHOLE)


def _meta(attention: AttentionShape, setup: Setup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a rank without memory: the ring's own functions choose groups by their shapes."""
    dtype, one = getattr(torch, setup.dtype), attention
    sizes = (one.heads, one.key_width), (one.kv_heads, one.key_width), (one.kv_heads, one.value_width)
    q, k, v = (torch.empty(1, setup.tokens_per_rank, *size, dtype=dtype, device="meta") for size in sizes)
    return q, k, v


# ---- the loss -------------------------------------------------------------------------------------------------------


def logits_bytes(model: ModelShape, setup: Setup) -> float:
    """Logits of a chunk of tokens, or of all tokens of a rank, in the backward of their cross entropy."""
    rows = setup.tokens_per_rank
    if not setup.makes_logits:
        rows = min(rows, rows_per_chunk(model.vocabulary))
    return float(LOSS_COPIES * rows * model.vocabulary * FLOAT32)
