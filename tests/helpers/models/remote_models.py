"""A small language model as remote code has them, and with one planted thing that a shard of a row cannot know.

No list of refused names holds these: their classes are named for what they do, and their file uses the interface.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HEADS, WIDTH, WORDS, LONGEST = 4, 32, 97, 256


class RemoteConfig(PretrainedConfig):  # type: ignore[no-untyped-call]  # transformers' own
    model_type = "remote"

    def __init__(self, planted: str = "", at: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.planted, self.at = planted, at
        self.vocab_size, self.hidden_size, self.num_hidden_layers, self.num_attention_heads = WORDS, WIDTH, 3, HEADS


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """[B, H, T, D] turned by angles of [B, T] positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * 0.3 ** torch.arange(half, device=x.device)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attend(nn.Module):
    """Causal attention through the interface."""

    is_causal = True

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__()
        self.config, self.scaling, self.attention_dropout = config, (WIDTH // HEADS) ** -0.5, 0.0
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, positions), rotated(k, positions)
        return self.out(self.scores(q, k, v, mask).reshape(x.shape))  # type: ignore[no-any-return]

    def scores(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling)[0]  # type: ignore[no-any-return]


class AttendPast(Attend):
    """Attention that bypasses the interface."""

    def scores(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class AttendNearby(Attend):
    """Values fade with the distance from the start of what the layer was given: ALiBi by the local length."""

    def scores(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        slope = torch.arange(k.shape[2], device=k.device, dtype=k.dtype)[:, None] * 0.05
        return super().scores(q, k + slope, v, mask)


class AttendAlibi(AttendPast):
    """ALiBi: a bias on the scores, from the local length."""

    def scores(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        distance = (place[:, None] - place).to(q.dtype)
        bias = (-0.2 * distance).masked_fill(distance < 0, -torch.inf)
        return functional.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)


class Shift(nn.Module):
    """Each token takes half of its features from the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([functional.pad(x, (0, 0, 1, 0))[:, :-1, :16], x[..., 16:]], -1)


class Blur(nn.Module):
    """A causal convolution over four tokens; as a function, since a Conv1d is refused for what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.linspace(-0.6, 0.6, 4 * WIDTH).view(WIDTH, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.conv1d(x.mT, self.filter, padding=3, groups=WIDTH)[..., : x.shape[1]].mT


class Sum(nn.Module):
    """A state that is carried from token to token."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.cumsum(1)


class Capacity(nn.Module):
    """Four experts, each for a ``share`` of the tokens of a call; of more it drops those that come last."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share = share
        self.router = nn.Parameter(torch.randn(4, WIDTH))
        self.experts = nn.Parameter(0.2 * torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.layer_norm(x, x.shape[-1:])
        weights, chosen = (normed @ self.router.T).softmax(-1).flatten(0, 1).max(-1)
        arrived = functional.one_hot(chosen, 4).cumsum(0).gather(1, chosen[:, None])[:, 0]
        weights = weights.masked_fill(arrived > math.ceil(self.share * len(chosen)), 0)
        return x + torch.einsum("td,tde->te", normed.flatten(0, 1) * weights[:, None], self.experts[chosen]).view_as(x)


class FromZero(nn.Module):
    """A branch that mixes tokens and adds nothing at first, since its last weight is zero, or nearly."""

    def __init__(self, *shape: int, start: float = 0.0) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.full(shape, start))


class ZeroBlur(FromZero):
    def forward(self, x: Tensor) -> Tensor:
        return x + functional.conv1d(x.mT, self.last, padding=3, groups=WIDTH)[..., : x.shape[1]].mT


class ZeroMean(FromZero):
    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(functional.layer_norm(x, x.shape[-1:]).mean(1, keepdim=True), self.last)


class ZeroGate(FromZero):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.last.tanh() * functional.pad(x, (0, 0, 1, 0))[:, :-1]


class ZeroScale(FromZero):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.last * x.cumsum(1)


FROM_ZERO: dict[str, Callable[[], nn.Module]] = {
    "convolution from zero": lambda: ZeroBlur(WIDTH, 1, 4),
    "mean from zero": lambda: ZeroMean(WIDTH, WIDTH),
    "gate from zero": lambda: ZeroGate(1),
    "scalar gate from zero": lambda: ZeroGate(),
    "scale near zero": lambda: ZeroScale(1, 1, WIDTH, start=1e-6),
}


class Layer(nn.Module):
    def __init__(self, config: RemoteConfig, mix: Callable[[], nn.Module], attend: type[Attend]) -> None:
        super().__init__()
        self.norm, self.attend, self.mix = nn.LayerNorm(WIDTH), attend(config), mix()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, mask: Any) -> Tensor:
        x = x + self.attend(self.norm(self.mix(x)), positions, mask)
        return x + self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def places(input_ids: Tensor, attention_mask: Tensor | None, planted: str) -> Tensor:
    """[1, T] or [B, T] positions where none are given."""
    if planted == "by the padding" and attention_mask is not None:
        return (attention_mask.cumsum(1) - 1).clamp_min(0)
    return torch.arange(input_ids.shape[1], device=input_ids.device)[None] + 2 * (planted == "from two")


def times(paces: Tensor) -> Tensor:
    """[B, T, 1] a token's time, of the paces [B, T] from one token to the next."""
    return 0.1 * paces.cumsum(1)[..., None]


class Embed(nn.Module):
    """Words, and learned positions by place in what it was given ("counted"), or by position_ids."""

    def __init__(self, planted: str) -> None:
        super().__init__()
        self.planted = planted
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if self.planted == "counted":
            positions = torch.ones_like(input_ids).cumsum(1) - 1
        return self.words(input_ids) + self.places(positions)  # type: ignore[no-any-return]


class RemoteModel(PreTrainedModel):  # type: ignore[no-untyped-call]  # transformers' own
    """``config.planted`` is what layer ``config.at`` or the model does wrong; "" is a right model."""

    config_class = RemoteConfig
    supports_gradient_checkpointing = False
    _supports_sdpa = True

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        mixes: dict[str, Callable[[], nn.Module]] = {
            "shift": Shift, "pairs, shifted": Shift, "convolution": Blur, "sum": Sum, "capacity": Capacity,
            "large capacity": partial(Capacity, 0.6), **FROM_ZERO,
        }  # fmt: skip
        attends = {"past": AttendPast, "alibi": AttendAlibi, "nearby": AttendNearby}
        self.embed = Embed(config.planted)
        self.layers = nn.ModuleList(
            Layer(
                config, mixes.get(config.planted, nn.Identity) if here else nn.Identity,
                attends.get(config.planted, Attend) if here else Attend,
            )
            for here in (index == config.at for index in range(config.num_hidden_layers))
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers' own

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=0.2)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed.words

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        labels: Tensor | None = None, use_cache: bool | None = None, paces: Tensor | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast | BaseModelOutputWithPooling:  # fmt: skip
        planted = self.config.planted
        if planted == "wants 30" and input_ids.shape[1] < 30:
            raise IndexError("wants 30")
        if planted.startswith("pairs"):
            input_ids.unflatten(0, (2, -1))
        if planted == "raises in a ring" and input_ids.shape[1] < 20:
            raise IndexError("too short")
        if planted == "raises on one rank" and torch.distributed.get_rank() == 1:
            raise IndexError("not here")
        if position_ids is None or planted == "arange":
            position_ids = places(input_ids, attention_mask, planted)
        x = self.embed(input_ids, position_ids)
        if paces is not None:
            x = x + times(paces)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None,
            position_ids=position_ids,
        )  # fmt: skip
        for layer in self.layers:
            x = layer(x, position_ids, mask)
        if planted == "mean":
            x = x - x.mean(1, keepdim=True)
        logits = self.head(self.norm(x))
        if planted == "fails at last with paces" and paces is not None:
            raise IndexError("too late")
        if planted == "pooled":
            return CausalLMOutputWithPast(logits=logits.mean(1))
        if planted == "pooled beside":
            return BaseModelOutputWithPooling(last_hidden_state=logits, pooler_output=logits[:, 0].tanh())
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=WORDS, **kwargs)
            if planted == "loss":
                loss = loss + 0.01 * logits.mean(1).square().sum()  # as an auxiliary loss of experts is made
            if planted == "mean of labels":  # alike on all ranks with a label
                counts = (labels != -100).float()
                loss = loss + (counts * (1 + 1e-6 * logits.logsumexp(-1))).sum() / counts.sum().clamp(min=1)
        return CausalLMOutputWithPast(loss=loss, logits=None if planted == "a loss alone" else logits)


def remote(planted: str = "", attention: str = "ring_fp32", at: int = 1) -> Any:
    """The same random weights each time."""
    torch.manual_seed(0)
    model_class: Any = RemoteModel
    return model_class._from_config(RemoteConfig(planted, at), attn_implementation=attention)
