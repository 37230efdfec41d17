"""Memory of one layer beside its attention."""

from __future__ import annotations

from .attention_memory import AttentionMemory, memory_of_softmax, normed_numbers, saved_attention_bytes
from .hardware import FLOAT32
from .linear_attention import memory_of_delta_rule
from .setup import Setup
from .shape import AttentionShape, LayerShape, ModelShape


def attention_memory(layer: LayerShape, setup: Setup) -> AttentionMemory:
    """Bytes of the layer's attention, of either kind."""
    if isinstance(layer.attention, AttentionShape):
        return memory_of_softmax(layer.attention, setup)
    return memory_of_delta_rule(layer.attention, setup)


def checkpointed_attention_bytes(layer: LayerShape, setup: Setup) -> int:
    """Bytes of attention that save_attention keeps; of linear attention it keeps none."""
    if not setup.save_attention or not isinstance(layer.attention, AttentionShape):
        return 0
    return saved_attention_bytes(layer.attention, setup)


def hidden_bytes(model: ModelShape, layer: LayerShape, setup: Setup) -> float:
    """Bytes that a layer holds beside its MLP and its attention, for its backward.

    Each norm: its input in float32, and its output; the gradient of the layer's output. Queries and keys with norms:
    their inputs, in float32 likewise. Where adapters cast their inputs, each linear layer has a copy of its own. Norms
    in chunks (mlp_tokens), or fused: no float32, but the input of the second; the gradient of the MLP's input beside
    chunks. An input of the layer's own: its gate, the activation of it, and their product. AltUp's streams: what their
    correction adds, and their gradients before and after it.
    """
    wide = FLOAT32 // setup.itemsize
    if setup.chunk or setup.liger:
        numbers = (layer.hidden_norms + 2 + bool(setup.chunk)) * model.hidden
    else:
        each = wide + 1 + (setup.method == "full")  # the normed input, for the gradient of the norm's weight
        numbers = (layer.hidden_norms * each + 1) * model.hidden
    numbers += 3 * layer.own_input + (2 * layer.streams - 1) * model.hidden * (layer.streams > 1)
    if layer.head_norms and isinstance(layer.attention, AttentionShape):
        each = 1 if setup.liger or setup.chunk else wide
        numbers += each * normed_numbers(layer.attention)
    if setup.casts_for_adapters:
        numbers += 4 * model.hidden
    return float(setup.tokens_per_rank * numbers * setup.itemsize)


def mlp_bytes(layer: LayerShape, setup: Setup) -> float:
    """The MLP at the worst moment of its backward.

    With a gate: gate, its activation (fused: not), up and their product, with two gradients; without: before and after
    the activation, and two gradients. Where adapters cast their input, it is there in float32, too. Experts: a token's
    copies, what they become, and their gradients; with biases also these for each token, and a sum.
    """
    each = (6 - setup.liger if layer.gated else 4) + (2 if setup.casts_for_adapters else 0)
    of_chosen = setup.liger * layer.gated + 2 * layer.biases  # Liger fuses no gate of experts
    numbers = each * layer.mlp + of_chosen * layer.chosen + 4 * layer.routed
    return float((setup.chunk or setup.tokens_per_rank) * numbers * setup.itemsize)


def chunk_bytes(model: ModelShape, setup: Setup) -> float:
    """Hidden states of one chunk of an MLP: a copy of its input, its output, and the gradient of its input."""
    return float(3 * setup.chunk * model.hidden * setup.itemsize)


def saved_bytes(model: ModelShape, layer: LayerShape, setup: Setup) -> float:
    """Without checkpointing: bytes that a layer saves from its forward to its backward. Liger's MLP computes the
    activation again, and chunks of one compute all but its input again."""
    if setup.chunk:
        numbers = -model.hidden  # the gradient of the MLP's input is there in one layer alone
    else:
        numbers = (4 - setup.liger if layer.gated else 2) * layer.mlp + 2 * layer.routed
    attention = attention_memory(layer, setup).saved
    return hidden_bytes(model, layer, setup) + attention + setup.tokens_per_rank * numbers * setup.itemsize
