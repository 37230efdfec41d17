"""Models of a program's own whose layers have a type that the ring does not know: attention on whole documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.plain_jobs import Batch, attempt, gradients_of
from tests.helpers.jobs.whole_layer_jobs import by_documents
from tests.helpers.models.tiny_models import tiny

WIDTH = 32
KIND = "compressed_sparse_attention"


class Averaging(LlamaAttention):
    """Adds to each key the mean of the keys before it."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, shared: Any = None, table: Any = None,
        angles: Any = None, places: Any = None, heads: Any = None, **_: Any,
    ) -> Any:  # as layers call it  # fmt: skip
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (x(hidden_states).view(shape).transpose(1, 2) for x in (self.q_proj, self.k_proj, self.v_proj))
        k = k + k.cumsum(2) / torch.arange(1, k.shape[2] + 1, dtype=k.dtype)[:, None]
        if shared is not None:
            k = shared.setdefault("keys", k) + k  # those of the first layer
        if angles is not None:
            k = k * (1 + angles)
        if places is not None:
            v = v * (1 + places.to(v.dtype).sin()[:, None])
        if heads is not None:
            q = q * heads[:, None, None]
        if table is not None:
            v = v * (1 + table.to(v.dtype).mean(-1).sin()[..., None])
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.result(self.o_proj(out.reshape(hidden_states.shape)), weights, hidden_states)

    def result(self, out: Tensor, weights: Any, x: Tensor) -> Any:
        return out, weights


class WeightsFirst(Averaging):
    def result(self, out: Tensor, weights: Any, x: Tensor) -> Any:
        return weights, out


class Gated(Averaging):
    """Returns a gate of each token beside its result."""

    def result(self, out: Tensor, weights: Any, x: Tensor) -> Any:
        return out, self.gate(x).sigmoid()


class WithModule(Averaging):
    """Has a module of dropout, which drops nothing. It was refused, since a module is never false."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.attention_dropout: Any = nn.Dropout(0.0)


class BothWays(Averaging):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_causal = False


class Counting(Averaging):
    """Keeps what it made for the latest call, and uses it by itself."""

    count: Any = None

    def result(self, out: Tensor, weights: Any, x: Tensor) -> Any:
        if self.count is None or len(self.count) != x.shape[1]:
            self.count = torch.arange(x.shape[1])
        return out * (1 + self.count.to(out.dtype).sin()[:, None]), weights


class Choosing(Averaging):
    """Keeps which tokens it chose."""

    def result(self, out: Tensor, weights: Any, x: Tensor) -> Any:
        self.chosen = x.detach().mean(-1, keepdim=True) > 0
        return out, weights


class Inheriting(Averaging):
    """Leaves the attention to its parent."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(2 * hidden_states, *args, **kwargs)


class Around(nn.Module):
    """What a decoder layer has in place of an attention that takes, or returns, other things."""

    def __init__(self, attention: nn.Module, shared: dict[str, Any], call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention, self.shared, self.call = attention, shared, call

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return self.call(self, hidden_states, **kwargs), None


def plain(around: Any, x: Tensor, **kwargs: Any) -> Tensor:
    found: Tensor = around.attention(x, **kwargs)[0]
    return found


def second(around: Any, x: Tensor, **kwargs: Any) -> Tensor:
    found: Tensor = around.attention(x, **kwargs)[1]
    return found


def gated(around: Any, x: Tensor, **kwargs: Any) -> Tensor:
    found, gate = around.attention(x, **kwargs)
    gated: Tensor = found if gate is None else found * gate
    return gated


def sharing(around: Any, x: Tensor, **kwargs: Any) -> Tensor:
    found: Tensor = around.attention(x, shared=around.shared, **kwargs)[0]
    return found


def sharing_beside_tokens(around: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """The dict has tokens, too, so a layer on whole rows gets a copy of it."""
    around.shared["tokens"] = x
    return sharing(around, x, **kwargs)


def choosing(around: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """A later layer takes what the first one chose."""
    first = around.shared.setdefault("first", around.attention)
    around.attention.other = [] if first is around.attention else [first]
    found: Tensor = around.attention(x, **kwargs)[0]
    return found


class Taking(Choosing):
    other: Any = ()

    def result(self, out: Tensor, weights: Any, x: Tensor) -> Any:
        for first in self.other:
            out = out * (1 + first.chosen.to(out.dtype))
        return super().result(out, weights, x)


def of_pairs(make: Callable[[Tensor], Tensor], around: Any, x: Tensor, **kwargs: Any) -> Tensor:
    at = torch.arange(x.shape[1])
    found: Tensor = around.attention(x, table=make(at[:, None] - at), **kwargs)[0]
    return found


def without_batch_axis(around: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """As models without padding pass RoPE: [T, D], and positions [T]; and a number for each head."""
    angles, heads = kwargs["position_embeddings"][0][0], torch.arange(around.attention.config.num_attention_heads)
    places = kwargs["position_ids"][0]
    found: Tensor = around.attention(x, angles=angles, places=places, heads=1 + heads.to(x.dtype), **kwargs)[0]
    return found


Kind = tuple[type[Averaging], Callable[..., Tensor]]
EXACT: dict[str, Kind] = {
    "keys": (Averaging, plain),
    "weights first": (WeightsFirst, second),
    "a gate beside tokens": (Gated, gated),
    "distances": (Averaging, partial(of_pairs, lambda x: x)),
    "a parent's forward": (Inheriting, plain),
    "no batch axis": (Averaging, without_batch_axis),
    "its own attribute": (Counting, plain),
    "a module of dropout": (WithModule, plain),
}
CHOICE = "another's attribute"
SHARING: dict[str, Kind] = {
    CHOICE: (Taking, choosing),
    "keys in a dict": (Averaging, sharing),
    "keys in a dict with tokens": (Averaging, sharing_beside_tokens),
}
REFUSED: dict[str, Kind] = {
    "both ways": (BothWays, plain),
    "a bias of pairs": (Averaging, partial(of_pairs, lambda x: x.sin()[None, None])),
    "pairs that see": (Averaging, partial(of_pairs, lambda x: x > 3)),
}


def made(kind: str, attention: str | None) -> Any:
    torch.manual_seed(3)
    model: Any = tiny("llama", attention)
    model.config.layer_types = [KIND] * model.config.num_hidden_layers
    module, call = {**EXACT, **SHARING, **REFUSED}[kind]
    shared: dict[str, Any] = {}
    for number, layer in enumerate(model.model.layers):
        layer.self_attn = Around(module(model.config, number), shared, call)
    model.model.register_forward_pre_hook(lambda *_: shared.clear())
    model.to(torch.float64).train()
    model.config.use_cache = False
    return model


def away(kind: str, batches: list[Batch], self_check: bool = True) -> float:
    """How far losses and gradients in the ring are from one process."""
    model, own, found = made(kind, "ring_fp32"), made(kind, None), []
    for batch in batches:
        sharded = hf_ring_attn.shard(batch, config=RingConfig(self_check=self_check))
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(model)
        gradients, (want, expected) = gradients_of(model), by_documents(own, batch)
        found.append(relative_error(sharded.reduce(loss.detach()), want))
        found += [relative_error(gradients[name], x) for name, x in expected.items()]
    return max(found)


def refused(kind: str, batches: list[Batch], self_check: bool = True) -> tuple[str, str] | None:
    return attempt(lambda: away(kind, batches, self_check))
