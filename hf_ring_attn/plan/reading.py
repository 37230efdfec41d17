"""Reads the shape of a model from its modules on the meta device and its config."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import errors
from ..integration.context.introspect import globals_used, text_modules
from ..integration.context.shared_kv import makes_kv, takes_kv
from ..integration.model.decoder import decoder_layers, layer_kinds
from ..integration.model.recurrent import recurrent_layers
from .shape import AttentionShape, DeltaShape, LayerShape, ModelShape
from .tower import tower_of

WINDOWED = {"sliding_attention": ("sliding_window", 1), "chunked_attention": ("attention_chunk_size", 2)}
"""Kinds of layers that see few keys: the config's entry, and by what to divide it for the mean number of keys."""
FULL = {"full_attention", "attention"}
ATTENTION = ("attn", "attention")
DELTA_RULES = {
    "torch_chunk_gated_delta_rule": ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim"),
    "chunk_kimi_delta_attention": ("num_heads", "num_heads", "head_dim", "head_dim"),
}
"""Recurrences that a plan knows, and the attributes of their layers for heads, query and key heads, and widths."""
BY_CHANNEL = "chunk_kimi_delta_attention"


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
    found = decoder_layers(model)
    if not found or not found[1] or not isinstance(text.num_attention_heads, int):
        raise errors.CannotPlan(name, "its decoder layers were not found")
    recurrences = {id(module) for module in recurrent_layers(model).values()}
    layers = tuple(
        _layer(name, text, block, kind, recurrences) for block, kind in zip(found[1], layer_kinds(text), strict=True)
    )
    own, shared = _tables(model)
    rest = sum(p.numel() for p in model.parameters()) - sum(layer.parameters for layer in layers) - own - shared
    root, adapted = _outside(model, found[1])
    return ModelShape(
        name=name, hidden=text.hidden_size, vocabulary=text.vocab_size, layers=layers, embedding=own, head=shared,
        others=rest, root=root, adapted=adapted, tower=tower_of(config, model),
    )  # fmt: skip


def _tables(model: Any) -> tuple[int, int]:
    """Parameters of the input embedding that it has for itself, and of the output embedding."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        return table.weight.numel(), 0
    return (0 if table.weight is head.weight else table.weight.numel()), head.weight.numel()


def _outside(model: Any, layers: nn.ModuleList) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Reads `ModelShape.root` and `ModelShape.adapted` from the text model's modules outside of layers."""
    apart = {id(module) for module in (*layers.modules(), model.get_input_embeddings(), model.get_output_embeddings())}
    modules = [(name, module) for name, module in text_modules(model) if id(module) not in apart]
    weights = [p for name, module in modules if "norm" not in name for p in module.parameters(recurse=False)]
    linear = [module for _, module in modules if isinstance(module, nn.Linear)]
    return sum(p.numel() for p in weights), tuple((one.in_features, one.out_features) for one in linear)


# ---- one layer ------------------------------------------------------------------------------------------------------


def _layer(name: str, text: Any, block: nn.Module, kind: str, recurrences: set[int]) -> LayerShape:
    hidden, weights = text.hidden_size, dict(block.named_parameters())
    place, recurrence = next((x for x in block.named_modules() if id(x[1]) in recurrences), ("", None))
    attention = _attention(text, block, weights) if recurrence is None else _delta(name, kind, recurrence)
    window = _window(name, text, kind) if recurrence is None else None
    within = ATTENTION if recurrence is None else (*ATTENTION, f"{place}.")
    counts = {getattr(text, entry, None) for entry in EXPERTS}
    experts = {
        at: p
        for at, p in weights.items()
        if p.dim() > 1 and "router" not in at and (".experts." in f".{at}" or (p.dim() == 3 and p.shape[0] in counts))
    }
    linear = {at: p for at, p in weights.items() if p.dim() == 2 and at not in experts}
    in_mlp = {at: p for at, p in linear.items() if not any(part in at for part in within)}
    wide = max((p.shape[1] for p in in_mlp.values() if p.shape[0] == hidden), default=0)
    dense, chosen, of_experts, of_attention, routed = sum(p.numel() for p in in_mlp.values()), 0, 0, 0, 0
    if experts:
        taken, count = (_first(name, text, entries) for entries in (TAKEN, EXPERTS))
        inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        sizes = {at: p.numel() * taken // count for at, p in experts.items() if "bias" not in at}
        of_experts = sum(size for at, size in sizes.items() if not any(part in at for part in within))
        of_attention = sum(sizes.values()) - of_experts  # JetMoe's attention has experts, too
        chosen, routed = taken * inner, taken * hidden
    norms = [
        p.shape[0]
        for at, p in weights.items()
        if p.dim() == 1 and ("norm" in at or "ln_" in at) and at.endswith("weight")
        and (recurrence is None or not at.startswith(f"{place}."))
    ]  # fmt: skip
    own_input = weights.get("per_layer_input_gate.weight")
    return LayerShape(
        attention=attention, window=window, parameters=sum(p.numel() for p in weights.values()),
        quantizable=sum(p.numel() for p in linear.values()),
        active=sum(p.numel() for p in linear.values()) + of_experts + of_attention,
        adapted=tuple((p.shape[1], p.shape[0]) for p in linear.values()), mlp=wide + chosen,
        mlp_active=dense + of_experts, gated=2 * (dense + of_experts) > 5 * hidden * (wide + chosen),
        chosen=chosen, routed=routed, biases=any("bias" in at for at in experts),
        hidden_norms=norms.count(hidden), head_norms=any("q_norm" in at for at in weights),
        is_causal=all(getattr(module, "is_causal", True) for module in block.modules()),
        own_input=0 if own_input is None else own_input.shape[0],
        streams=text.altup_num_inputs if any(at.startswith("altup.") for at in weights) else 1,
    )  # fmt: skip


def _attention(text: Any, block: nn.Module, weights: dict[str, nn.Parameter]) -> AttentionShape:
    """Reads the attention of a layer from its module, which may have other heads than those of other layers."""
    heads = text.num_attention_heads
    if latent := _with(block, "qk_head_dim") or (vars(text) if getattr(text, "qk_head_dim", None) else None):
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        key_width, value_width = latent["qk_head_dim"], latent["v_head_dim"]
        return AttentionShape(heads=heads, kv_heads=kv_heads, key_width=key_width, value_width=value_width)
    own = _with(block, "head_dim") or {}
    width = own.get("head_dim") or getattr(text, "head_dim", None) or text.hidden_size // heads
    groups = own.get("num_key_value_groups")
    kv_heads = heads // groups if groups else getattr(text, "num_key_value_heads", None) or heads
    queries = next((p.shape[0] for at, p in weights.items() if at.endswith("q_proj.weight")), 0)
    return AttentionShape(
        heads=heads, kv_heads=kv_heads, key_width=width, value_width=width, has_gate=queries == 2 * heads * width,
        makes_kv=any(makes_kv(x) for x in block.modules()), takes_kv=any(takes_kv(x) for x in block.modules()),
    )  # fmt: skip


def _with(block: nn.Module, attribute: str) -> dict[str, Any] | None:
    """The attributes of the first module that has this one, a number."""
    return next((vars(x) for x in block.modules() if isinstance(getattr(x, attribute, None), int)), None)


def _delta(name: str, kind: str, layer: nn.Module) -> DeltaShape:
    rule = next((rule for rule in DELTA_RULES if rule in globals_used(layer)), None)
    if rule is None:
        raise errors.CannotPlan(name, f"the memory and time of its {type(layer).__name__} ({kind!r}) are not known")
    heads, key_heads, key_width, value_width = (vars(layer)[attribute] for attribute in DELTA_RULES[rule])
    return DeltaShape(
        heads=heads, key_heads=key_heads, key_width=key_width, value_width=value_width, by_channel=rule == BY_CHANNEL
    )


def _window(name: str, text: Any, kind: str) -> int | None:
    if kind in WINDOWED:
        entry, divisor = WINDOWED[kind]
        return int(getattr(text, entry)) // divisor
    if kind in FULL:
        return None
    raise errors.CannotPlan(name, f"the memory and time of its layers of kind {kind!r} are not known")


TAKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names under which configs have the number of experts that a token takes, and of all."""


def _first(name: str, text: Any, entries: tuple[str, ...]) -> int:
    found = next((x for entry in entries if isinstance(x := getattr(text, entry, None), int)), None)
    if found is None:
        raise errors.CannotPlan(name, f"its config has none of {', '.join(entries)}")
    return found
