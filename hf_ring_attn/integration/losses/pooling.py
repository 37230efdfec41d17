"""The idea: a number that is made of all tokens of a row is the same on every rank.

A rank has only its part of a row. Let s = sum_t x_t be over the row, and s_r over the tokens of rank r: s = sum_r s_r.
A loss f(s) is the sum of the ranks' f(s_r) only if f is linear. Then df/ds_r is one number, the same on every rank; if
it is not, the ranks refuse. Of other results of all tokens (a largest number, a norm) the results must be the same, as
after an all-reduce. A token's result that is made of others, too, is never that of one process (`trials` finds these).

Numbers of a rank's tokens that have no gradient (statistics) are compared if a loss is made with them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .calls import Call
from .trials import tried
from .weights import MEANS, PRODUCTS, SUMS

OTHER_REDUCTIONS = {"prod", "max", "amax", "min", "amin", "median", "nanmedian", "logsumexp", "std", "var", "norm"}
"""Their result of a row is not the sum of the ranks'."""
REDUCTIONS = {"summed", "reduced", "picked"}


def pooling_of(call: Call, result: Tensor) -> str:
    """Returns how a function made ``result`` of all tokens, or of one of each row.

    "summed": several sums over all tokens; "reduced": by another reduction; "picked": of one token; "mixed": each token
    of others, too; "ordered": the same tokens in another order; "": none of these.
    """
    if call.axis is None or call.options.get("reduction", "none") != "none":
        return ""
    kind = tried(call.function, call.args, call.kwargs, call.x.shape, call.axis)
    if kind in ("mixed", "ordered") or (kind == "summed" and call.name not in SUMS | MEANS | PRODUCTS):
        return kind
    entry = call.entry(call.axis) if result.dim() < call.x.dim() else None
    is_one = isinstance(entry, int) or (isinstance(entry, Tensor) and entry.numel() <= call.share.rows)
    # Another axis may be as long as that of the tokens.
    if not (kind or is_one) and call.axis_in(result) is not None:
        return ""
    if call.name in OTHER_REDUCTIONS or kind == "reduced":
        return "reduced"
    if call.name in SUMS | MEANS | PRODUCTS and result.dim():
        return "summed"
    return "picked" if is_one else ""


def same_on_ranks(pooling: str, result: Tensor, count: int | Tensor | None, rank: int) -> Any:
    """Returns a number that must be the same on every rank if a loss is made of ``result``.

    Or a function that makes it of the result's gradient. ``count``: of selected tokens whose mean it is.
    """
    if pooling == "mixed":
        return rank + 1
    if pooling == "reduced":
        return result.detach()
    if pooling == "ordered":  # right if all tokens have one gradient
        return lambda gradient: (rank + 1) * (gradient.amax() != gradient.amin()).long()
    if count is not None:  # a mean of another number differs by more than rounding
        return lambda gradient: (gradient.double() / count).bfloat16()
    return lambda gradient: gradient
