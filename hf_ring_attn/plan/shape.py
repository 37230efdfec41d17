"""The sizes of a model that memory and time depend on, read from its modules on the meta device and its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import errors
from ..integration.model.decoder import decoder_layers, layer_kinds

WINDOWED = {"sliding_attention": ("sliding_window", 1), "chunked_attention": ("attention_chunk_size", 2)}
"""Kinds of layers that see few keys: the config's entry, and by what to divide it for the mean number of keys."""
FULL = {"full_attention", "attention"}
ATTENTION = ("attn", "attention")


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of one layer.

    Args:
        heads, kv_heads: of queries, of keys and values. key_width, value_width: of one head.
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int

    @property
    def query_numbers(self) -> int:
        """Numbers of all queries per token; of attention's outputs, `out_numbers`; of keys and values together."""
        return self.heads * self.key_width

    @property
    def out_numbers(self) -> int:
        return self.heads * self.value_width

    @property
    def kv_numbers(self) -> int:
        return self.kv_heads * (self.key_width + self.value_width)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One decoder layer. Widths are numbers per token.

    Args:
        window: keys that a query sees on average; None: all before it.
        parameters: all of them. quantizable: those of linear layers, which 4-bit loading quantizes.
        active: parameters of matrix products that one token takes part in (of experts, the chosen ones).
        adapted: (inputs, outputs) of each linear layer, which LoRA adapts.
        mlp: width of the MLP's intermediates (of all chosen experts). mlp_active: its part of ``active``.
        routed: numbers of one token's copies for its experts. gated: it has a gate (SwiGLU).
        hidden_norms: norms as wide as the hidden states. head_norms: queries and keys are normed, too.
    """

    attention: AttentionShape
    window: int | None
    parameters: int
    quantizable: int
    active: int
    adapted: tuple[tuple[int, int], ...]
    mlp: int
    mlp_active: int
    routed: int
    gated: bool
    hidden_norms: int
    head_norms: bool


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A causal language model.

    Args:
        head: parameters of the output embedding; embedding: those of the input embedding, 0 if they are tied.
        others: parameters outside of layers and embeddings (norms, towers for images).
    """

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[LayerShape, ...]
    embedding: int
    head: int
    others: int

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers) + self.embedding + self.head + self.others

    @property
    def attentions(self) -> set[AttentionShape]:
        """The attentions of layers, each once."""
        return {layer.attention for layer in self.layers}

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA matrices of ``rank`` on every linear layer."""
        return sum(rank * sum(sizes) for layer in self.layers for sizes in layer.adapted)


def shape_of(config: Any, model: nn.Module) -> ModelShape:
    """Reads the shape of ``model``, which may be on the meta device.

    Raises:
        CannotPlan: it has layers whose memory and time are not known here.
    """
    try:
        return _read(type(model).__name__, config, model)
    except errors.Refused:
        raise
    except Exception as error:  # no attention heads, or other ones in each layer, of which transformers has an error
        raise errors.CannotPlan(type(model).__name__, f"its config is of another form ({error})"[:200]) from error


def _read(name: str, config: Any, model: nn.Module) -> ModelShape:
    text = config.get_text_config()
    if getattr(text, "num_kv_shared_layers", 0):
        raise errors.CannotPlan(name, "some of its layers share keys and values")
    if getattr(text, "hidden_size_per_layer_input", 0):
        raise errors.CannotPlan(name, "each of its layers has an embedding of its own")
    hidden, found = text.hidden_size, decoder_layers(model)
    if found is None or not isinstance(text.num_attention_heads, int):
        raise errors.CannotPlan(name, "its decoder layers were not found")
    windows = list(_windows(name, text))
    layers = tuple(_layer(name, text, block, hidden, window) for block, window in zip(found[1], windows, strict=True))
    own, shared = _tables(model)
    rest = sum(p.numel() for p in model.parameters()) - sum(layer.parameters for layer in layers) - own - shared
    return ModelShape(
        name=name, hidden=hidden, vocabulary=text.vocab_size, layers=layers, embedding=own, head=shared, others=rest,
    )  # fmt: skip


def _tables(model: Any) -> tuple[int, int]:
    """Parameters of the input embedding that it has for itself, and of the output embedding."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        return table.weight.numel(), 0
    return (0 if table.weight is head.weight else table.weight.numel()), head.weight.numel()


def _attention(text: Any, block: nn.Module) -> AttentionShape:
    """Reads the attention of a layer from its module, which may have other heads than those of other layers."""
    heads = text.num_attention_heads
    if getattr(text, "qk_head_dim", None):  # latent attention
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return AttentionShape(heads=heads, kv_heads=kv_heads, key_width=text.qk_head_dim, value_width=text.v_head_dim)
    own = next((vars(x) for x in block.modules() if isinstance(getattr(x, "head_dim", None), int)), {})
    width = own.get("head_dim") or getattr(text, "head_dim", None) or text.hidden_size // heads
    groups = own.get("num_key_value_groups")
    kv_heads = heads // groups if groups else getattr(text, "num_key_value_heads", None) or heads
    return AttentionShape(heads=heads, kv_heads=kv_heads, key_width=width, value_width=width)


def _windows(name: str, text: Any) -> Iterator[int | None]:
    for kind in layer_kinds(text):
        if kind in WINDOWED:
            entry, divisor = WINDOWED[kind]
            yield getattr(text, entry) // divisor
        elif kind in FULL:
            yield None
        else:
            raise errors.CannotPlan(name, f"the memory and time of its layers of kind {kind!r} are not known")


def _layer(name: str, text: Any, block: nn.Module, hidden: int, window: int | None) -> LayerShape:
    weights = dict(block.named_parameters())
    experts = {at: p for at, p in weights.items() if ".experts." in f".{at}" and p.dim() > 1}
    linear = {at: p for at, p in weights.items() if p.dim() == 2 and at not in experts}
    in_mlp = {at: p for at, p in linear.items() if not any(part in at for part in ATTENTION)}
    wide = max((p.shape[1] for p in in_mlp.values() if p.shape[0] == hidden), default=0)
    dense, chosen, of_experts, routed = sum(p.numel() for p in in_mlp.values()), 0, 0, 0
    if experts:
        taken, count = (_first(name, text, entries) for entries in (TAKEN, EXPERTS))
        inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        of_experts = sum(p.numel() for p in experts.values()) * taken // count
        chosen, routed = taken * inner, taken * hidden
    norms = [
        p.shape[0]
        for at, p in weights.items()
        if p.dim() == 1 and ("norm" in at or "ln_" in at) and at.endswith("weight")
    ]
    return LayerShape(
        attention=_attention(text, block), window=window, parameters=sum(p.numel() for p in weights.values()),
        quantizable=sum(p.numel() for p in linear.values()),
        active=sum(p.numel() for p in linear.values()) + of_experts,
        adapted=tuple((p.shape[1], p.shape[0]) for p in linear.values()), mlp=wide + chosen,
        mlp_active=dense + of_experts, routed=routed, gated=2 * (dense + of_experts) > 5 * hidden * (wide + chosen),
        hidden_norms=norms.count(hidden), head_norms=any("q_norm" in at for at in weights),
    )  # fmt: skip


TAKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names under which configs have the number of experts that a token takes, and of all."""


def _first(name: str, text: Any, entries: tuple[str, ...]) -> int:
    found = next((x for entry in entries if isinstance(x := getattr(text, entry, None), int)), None)
    if found is None:
        raise errors.CannotPlan(name, f"its config has none of {', '.join(entries)}")
    return found
