"""Peak memory of a GPU in a training step, by part, counted tensor by tensor; nothing here is fitted.

T: tokens of a rank; a "number" is one value per token. Weights and the optimizer's states are there all the time. On
top of them comes one of these moments, the largest of which is the peak: the loss; in the last layer and in the first
one the backward of the MLP, after its layer was recomputed, and the backward (or gather) of attention. A backward
begins with the last layer: the checkpoints of all layers are there, and no gradients but the head's. In the first layer
there is one checkpoint, and almost all gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.chunked_loss import rows_per_chunk
from .attention_memory import peer_bytes
from .hardware import CONTEXT_GIB, FLOAT32, GIB, SLACK
from .layer_memory import attention_memory, checkpointed_attention_bytes, chunk_bytes, hidden_bytes, mlp_bytes
from .layer_memory import saved_bytes as layer_bytes
from .setup import OPTIMIZERS, Setup
from .shape import LayerShape, ModelShape
from .tower import tower_bytes

Parts = dict[str, float]
"""Bytes by name."""

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


CHECKPOINTS, SAVED, ACTIVATIONS = "layer checkpoints", "saved attention", "activations of kept layers"
GRADIENTS, BUCKETS = "gradients", "gradient buckets"
OWN_INPUTS, STREAMS, SHARED_KV = "inputs of each layer's own", "AltUp's projected streams", "shared keys and values"


def memory_of(model: ModelShape, setup: Setup, accumulates: bool = False) -> Memory:
    """Counts the memory of a step.

    Args:
        accumulates: the step has several batches, so that the gradients of the first are there all the time.
    """
    states, of_host = _states(model, setup)
    gradients = states.pop(GRADIENTS, 0.0)
    layers = model.layers
    largest = max(model.kinds, key=lambda layer: layer.parameters)
    layer_weights, head_weights = _gathered(model, largest, setup)
    away = offloaded_layers(model, setup)
    of_host.update({name: float(away * size) for name, size in _kept(model, setup).items()})
    of_last, of_first = (gradients if accumulates else part * gradients for part in _made(model, setup))
    in_forward, in_backward = (_outside_layers(model, setup, has_gradients) for has_gradients in (False, True))
    # The last layers' checkpoints stay, and are used first; then one is in use and one on its way back.
    waiting = _waiting(model, setup, max(len(layers) - away, min(2, away)))
    # What a kept layer holds is counted with its own backward, as that of a recomputed one.
    kept = setup.keeps(len(layers))
    before = _waiting(model, setup, len(layers) - 1) if kept else waiting
    at_last = {GRADIENTS: of_last, **before, **in_backward}
    at_first = {GRADIENTS: of_first, **_waiting(model, setup, int(kept < len(layers))), **in_backward}
    of_mlp, of_attention = _largest(model, setup.of_kept() if kept else setup, layer_weights)
    of_loss = {
        "hidden states of the head": _head_hidden_bytes(model, setup),
        "logits": logits_bytes(model, setup), "gathered weights": head_weights,
    }  # fmt: skip
    moments: dict[str, Parts] = {
        "backward of the last layer's MLP": {**at_last, **of_mlp},
        "backward of the last layer's attention": {**at_last, **of_attention},
        "backward of the first layer's MLP": {**at_first, **of_mlp},
        "backward of the first layer's attention": {**at_first, **of_attention},
        "loss": {GRADIENTS: of_last if accumulates else 0.0, **waiting, **in_forward, **of_loss},
    }
    if of_root := _root_gradient_bytes(model, setup):
        moments["backward of the embeddings"] = {GRADIENTS: gradients, "gathered weights": of_root, **in_backward}
    if model.tower and setup.pictures:
        of_tower = {"vision tower": tower_bytes(model.tower, setup)}
        moments["forward of the vision tower"] = {GRADIENTS: of_last if accumulates else 0.0, **of_tower}
    outside = {
        "peer-to-peer buffers": max((peer_bytes(one, setup) for one in model.attentions), default=0.0),
        "CUDA and NCCL": CONTEXT_GIB * GIB,
    }
    return Memory(states, moments, outside, {name: size for name, size in of_host.items() if size})


def _largest(model: ModelShape, setup: Setup, weights: float) -> tuple[Parts, Parts]:
    """Parts of the layer with the most memory: in the backward of its MLP, and of its attention."""
    of_mlp: list[Parts] = []
    of_attention: list[Parts] = []
    # Gathered once for all layers that attend to them, and there from the first of these to the last.
    gathers = setup.ring_size > 1 and model.shares_kv
    shared = float(setup.padded * model.shared_kv_numbers * setup.itemsize * gathers)
    for layer in model.kinds:
        attention, hidden = attention_memory(layer, setup), hidden_bytes(model, layer, setup)
        of_mlp.append({
            "hidden states of a layer": hidden, attention.name: attention.saved,
            "MLP intermediates": mlp_bytes(layer, setup) + chunk_bytes(model, setup), "gathered weights": weights,
        })  # fmt: skip
        of_attention.append({
            "hidden states of a layer": hidden / 2, attention.name: attention.at_backward,
            "attention buffers": max(attention.buffers, shared), "gathered weights": weights,
        })  # fmt: skip
    return max(of_mlp, key=_sum), max(of_attention, key=_sum)


def _sum(parts: Parts) -> float:
    return sum(parts.values())


def _outside_layers(model: ModelShape, setup: Setup, has_gradients: bool) -> Parts:
    """Bytes that wait outside of layers from the forward to the end of the backward, and their gradients.

    Inputs of each layer's own: their sum with the projected ones, and the input of its norm in float32; two gradients.
    AltUp: each projected stream before and after it is scaled. Keys and values that stay for other layers.
    """
    tokens, size = setup.tokens_per_rank, setup.itemsize
    of_input = size + FLOAT32 * (2 if setup.method == "full" else 1) + 2 * size * has_gradients
    return {
        OWN_INPUTS: float(tokens * sum(layer.own_input for layer in model.layers) * of_input),
        STREAMS: float(tokens * 2 * (model.streams - 1) * model.hidden * size),
        SHARED_KV: float(tokens * model.shared_kv_numbers * size * (1 + (has_gradients and model.shares_kv))),
    }


def _head_hidden_bytes(model: ModelShape, setup: Setup) -> float:
    """Hidden states in the loss; AltUp's: all streams, and each other one projected, before and after it is scaled."""
    numbers = 5 if model.streams == 1 else 5 + 3 * model.streams - 2
    return float(numbers * setup.tokens_per_rank * model.hidden * setup.itemsize)


def _made(model: ModelShape, setup: Setup) -> tuple[float, float]:
    """The parts of all gradients that are there in the backward of the last layer, and of the first one."""
    if setup.method != "full":  # of adapters: all but the layer's own
        count = len(model.layers)
        return 0.0, (count - 1) / count
    later = sum(layer.parameters for layer in model.layers[1:])
    made = model.head + model.others - model.root + later
    return model.head / model.parameters, made / model.parameters


def _waiting(model: ModelShape, setup: Setup, layers: int) -> Parts:
    """Bytes that the first so many layers hold for their backwards."""
    checkpointed = min(layers, len(model.layers) - setup.keeps(len(model.layers)))
    found = {name: float(checkpointed * size) for name, size in _kept(model, setup).items()}
    each = activations(model, setup)
    return {**found, ACTIVATIONS: sum(each[layer] for layer in model.layers[checkpointed:layers])}


def activations(model: ModelShape, setup: Setup) -> dict[LayerShape, float]:
    """Bytes of each kind of layer that is kept, or not checkpointed at all."""
    return {layer: layer_bytes(model, layer, setup.of_kept()) for layer in model.kinds}


def _kept(model: ModelShape, setup: Setup) -> Parts:
    """Bytes that checkpointing keeps of one layer, on average."""
    sizes = [checkpointed_attention_bytes(layer, setup) for layer in model.layers]
    return {CHECKPOINTS: checkpoint_bytes(model, setup), SAVED: sum(sizes) / len(sizes)}


# ---- states ---------------------------------------------------------------------------------------------------------


def trained_parameters(model: ModelShape, setup: Setup) -> int:
    return model.parameters if setup.method == "full" else model.adapter_parameters(setup.lora_rank)


def weight_bytes(model: ModelShape, setup: Setup) -> float:
    """Bytes of all weights, before they are sharded: frozen ones in their dtype, trained ones as hosts hold them.

    PEFT holds its matrices in float32, and accelerate's FSDP2 all trained weights; DDP leaves them as loaded.
    """
    if setup.method == "full":
        return model.parameters * float(_master_itemsize(setup))
    quantized = model.outside + sum(layer.quantizable for layer in model.layers) if setup.method == "qlora" else 0
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
    its float32 input of the reduce-scatter. The root's weights stay for the whole step.
    """
    quantized = layer.quantizable if setup.method == "qlora" else 0
    of_layer = (layer.parameters - quantized) * setup.itemsize + quantized * FOUR_BIT
    dequantized = max((a * b for a, b in layer.adapted), default=0) * setup.itemsize if quantized else 0
    head_gradient = model.head * (FLOAT32 + setup.itemsize) if setup.method == "full" else 0
    if not setup.is_sharded:
        return float(dequantized), float(head_gradient)
    trained = layer.parameters * (FLOAT32 + setup.itemsize) if setup.method == "full" else 0
    copies, root = 1.0 if setup.makes_logits else 2.0, model.root * setup.itemsize
    return 2 * of_layer + trained + dequantized + root, copies * model.head * setup.itemsize + head_gradient + root


def _root_gradient_bytes(model: ModelShape, setup: Setup) -> float:
    """The root's weights that FSDP2 gathered, with their gradient, and its float32 input of the reduce-scatter."""
    if not setup.is_sharded or setup.method != "full":
        return 0.0
    return model.root * float(2 * setup.itemsize + FLOAT32)


def checkpoint_bytes(model: ModelShape, setup: Setup) -> int:
    """The input of one layer."""
    return setup.tokens_per_rank * model.streams * model.hidden * setup.itemsize


def kept_bytes(model: ModelShape, setup: Setup) -> int:
    """A layer's checkpoint, with its saved attention: they are on the GPU or on the host together."""
    return int(sum(_kept(model, setup).values()))


def offloaded_layers(model: ModelShape, setup: Setup) -> int:
    """How many layers' checkpoints wait in host memory."""
    if setup.offload_above is None or not setup.checkpointing:
        return 0
    stay = setup.offload_above * GIB // kept_bytes(model, setup)
    return max(0, len(model.layers) - int(stay))


# ---- the loss -------------------------------------------------------------------------------------------------------


def logits_bytes(model: ModelShape, setup: Setup) -> float:
    """Logits of a chunk of tokens, of all tokens of a rank, or of the row, in the backward of their cross entropy."""
    rows = setup.tokens_of_logits
    if not setup.makes_logits:
        rows = min(rows, rows_per_chunk(model.vocabulary))
    return float(LOSS_COPIES * rows * model.vocabulary * FLOAT32)
