"""Functions of scores to try, with the tensors that they capture, and attention with them from its definition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_ring_attn.biases import Alibi, RelativeBias
from hf_ring_attn.testing import Case, Inputs
from tests.helpers.oracle import visible

Function = Callable[..., Tensor]


@dataclass
class Mod:
    """A score_mod, what it captures by name, and the same function for whole tensors of numbers if that is another."""

    function: Function
    captured: dict[str, Tensor] = field(default_factory=dict)
    of_many: Function | None = None


class Builder:
    """Random learned tensors, the same on every rank: the values of one dtype, held in another, which is wider."""

    def __init__(
        self, case: Case, dtype: torch.dtype, held: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.case, self.dtype, self.held, self.device = case, dtype, held or dtype, device
        self.generator = torch.Generator().manual_seed(case.seed + 100)

    def learned(self, *shape: int) -> Tensor:
        wide = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return wide.to(self.dtype).to(self.device, self.held).requires_grad_()

    def indices(self, below: int, count: int) -> Tensor:
        return torch.randint(0, below, (count,), generator=self.generator).to(self.device)


def worked_example(make: Builder) -> Mod:
    """Of pytorch's pull request 137452: one buffer, that requires no gradient, is the index into another that does."""
    bias = make.learned(make.case.length)
    offset = make.indices(make.case.length, make.case.length)
    return Mod(lambda score, b, h, q_idx, kv_idx: score + bias[offset[q_idx]], {"bias": bias})


def few_buckets(make: Builder) -> Mod:
    """The same for keys, with so few entries that each is met many times."""
    bias, offset = make.learned(3), make.indices(3, make.case.length)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[offset[kv_idx]]

    return Mod(mod, {"bias": bias})


def several(make: Builder) -> Mod:
    """A scalar, one number a head, one for each row and distance, one for each pair, in one function."""
    case = make.case
    scalar, gate = make.learned(), make.learned(case.heads)
    table, pairs = make.learned(case.batch, 2 * case.length), make.learned(case.heads, case.length, case.length)
    half = torch.full((case.length,), 0.5, dtype=torch.float32)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        relative = table[b, q_idx - kv_idx + case.length] * half[kv_idx]
        return score * torch.sigmoid(gate[h]) + scalar * relative + pairs[h, q_idx, kv_idx]

    return Mod(mod, {"scalar": scalar, "gate": gate, "table": table, "pairs": pairs})


def learned_cap(make: Builder) -> Mod:
    """Not linear in the score: its derivative goes into dq and dk."""
    cap = make.learned(make.case.heads)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        limit = 1.5 + cap[h].square()
        return limit * torch.tanh(score / limit)

    return Mod(mod, {"cap": cap})


def documents_of_its_own(make: Builder) -> Mod:
    """Global documents by a captured tensor: a bias for each, and nothing seen across two."""
    case = make.case
    ids = (torch.arange(case.length) // 6).expand(case.batch, -1).contiguous()
    weight = make.learned(case.length // 6 + 1, case.heads)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = ids[b, q_idx] == ids[b, kv_idx]
        return torch.where(seen, score * weight[ids[b, kv_idx], h], -torch.inf)

    return Mod(mod, {"weight": weight})


def low_rank(make: Builder) -> Mod:
    """Vectors inside: their product is summed for one score, not for the block that is computed at once."""
    u, w = make.learned(make.case.length, 4), make.learned(make.case.length, 4)
    fixed = torch.linspace(-1, 1, 4)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + torch.dot(u[q_idx] * w[kv_idx], fixed)

    def of_many(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + (u[q_idx].double() * w[kv_idx].double() * fixed).sum(-1)

    return Mod(mod, {"u": u, "w": w}, of_many)


def only_where_seen(make: Builder) -> Mod:
    """Nan or out of range for every pair that a causal mask hides."""
    slope, table = make.learned(make.case.heads), make.learned(make.case.length)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return score - slope[h] * torch.log(1.0 + distance) + table[make.case.length - 1 - distance]

    return Mod(mod, {"slope": slope, "table": table})


def score_ignored(make: Builder) -> Mod:
    """Nothing flows into q and k."""
    table = make.learned(2 * make.case.length)
    return Mod(lambda score, b, h, q_idx, kv_idx: table[q_idx - kv_idx + make.case.length], {"table": table})


def alibi(make: Builder) -> Mod:
    module = Alibi(make.case.heads, learnable=True).to(make.dtype).to(make.device, make.held)
    return Mod(module, {"slopes": module.slopes})


def relative_bias(make: Builder) -> Mod:
    module = RelativeBias(make.case.heads, 8, 12, bidirectional=not make.case.causal).to(make.device, make.held)
    with torch.no_grad():
        module.weight.copy_(make.learned(8, make.case.heads))
    return Mod(module, {"weight": module.weight})


MODS: dict[str, Callable[[Builder], Mod]] = {
    build.__name__: build
    for build in (
        worked_example, few_buckets, several, learned_cap, documents_of_its_own, low_rank, score_ignored, alibi,
        relative_bias,
    )
}  # fmt: skip


# ---- where a function may have its tensors from -------------------------------------------------------------------

GLOBAL = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()


def _by_global(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * GLOBAL[h]


def _given(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, slopes: Tensor) -> Tensor:
    return score * slopes[h]


class Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(score: Tensor, factor: Tensor) -> Tensor:
        return score * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        score, factor = ctx.saved_tensors
        return gradients[0] * factor, gradients[0] * score


class Holder(nn.Module):
    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = nn.Parameter(slopes.detach().clone())
        self.inner = nn.ModuleDict({"bias": nn.Embedding(4, 1, dtype=torch.float64)})

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        bias: Tensor = self.inner["bias"](h)
        return score * self.slopes[h] + 0 * bias.squeeze(-1)

    def method(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * self.slopes[h]


def places() -> dict[str, tuple[Function, Tensor]]:
    """``score * slopes[h]`` with the slopes from wherever a user may have them."""

    def fresh() -> Tensor:
        return GLOBAL.detach().clone().requires_grad_()

    def closure(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * of_closure[h]

    def nested(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * in_a_list[0]["slopes"][h]

    def default(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, of: Tensor = fresh()) -> Tensor:  # noqa: B008  that it is made once is the case in question
        return score * of[h]

    def computed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * of_graph[h]

    def own_function(*at: Any) -> Tensor:
        scaled: Tensor = Scaled.apply(at[0], of_function[at[2]])  # type: ignore[no-untyped-call]
        return scaled

    of_closure, in_a_list, of_partial, of_function = fresh(), [{"slopes": fresh()}], fresh(), fresh()
    module, owner, source = Holder(GLOBAL), Holder(GLOBAL), (GLOBAL.detach() / 2).requires_grad_()
    of_graph = source * 2
    assert default.__defaults__ is not None
    return {
        "closure": (closure, of_closure),
        "global": (_by_global, GLOBAL),
        "list of dicts": (nested, in_a_list[0]["slopes"]),
        "default": (default, default.__defaults__[0]),
        "partial": (functools.partial(_given, slopes=of_partial), of_partial),
        "module": (module, module.slopes),
        "method": (owner.method, owner.slopes),
        "autograd function": (own_function, of_function),
        "computed from a parameter": (computed, source),
    }


# ---- the definition -------------------------------------------------------------------------------------------------


def dense(case: Case, given: Inputs, mod: Mod, out: Tensor | None = None) -> dict[str, Tensor]:
    """Attention with a score_mod in float64 by autograd, on the visible pairs alone, one number of the table a pair.

    Args:
        out: the rounded output that a backward was handed; the gradients are then those of its formula, as
            `gradient_oracle`'s.

    Returns:
        out, dq, dk, dv, dsinks and, by its name, the gradient of every captured tensor.
    """
    leaves = {f"d{name}": given[name].detach().double().requires_grad_() for name in ("q", "k", "v")}
    share = case.heads // case.kv_heads
    q, k, v = leaves["dq"], leaves["dk"].repeat_interleave(share, 2), leaves["dv"].repeat_interleave(share, 2)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    scores = scale * torch.einsum("bthd,bshd->btsh", q, k)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    row, query, key = visible(case, given["documents"]).nonzero(as_tuple=True)
    function = mod.of_many or mod.function
    many = function(
        scores[row, query, key], row[:, None], torch.arange(case.heads)[None], query[:, None], key[:, None]
    ).expand(len(row), case.heads)
    changed = torch.full_like(scores, -torch.inf).index_put((row, query, key), many.double()).permute(0, 3, 1, 2)
    if given["sinks"] is not None:
        leaves["dsinks"] = given["sinks"].detach().double().requires_grad_()
        sink = leaves["dsinks"][None, :, None, None].expand(*changed.shape[:3], 1)
        changed = torch.cat((changed, sink), 3)
    empty = (changed == -torch.inf).all(3, keepdim=True)
    weights = changed.masked_fill(empty, 0).softmax(3).masked_fill(empty, 0)
    answer = torch.einsum("bhts,bshd->bthd", weights[..., : case.length], v)
    wanted, dout = {**leaves, **mod.captured}, given["dout"].double()
    if out is None:
        gradients = torch.autograd.grad(answer, list(wanted.values()), dout, allow_unused=True, materialize_grads=True)
    else:  # d_weights less delta, where the rounded out makes another delta: Dao et al. 2022, appendix B
        d_weights = torch.einsum("bthd,bshd->bhts", dout, v)
        d_weights = torch.nn.functional.pad(d_weights, (0, changed.shape[3] - case.length))
        delta = torch.einsum("bthd,bthd->bht", dout, out.double())
        d_changed = (weights * (d_weights - delta[..., None])).detach()
        through_v = torch.autograd.grad(answer, leaves["dv"], dout, retain_graph=True)[0]
        gradients = torch.autograd.grad(
            changed, list(wanted.values()), d_changed, allow_unused=True, materialize_grads=True
        )
        gradients = tuple(through_v if name == "dv" else g for name, g in zip(wanted, gradients, strict=True))
    return {"out": answer.detach(), **dict(zip(wanted, gradients, strict=True))}
