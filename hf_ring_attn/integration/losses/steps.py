"""Steps from a model's output to a loss: facts about each, which ranks compare if the backward passes through it.

| fact | meaning |
|---|---|
| targets, cuts | targets of the tokens (`target_facts`); slices of tokens |
| pooled, picked | of results made of all tokens, and of one token: numbers that must be the same on every rank |
| statistics | numbers of a rank's tokens without a gradient that it used |
| divisors | numbers by which tokens were divided, each by itself |
| factors | numbers by which tokens or their sum were multiplied |
| in_sums, each | gradients of tokens in sums and means, and of numbers of tokens |
| nearest | the last of the latter, which is nearest to the output |
| sums | for each of in_sums, the sum of its tokens' gradients, or nan |
| bytes | of one number of these gradients |
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .calls import Call, Past
from .pooling import REDUCTIONS, pooling_of, same_on_ranks
from .shifts import cut_of, target_of
from .weights import MEANS, divisor_of, mean_of, summed_by
from .whole_counts import factor_of


def look_at(call: Call, result: Tensor, trains: bool) -> tuple[dict[str, Any], Past]:
    """Returns facts about a call by name, and how its result was computed.

    A fact is a value, or a function that makes one of the result's gradient. ``trains``: it has a gradient.
    """
    share, (selected, is_pooled, statistics) = call.share, call.past
    pooling, rank = pooling_of(call, result), share.ring.rank
    has_tokens = pooling not in REDUCTIONS and call.axis_in(result) is not None
    divisor = divisor_of(call)
    count: int | Tensor | None = None
    if pooling == "summed" and selected and call.name in MEANS:
        count = selected
    elif not pooling and not is_pooled and result.numel() and not (selected and has_tokens):
        count = mean_of(call, result)
    reduces = pooling in REDUCTIONS or count is not None
    past = Past(call.selected_in(result), is_pooled or reduces)
    if not trains:
        mixes = (rank,) if pooling in ("mixed", "ordered") else ()
        used = (*statistics, *mixes, *(() if divisor is None else (divisor,)))
        if pooling in REDUCTIONS or share.axis(result.shape, past.selected) is None:
            used = (result,) if reduces or statistics else ()
        return {}, past._replace(statistics=used)
    facts: dict[str, Any] = {
        "targets": target_of(call), "cuts": cut_of(call), "statistics": statistics or None,
        "divisors": divisor.detach().double().reshape(-1) if isinstance(divisor, Tensor) else divisor,
        "factors": factor_of(call),
    }  # fmt: skip
    if pooling:
        facts["picked" if pooling == "picked" else "pooled"] = same_on_ranks(pooling, result, count, rank)
    elif count is not None:
        times = summed_by(call, count)
        if isinstance(count, Tensor):  # a rank may have all labels of the batch
            facts["factors"] = 1.0 / count.double()
        facts["in_sums"] = lambda gradient: (gradient.double() / count).reshape(-1)
        facts["sums"] = lambda gradient: (gradient.double() * times).reshape(-1)
    if has_tokens and result.numel() == (selected or share.rows * share.tokens):
        facts["each"] = lambda gradient: gradient.double().reshape(-1)
        if not selected:
            facts["nearest"] = facts["each"]
    if "in_sums" in facts or "each" in facts:
        facts["bytes"] = lambda gradient: gradient.itemsize
    return {name: fact for name, fact in facts.items() if fact is not None}, past
