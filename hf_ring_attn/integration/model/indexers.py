"""Indexers: modules that choose the keys that each query attends to, as DeepSeek V3.2 and GLM-5 have them.

An indexer's scores of a query need the index keys of the whole row, which it makes of hidden states, token by token,
and hands to the model's cache. So in a ring each rank runs it twice: up to its keys, which are gathered; then for its
own queries, some at a time, with a cache that returns the gathered keys. The module's own code makes every number, and
no tensor of all queries by all keys exists.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ...comm.ring import Ring
from ...layers.collectives import gather_sequence
from ...sharding.visible import visible
from ..context.batch_context import BatchContext, MaskSpec
from ..context.introspect import CACHES, class_of, text_modules
from ..context.model_record import latest_record
from ..patching.compiler import uncompiled
from ..patching.modules import OwnForward, replace_forward

LAYERS = {"indexed_attention", "deepseek_sparse_attention"}
"""The type of layers with an indexer: its names in transformers 5.24 and in 5.17."""
MOST_SCORES = 2**26
"""Index scores [B, t, heads, S] that are computed at once: 256 MiB in float32."""


def indexers_of(model: nn.Module) -> list[nn.Module]:
    """The indexers of ``model`` that a ring can run, found once for each structure."""
    return latest_record(model).once(_find, model)


def _find(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in text_modules(model) if _is_known(module)]


def _is_known(module: nn.Module) -> bool:
    """Returns True for an indexer of single tokens by a mask of scores: not one that pools keys, which has another
    mask, nor one that reads its cache's layers."""
    if not isinstance(getattr(module, "index_topk", None), int):
        return False
    forward = inspect.unwrap(type(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    takes = inspect.signature(forward).parameters
    return "update_indexer" in names and "layers" not in names and "attention_mask" in takes


def prepare(model: nn.Module, _context: BatchContext) -> None:
    """Replaces the forward of each indexer; without effect outside of sharded batches."""
    for module in indexers_of(model):
        replace_forward(module, _InRing)


class _KeysMade(Exception):
    """Ends the run of an indexer that makes the keys of this rank's tokens."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys


class _Cache:
    """A cache in a ring: without keys it ends the run, else it returns those of the whole row."""

    def __init__(self, keys: Tensor | None = None) -> None:
        self.keys, self.calls = keys, 0

    def update_indexer(self, keys: Tensor, *_layer: Any) -> Tensor:
        """Stands for the method of transformers' caches."""
        if self.keys is None:
            raise _KeysMade(keys)
        self.calls += 1
        return self.keys


class _InRing(OwnForward):
    """An indexer's forward in a sharded batch."""

    @uncompiled("hf_ring_attn gathers the keys of an indexer")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        signature = inspect.signature(type(self.module).forward)
        given = signature.bind(self.module, *args, **kwargs).arguments
        given.pop(next(iter(given)))  # self
        spec, cache = given.get("attention_mask"), next(name for name in CACHES if name in signature.parameters)
        if not isinstance(spec, MaskSpec):
            return self.forward(*args, **kwargs)
        with torch.no_grad():  # the model's own cache is empty, and after a ring it is refused
            keys = self._row_of_keys(given, cache, spec)
            return torch.cat([self._chosen(given, cache, spec, keys, mine) for mine in self._parts(keys, spec)], 1)

    def _row_of_keys(self, given: dict[str, Any], cache: str, spec: MaskSpec) -> Tensor:
        """The keys of the whole row [B, S, D]."""
        tokens = spec.layout.local_length
        few = torch.zeros(1, 1, 1, dtype=torch.bool)  # no score is computed
        try:
            self.forward(**{**given, "attention_mask": few, cache: _Cache()})
        except _KeysMade as made:
            keys = made.keys
        else:
            raise self._unknown("handed no keys to its cache")
        if keys.dim() != 3 or keys.shape[1] != tokens:
            raise self._unknown(f"handed keys {tuple(keys.shape)} of {tokens} tokens to its cache")
        return gather_sequence(keys.contiguous(), Ring(spec.plan.ring), spec.layout)

    def _parts(self, keys: Tensor, spec: MaskSpec) -> list[slice]:
        """This rank's queries, as many at a time as memory for their scores allows."""
        tokens = spec.layout.local_length
        of_query = len(keys) * max(1, keys.shape[1]) * int(getattr(self.module, "n_heads", 1))
        step = max(1, MOST_SCORES // max(1, of_query))
        return [slice(first, min(first + step, tokens)) for first in range(0, tokens, step)] or [slice(0, 0)]

    def _chosen(self, given: dict[str, Any], cache: str, spec: MaskSpec, keys: Tensor, mine: slice) -> Tensor:
        """The positions of the keys that some queries choose: [B, t, n]."""
        tokens, seen = spec.layout.local_length, spec.seen_keys(keys.device)
        whole_row = _Cache(keys)
        inputs = {name: _of_tokens(x, mine, tokens) for name, x in given.items()}
        inputs["attention_mask"] = visible(seen[..., mine], keys.shape[1])
        found = self.forward(**{**inputs, cache: whole_row})
        shape = (len(keys), mine.stop - mine.start)
        if whole_row.calls != 1 or not isinstance(found, Tensor) or found.shape[:2] != shape or found.dim() != 3:
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise self._unknown(f"gave {what} for {shape[1]} of its queries")
        return found

    def _unknown(self, what: str) -> errors.UnsupportedModel:
        why = f"it {what}, so how it chooses keys is not known. Train this model without a ring"
        return errors.UnsupportedModel(class_of(self.module), [why])


def _of_tokens(x: Any, mine: slice, tokens: int) -> Any:
    """Some of this rank's tokens of an input [B, T, ...], or of each of several."""
    if isinstance(x, tuple | list):
        return type(x)(_of_tokens(one, mine, tokens) for one in x)
    return x[:, mine] if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == tokens else x
