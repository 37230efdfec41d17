"""The sizes of a model that memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of one layer.

    Args:
        heads, kv_heads: of queries, of keys and values. key_width, value_width: of one head.
        has_gate: its output is multiplied by a gate, as in Qwen3-Next.
        makes_kv, takes_kv: its keys and values stay for other layers; it attends to those of another layer.
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    has_gate: bool = False
    makes_kv: bool = False
    takes_kv: bool = False

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
class DeltaShape:
    """The linear attention of one layer, by a gated delta rule.

    Args:
        heads, key_heads: of values, of queries and keys. key_width, value_width: of one head.
        by_channel: each number of a key has its own decay, as in Kimi Linear; else each head.
    """

    heads: int
    key_heads: int
    key_width: int
    value_width: int
    by_channel: bool

    @property
    def mixed_numbers(self) -> int:
        """Numbers of queries, keys and values per token, which a short convolution mixes; of outputs, `out_numbers`."""
        return 2 * self.key_heads * self.key_width + self.out_numbers

    @property
    def out_numbers(self) -> int:
        return self.heads * self.value_width


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One decoder layer. Widths are numbers per token.

    Args:
        window: keys that a query sees on average; None: all before it.
        parameters: all of them. quantizable: those of linear layers, which 4-bit loading quantizes.
        active: parameters of matrix products that one token takes part in (of experts, the chosen ones).
        adapted: (inputs, outputs) of each linear layer, which LoRA adapts.
        mlp: width of the MLP's intermediates. mlp_active: its part of ``active``. gated: it has a gate (SwiGLU).
        chosen: the part of ``mlp`` that is of a token's experts. routed: numbers of its copies for them. biases: the
            experts have biases.
        hidden_norms: norms as wide as the hidden states. head_norms: queries and keys are normed, too.
        is_causal: a query sees only keys before it, and not those behind it, as in BERT.
        own_input: width of the layer's own embedding of a token, as in Gemma 3n and 4; 0: it has none.
        streams: hidden states that it takes and returns: 1, or those of AltUp in Gemma 3n.
    """

    attention: AttentionShape | DeltaShape
    window: int | None
    parameters: int
    quantizable: int
    active: int
    adapted: tuple[tuple[int, int], ...]
    mlp: int
    mlp_active: int
    gated: bool
    chosen: int
    routed: int
    biases: bool
    hidden_norms: int
    head_norms: bool
    is_causal: bool = True
    own_input: int = 0
    streams: int = 1


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """A vision transformer.

    Args:
        name: of the module. patches: of a picture. pixels: numbers of a picture.
        hidden, mlp: widths of a patch's states, and of the MLP's. active: parameters of linear layers in blocks.
    """

    name: str
    layers: int
    hidden: int
    mlp: int
    active: int
    patches: int
    pixels: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A causal language model.

    Args:
        head: parameters of the output embedding; embedding: those of the input embedding, 0 if they are tied.
        others: parameters outside of layers and embeddings (norms, towers for images).
        root: those of them that FSDP2 gathers for the whole step: of the text model, but its last norm.
        adapted: (inputs, outputs) of each linear layer of the text model outside of decoder layers and the head.
        tower: of pictures, if its sizes are known.
    """

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[LayerShape, ...]
    embedding: int
    head: int
    others: int
    root: int = 0
    adapted: tuple[tuple[int, int], ...] = ()
    tower: TowerShape | None = None

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers) + self.embedding + self.head + self.others

    @property
    def attentions(self) -> set[AttentionShape]:
        """The attentions of layers that have softmax, each once."""
        return {layer.attention for layer in self.kinds if isinstance(layer.attention, AttentionShape)}

    @cached_property
    def kinds(self) -> list[LayerShape]:
        """The layers, those that are alike once."""
        return list(dict.fromkeys(self.layers))

    @property
    def shared_kv_numbers(self) -> int:
        """Numbers per token of keys and values that stay for other layers, whether or not there are such."""
        shapes = [layer.attention for layer in self.layers if isinstance(layer.attention, AttentionShape)]
        return sum(one.kv_numbers for one in shapes if one.makes_kv)

    @property
    def shares_kv(self) -> bool:
        return any(one.takes_kv for one in self.attentions)

    @property
    def streams(self) -> int:
        return max(layer.streams for layer in self.kinds)

    @property
    def outside(self) -> int:
        """Parameters of the linear layers in ``adapted``."""
        return sum(inputs * outputs for inputs, outputs in self.adapted)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA matrices of ``rank`` on every linear layer."""
        return rank * self._adapted_widths

    @cached_property
    def _adapted_widths(self) -> int:
        sizes = [*self.adapted, *(sizes for layer in self.layers for sizes in layer.adapted)]
        return sum(map(sum, sizes))
