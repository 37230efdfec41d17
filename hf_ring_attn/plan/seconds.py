"""Seconds of a training step on one GPU: operations and bytes over measured speeds, and what communication adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .attention_memory import normed_numbers
from .hardware import BIASES, EXPERTS, FLOAT32, LAYER_SECONDS, MATMUL, Gpu, attention_shares
from .linear_attention import NAME, delta_flops, exchanged_bytes, moved_numbers, scan_seconds
from .memory import kept_bytes, offloaded_layers, trained_parameters, weight_bytes
from .setup import Setup
from .shape import AttentionShape, DeltaShape, LayerShape, ModelShape
from .tower import tower_flops, tower_seconds


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step by kind of work; they add up.

    Args:
        linear_attention: None if it is in the model, and its time was not measured: a step takes longer than `total`.
        flops: of all GPUs, recomputation left out.
    """

    attention: float
    linear_attention: float | None
    matrix_products: float
    elementwise: float
    launches: float
    communication: float
    optimizer: float
    flops: float
    tower: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        scans = {NAME: self.linear_attention} if self.linear_attention else {}
        return {
            "attention": self.attention, **scans, "matrix products": self.matrix_products,
            "elementwise": self.elementwise, "launches": self.launches,
            "communication that waits": self.communication, "optimizer": self.optimizer,
            **({"vision tower": self.tower} if self.tower else {}),
        }  # fmt: skip

    @property
    def left_out(self) -> list[str]:
        """The names of parts whose time is not known."""
        return [NAME] if self.linear_attention is None else []

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _LayerSeconds:
    """One layer on one GPU: forward, recompute and backward; of attention, and of the rest."""

    attention: tuple[float, float, float]
    matrix_products: tuple[float, float, float]
    elementwise: tuple[float, float, float]

    def whole(self, phase: int) -> float:
        return self.attention[phase] + self.matrix_products[phase] + self.elementwise[phase]


def seconds_of(model: ModelShape, setup: Setup) -> Seconds:
    """Forecasts a step in which each ring trains one row."""
    kept = setup.keeps(len(model.layers))
    setups = [setup] * (len(model.layers) - kept) + [setup.of_kept()] * kept
    layers = [_layer_seconds(model, layer, own) for layer, own in zip(model.layers, setups, strict=True)]
    head_passes = 6 if setup.method == "full" else 4
    head = setup.tokens_per_rank * head_passes * (model.head + model.outside) / matmul_flops(setup)
    logits = 10 * FLOAT32 * setup.tokens_of_logits * model.vocabulary / setup.gpu.memory_speed
    waiting = sum(_waiting(*each) for each in zip(model.layers, layers, setups, strict=True))
    waiting += _offload(model, layers, setup)
    rows = setup.gpus // setup.ring_size
    both = list(zip(model.layers, layers, strict=True))
    scans = [sum(one.attention) for layer, one in both if isinstance(layer.attention, DeltaShape)]
    return Seconds(
        attention=sum(sum(one.attention) for layer, one in both if isinstance(layer.attention, AttentionShape)),
        linear_attention=None if scans and not all(scans) else sum(scans),
        matrix_products=sum(sum(one.matrix_products) for one in layers) + head,
        elementwise=sum(sum(one.elementwise) for one in layers) + logits,
        launches=LAYER_SECONDS * len(layers), communication=waiting, optimizer=_optimizer(model, setup),
        flops=rows * _needed_flops(model, setup),
        tower=tower_seconds(model.tower, setup) if model.tower and setup.pictures else 0.0,
    )  # fmt: skip


def matmul_flops(setup: Setup) -> float:
    """FLOP/s of matrix products."""
    return MATMUL * setup.peak_flops


def pairs(tokens: int, window: int | None) -> float:
    """Pairs of a query and a key that it sees, in a causal row."""
    seen = tokens if window is None else min(window, tokens)
    return seen * tokens - seen**2 / 2


def attention_flops(layer: LayerShape, tokens: int) -> tuple[float, float]:
    """Operations of one layer's attention over a row: forward (two products), backward (five); of a scan."""
    one = layer.attention
    if isinstance(one, DeltaShape):
        return delta_flops(one, tokens), 2 * delta_flops(one, tokens)
    seen, key, value = pairs(tokens, layer.window) * one.heads, one.key_width, one.value_width
    seen *= 1 if layer.is_causal else 2
    return 2 * seen * (key + value), 2 * seen * (3 * key + 2 * value)


def elementwise_numbers(model: ModelShape, layer: LayerShape, setup: Setup) -> float:
    """Numbers per token that unfused kernels of one layer's forward read and write, in the model's dtype.

    A norm: 18 per number (in float32). A residual: 3. RoPE: 10. The product with the gate: 5. Experts: `EXPERTS`.
    LoRA: its input once, its output six times (two products, a scale, a sum); where inputs are cast to float32, six
    times the input; beside 4-bit weights, a copy of the frozen layer's output. Fused (Liger): a norm 2, RoPE 2, the
    product with the gate 3. A gate of attention: 6. An input of the layer's own: 5. Each of AltUp's streams: 20.
    """
    norm, rope, gate = (2, 2, 3) if setup.liger else (18, 10, 5)
    numbers = float(norm * layer.hidden_norms * model.hidden + 2 * 3 * model.hidden)
    if isinstance(layer.attention, DeltaShape):
        numbers += moved_numbers(layer.attention, model.hidden)
    else:
        numbers += (rope + norm * layer.head_norms) * normed_numbers(layer.attention)
        numbers += 6 * layer.attention.has_gate * layer.attention.out_numbers
    numbers += 5 * layer.own_input + 20 * layer.streams * model.hidden * (layer.streams > 1)
    numbers += (gate if layer.gated else 2) * (layer.mlp - layer.chosen)
    numbers += EXPERTS * (layer.routed + layer.chosen) + BIASES * layer.chosen * layer.biases
    if setup.method != "full":
        inside, outside = (sum(sizes) for sizes in zip(*layer.adapted, strict=True))
        copy = 2 if setup.method == "qlora" else 0
        numbers += (6 + copy) * outside + (7 if setup.casts_for_adapters else 1) * inside
    return numbers


def _attention_seconds(layer: LayerShape, setup: Setup) -> tuple[float, float]:
    """Seconds of attention's kernels: forward, backward; 0 for linear attention whose time is not known."""
    if isinstance(layer.attention, DeltaShape):
        return scan_seconds(layer.attention, setup) or (0.0, 0.0)
    shares = attention_shares(setup.kernel_of(layer.attention), layer.attention.key_width)
    forward, backward = (
        flops / setup.ring_size / (share * setup.peak_flops)
        for flops, share in zip(attention_flops(layer, setup.padded), shares, strict=True)
    )
    return forward, backward


def _layer_seconds(model: ModelShape, layer: LayerShape, setup: Setup) -> _LayerSeconds:
    tokens, again = setup.tokens_per_rank, float(setup.checkpointing)
    # A checkpointed attention that is saved is not computed again.
    is_saved = setup.save_attention and isinstance(layer.attention, AttentionShape)
    attends_again = 0.0 if is_saved else again
    forward, backward = _attention_seconds(layer, setup)
    # A chunk is computed again in its backward, which the recompute of a checkpoint leaves to it.
    chunks = 2 * layer.mlp_active if setup.chunk and not setup.checkpointing else 0
    adapters = 0 if setup.method == "full" else setup.lora_rank * sum(sum(sizes) for sizes in layer.adapted)
    once = 2 * (layer.active + adapters)
    gradients = 4 * layer.active if setup.method == "full" else 2 * layer.active + 4 * adapters
    products = [tokens * flops / matmul_flops(setup) for flops in (once, again * once, gradients + chunks)]
    if setup.method == "qlora":  # each pass reads 4 bits, and writes and reads 16 of each weight
        dequantize = layer.quantizable * (0.5 + 2 * setup.itemsize) / setup.gpu.memory_speed
        products = [products[0] + dequantize, products[1] + again * dequantize, products[2] + dequantize]
    moved = elementwise_numbers(model, layer, setup) * tokens * setup.itemsize / setup.gpu.memory_speed
    return _LayerSeconds(
        (forward, attends_again * forward, backward), (products[0], products[1], products[2]),
        (moved, again * moved, 2 * moved),
    )  # fmt: skip


# ---- communication --------------------------------------------------------------------------------------------------


def _waiting(layer: LayerShape, one: _LayerSeconds, setup: Setup) -> float:
    """Seconds that compute waits for messages: what does not fit beside it."""
    waits, has_one_node = 0.0, setup.gpus <= setup.gpus_per_node
    if setup.ring_size > 1 and isinstance(layer.attention, DeltaShape):
        waits += (3 if setup.checkpointing else 2) * _exchange_seconds(layer.attention, setup)
    elif setup.ring_size > 1 and isinstance(layer.attention, AttentionShape):
        gather, sums = _ring_seconds(layer.attention, layer.window, setup)
        passes = [one.attention[0]] * (not layer.attention.takes_kv) + [one.attention[1]] * bool(one.attention[1])
        # The first group of heads arrives before anything can be computed: an eighth, as groups are small.
        waits += sum(max(gather - compute, gather / 8) for compute in passes)
        waits += max(gather + sums - one.attention[2], gather / 8)
    if setup.is_sharded:
        share, speed = (setup.gpus - 1) / setup.gpus, _slowest(has_one_node, setup.gpu)
        size = setup.itemsize * layer.parameters if setup.method != "qlora" else 0.6 * layer.parameters
        gather = size * share / speed
        reduce = FLOAT32 * layer.parameters * share / speed if setup.method == "full" else 0.0
        waits += max(0.0, gather - one.whole(0))
        waits += max(0.0, gather + reduce - one.whole(1) - one.whole(2))
    elif setup.gpus > 1:
        trained = layer.parameters * setup.itemsize if setup.method == "full" else 0
        waits += max(0.0, 2 * trained / _slowest(has_one_node, setup.gpu) - one.whole(1) - one.whole(2))
    return waits


def _slowest(in_one_node: bool, gpu: Gpu) -> float:
    """Bytes per second of the slowest link among GPUs of one node, or of several."""
    return 1e9 * (gpu.link_gbs if in_one_node else gpu.network_gbs)


def _exchange_seconds(attention: DeltaShape, setup: Setup) -> float:
    """Seconds of a layer's two all-to-alls, one after the other: of what the scan takes, and of its output.

    Each rank's share of a row goes to its node by links, and beyond it by the network. Nothing is computed beside them.
    """
    size, total = setup.ring_size, sum(exchanged_bytes(attention, setup))
    near = setup.ranks_in_node - 1
    links = near / setup.gpu.link_gbs + (size - 1 - near) / setup.gpu.network_gbs
    return total / size * links / 1e9


def _ring_seconds(attention: AttentionShape, window: int | None, setup: Setup) -> tuple[float, float]:
    """Transfers of one layer: keys and values of the other ranks, and float32 gradients once around the ring.

    A gather moves ranks of the own node by its links and all others by the network; each hop of a ring pass that spans
    nodes waits for its slowest link. Keys that no query of a windowed layer sees do not travel.
    """
    tokens, size = setup.tokens_per_rank, setup.ring_size
    seen = size - 1 if window is None else min(size - 1, 2 * -(-window // tokens))
    near = min(seen, setup.ranks_in_node - 1)
    one = tokens * attention.kv_numbers * setup.itemsize
    gather = one * (near / setup.gpu.link_gbs + (seen - near) / setup.gpu.network_gbs) / 1e9
    sums = seen * tokens * attention.kv_numbers * FLOAT32 / _slowest(setup.in_one_node, setup.gpu)
    return gather, sums


def _offload(model: ModelShape, layers: list[_LayerSeconds], setup: Setup) -> float:
    """Seconds that a step waits for host memory: checkpoints, and under offload_params weights and gradients."""
    speed = setup.gpu.host_gbs * 1e9
    waits = 0.0
    copy = kept_bytes(model, setup) / speed
    for one in layers[: offloaded_layers(model, setup)]:
        waits += max(0.0, copy - one.whole(0)) + max(0.0, copy - one.whole(1) - one.whole(2))
    if setup.offload_params:
        weights = weight_bytes(model, setup) / setup.shards
        gradients = trained_parameters(model, setup) * FLOAT32 / setup.shards
        waits += (2 * weights + gradients) / speed
    return waits


def _optimizer(model: ModelShape, setup: Setup) -> float:
    """Seconds of an Adam step: weights, gradients and two states, read and written; on the host if they are there."""
    moved = 7 * FLOAT32 * trained_parameters(model, setup) / setup.shards
    return moved / (setup.gpu.host_gbs * 1e9) if setup.offload_params else moved / setup.gpu.memory_speed


def _needed_flops(model: ModelShape, setup: Setup) -> float:
    """Operations of one row's step, recomputation left out: what MFU counts."""
    weights = sum(layer.active for layer in model.layers) + model.head + model.outside
    trained = 0 if setup.method != "full" else weights
    adapters = 0 if setup.method == "full" else model.adapter_parameters(setup.lora_rank)
    attention = sum(3 * attention_flops(layer, setup.tokens)[0] for layer in model.layers)
    if model.tower and setup.pictures:
        attention += tower_flops(model.tower, replace(setup, ring=1)) * (3 if trained else 1)
    return setup.tokens * (4 * weights + 2 * trained + 6 * adapters) + attention
