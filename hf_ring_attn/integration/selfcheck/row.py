"""The row of the self-check: random tokens, and all other inputs of the user's batch, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...sharding.layout import Layout
from ..context import introspect
from ..context.batch_context import BatchContext
from ..context.introspect import TOKENS
from ..context.local_batch import CACHE
from ..context.tensor_tree import tensors_of
from ..context.whole_batch import FEATURES, IGNORED, LOSS_INPUTS, WholeBatch
from ..log import warn
from ..losses.whole_heads import has_labels_of_rows

LEAST_TOKENS, LEAST_CHUNK = 26, 4
ADDED = 4
"""The highest ids of a batch are taken for those that a tokenizer added: these come last in a vocabulary."""

DROPPED = {*LOSS_INPUTS, "attention_mask", "position_ids"}
"""Inputs that the check makes by itself."""
LEFT_OUT = (
    "the self-check called {} without {}, since with all of the batch's keys it failed ({}). If your program passes "
    "them to the model, what they change was not checked."
)


def row_length(world_size: int) -> int:
    """The number of tokens in the row: at least 26, and chunks of at least 4; the last is two short, to be padded."""
    chunk = max(LEAST_CHUNK, -(-LEAST_TOKENS // (2 * world_size)))
    return 2 * world_size * chunk - 2


@dataclass
class SelfCheckState:
    """The self-check of one batch: the sample for its row (None: no check), and its verdict in words."""

    sample: Sample | None = None
    verdict: str = ""


class _Without(NamedTuple):
    """Inputs that a model is called without, if its forward does not name them.

    Args:
        cache: use_cache, which hooks give to the transformers model inside. unnamed: keys of the batch.
    """

    cache: bool = False
    unnamed: bool = False


_EVERY = _Without()
_WITHOUT = _EVERY, _Without(cache=True), _Without(unnamed=True), _Without(cache=True, unnamed=True)
"""The ways to call a model, in the order in which they are tried."""


@dataclass
class Sample:
    """Facts of the user's batch that its row shares.

    Args:
        rows, length: its size. tokens: the first tokens of its first row, by input. others: its inputs without tokens.
        first: the first position id; None if it has no position_ids.
        masked: it has a 2-D mask. hides: the mask hides tokens on the left, on the right.
        head: the model's head gets whole rows. labels: the batch's, of any shape, for such a head.
        without: inputs that the model is called without.
        unnamed: the batch's tokens, if it has features under names that are not known; see `placeholders`.
        padding: the batch's tokens, and which of them its mask hides.
        ids: the batch's tokens, unless it has images.
    """

    rows: int
    length: int
    tokens: dict[str, Tensor]
    others: dict[str, Any]
    first: int | None
    masked: bool
    hides: tuple[bool, bool]
    head: bool = False
    labels: Tensor | None = None
    unnamed: Tensor | None = None
    padding: tuple[Tensor, Tensor] | None = None
    ids: Tensor | None = None
    without: _Without = _EVERY

    @classmethod
    def of(cls, batch: Mapping[str, Any], whole: WholeBatch, context: BatchContext) -> Sample | None:
        """Reads a user's batch; None if there is no self-check."""
        length, hidden = context.layout.length, context.facts.hidden
        if context.ring.size == 1 or not context.config.self_check or not length:
            return None
        given = {name: x for name, x in whole.inputs.items() if name in batch and name not in DROPPED}
        rows = whole.rows
        tokens = {n: x for n, x in given.items() if isinstance(x, Tensor) and tuple(x.shape[:2]) == (rows, length)}
        others = {name: x for name, x in given.items() if name not in tokens}
        images = context.text is not None and not context.whole_head
        if images:  # a row of text alone: images do not come in parts
            tokens = {name: x if name in TOKENS else torch.zeros_like(x) for name, x in tokens.items()}
            others = {n: x for n, x in others.items() if not FEATURES.search(n) and next(tensors_of(x), None) is None}
        count, positions, mask = row_length(context.ring.size), batch.get("position_ids"), batch.get("attention_mask")
        if context.whole_head and mask is not None:  # its model has not read the mask yet
            hidden = mask.to("cpu", torch.bool).logical_not()
        labels = batch.get("labels") if context.whole_head else None
        ids = given.get("input_ids") if not context.whole_head and any(map(is_feature, others.values())) else None
        return cls(
            rows=rows,
            length=length,
            tokens={name: x[:1, :count].detach().clone() for name, x in tokens.items()},
            others=others,
            first=None if positions is None or images else int(positions.flatten()[0]),
            masked=mask is not None,
            hides=(False, False) if hidden is None else (bool(hidden[:, 0].any()), bool(hidden[:, length - 1].any())),
            head=context.whole_head,
            labels=labels.detach() if isinstance(labels, Tensor) else None,
            unnamed=ids,
            padding=None if hidden is None or "input_ids" not in given else (given["input_ids"], hidden[:, :length]),
            ids=None if images else given.get("input_ids"),
        )

    def inputs(self) -> tuple[object, ...]:
        """Facts that batches have in common if a model gets inputs of the same kinds from them."""
        flags = [(name, x) for name, x in self.others.items() if isinstance(x, bool)]
        return frozenset((*self.tokens, *self.others)), frozenset(flags), self.unnamed is None

    def masks(self) -> tuple[object, ...]:
        """Facts that batches have in common if their tokens' places are told in the same way."""
        return self.first is None, self.masked, self.hides

    def leaves_out_more(self, model: nn.Module, error: Exception) -> bool:
        """Returns True after a TypeError, if the model can be called with fewer inputs that its forward does not name.

        A program's own module may pass use_cache itself. A program may take keys of the batch out before it calls its
        model; if it does not, their effect is not checked: a warning says so.
        """
        names, takes_cache = self._unnamed(model), CACHE in introspect.parameters_of(model)
        left = _WITHOUT[_WITHOUT.index(self.without) + 1 :]
        wanted = next((w for w in left if not (w.cache and takes_cache) and (names or not w.unnamed)), None)
        if wanted is None or not isinstance(error.__cause__, TypeError):
            return False
        if wanted.unnamed and not self.without.unnamed:
            warn(LEFT_OUT.format(introspect.name_of(model), sorted(names), error.__cause__))
        self.without = wanted
        return True

    def taken(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that the model is called with."""
        unnamed = self._unnamed(model) if self.without.unnamed else set()
        made = {CACHE} if self.without.cache else set()
        names = introspect.parameters_of(model, inputs.keys() - unnamed - made)
        return {name: x for name, x in inputs.items() if name in names}

    def _unnamed(self, model: nn.Module) -> set[str]:
        """The batch's keys that the model's forward does not name, and that belong to no loss."""
        return {*self.tokens, *self.others}.difference(LOSS_INPUTS, introspect.parameters_of(model))

    def device(self, model: nn.Module) -> torch.device:
        """The device of the batch, unless DDP would move it."""
        ids = getattr(model, "device_ids", None)
        if introspect.is_ddp(model) and ids:
            return torch.device(str(model.device_type), ids[0])
        return next(iter(self.tokens.values())).device

    def row(
        self, model: nn.Module, world_size: int, labelled: bool, seed: int, rows: int = 1, repeats: bool = False,
        of_batch: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Makes one or more rows for ``model`` with the inputs of the user's batch, the same on every rank.

        Args:
            repeats: all tokens of one rank are the same word: an expert of limited capacity would drop some there.
            of_batch: the other tokens are the batch's, those of the highest ids first: a program may look for them.
        """
        generator = torch.Generator().manual_seed(seed)
        config = next(introspect.configs_of(model))
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        count = self._count(world_size, config)
        row: dict[str, Any] = {}
        for name, x in self.tokens.items():
            row[name] = x[:, torch.arange(count) % x.shape[1]].expand(rows, *[-1] * (x.dim() - 1))
        device = next(iter(row.values())).device
        ids = row.get("input_ids")
        configs = list(introspect.configs_of(model))
        words = ordinary_words(config, ids, configs)
        random = words[torch.randint(len(words), (rows, count), generator=generator)]
        one_rank = torch.isin(torch.arange(count), Layout(count, world_size, 1).positions())
        if ids is not None:
            written = torch.where(one_rank & repeats, random[:1, :1], random)
            if of_batch and len(own := self._own_words(words, configs)):
                written[:, ~one_rank] = _in_turn(own, rows, int((~one_rank).sum()), generator)
            row["input_ids"] = written.to(device=device, dtype=ids.dtype)
        if self.first is not None:
            row["position_ids"] = torch.arange(self.first, self.first + count, device=device).expand(rows, -1)
        mask = torch.ones(rows, count, dtype=torch.int64)
        if self.masked:
            left, right = self.hides
            mask[:, : 3 * left] = 0
            mask[:, count - 3 * right :] = 0
            row["attention_mask"] = mask.to(device)
            if ids is not None and (padding := self._padding_id(config)) is not None:
                row["input_ids"] = row["input_ids"].masked_fill(row["attention_mask"] == 0, padding)
        if labelled and self.head:
            row.update(self._labels(mask, generator, has_labels_of_rows(model)))
        elif labelled:
            # Labels on one rank only: then the mean of the ranks' own means is far from the mean of all.
            row["labels"] = random.masked_fill(~one_rank | (mask == 0), IGNORED).to(device)
        return {**self._other_inputs(rows, count), **row}

    def _count(self, world_size: int, config: Any) -> int:
        """The number of tokens in a row."""
        count, reach = row_length(world_size), getattr(config, "max_position_embeddings", None)
        if isinstance(reach, int) and reach > 0:  # learned positions may end there, unless the batch goes further
            count = min(count, max(reach - (self.first or 0), self.length))
        return count

    def _other_inputs(self, rows: int, count: int) -> dict[str, Any]:
        """The batch's inputs without tokens: of its first rows."""
        others = {
            name: x[:rows] if isinstance(x, Tensor) and x.dim() else _first_entries(x, self.rows, rows)
            for name, x in self.others.items()
        }
        if self.head:  # spans end within the row
            spans = [name for name, x in others.items() if name.endswith("_positions") and isinstance(x, Tensor)]
            others |= {name: others[name] % count for name in spans}
        return others

    def _own_words(self, ordinary: Tensor, configs: list[Any]) -> Tensor:
        """The batch's ids [n], each once, ascending.

        Args:
            ordinary: ids that announce no images, of which alone these are if a model has other parts than text.
        """
        if self.ids is None:
            return ordinary[:0]
        found: Tensor = self.ids.unique().cpu()
        return found if len(configs) == 1 else found[torch.isin(found, ordinary)]

    def _padding_id(self, config: Any) -> int | None:
        """The id of hidden tokens, by which a program may know them: the batch's, or that of a head's model."""
        ids, hidden = self.padding or (None, None)
        if ids is None or hidden is None or not bool(hidden.any()):
            return getattr(config, "pad_token_id", None) if self.head else None
        return int(ids[hidden.to(ids.device)][0])

    def _labels(self, mask: Tensor, generator: torch.Generator, of_rows: bool) -> dict[str, Tensor]:
        """Labels of the batch's values: of its first rows, or of tokens, of which the last has one at least.

        Args:
            of_rows: labels are not of tokens, even if a row has as many as tokens.
        """
        if self.labels is None:
            return {}
        if of_rows or tuple(self.labels.shape) != (self.rows, self.length):
            return {"labels": self.labels[: len(mask)]}
        values = self.labels.unique().cpu()
        values = values[values != IGNORED]
        values = values if len(values) else torch.zeros(1, dtype=values.dtype)
        chosen = values[torch.randint(len(values), mask.shape, generator=generator)]
        ignored = torch.rand(mask.shape, generator=generator) < 0.5
        ignored[:, -1] = False
        return {"labels": chosen.masked_fill(ignored | (mask == 0), IGNORED).to(self.labels.device)}


def _in_turn(words: Tensor, rows: int, places: int, generator: torch.Generator) -> Tensor:
    """[rows, places] of ascending words: the highest first, then the others in a random order, and so on."""
    added, rest = words[-ADDED:].flip(0), words[:-ADDED]
    shuffled = [torch.cat([added, rest[torch.randperm(len(rest), generator=generator)]]) for _ in range(rows)]
    return torch.stack(shuffled)[:, torch.arange(places) % len(words)]


def _first_entries(x: Any, of: int, rows: int) -> Any:
    """The entries of the first rows: of lists and tensors in nested containers that have one for each row (``of``)."""
    if isinstance(x, Mapping):
        return {name: _first_entries(part, of, rows) for name, part in x.items()}
    if isinstance(x, Tensor):
        return x[:rows] if x.dim() and len(x) == of else x
    if type(x) not in (list, tuple):
        return x
    return x[:rows] if len(x) == of else type(x)(_first_entries(part, of, rows) for part in x)


def is_feature(x: Any) -> bool:
    """Returns True for [B, N, width] and [N, width] of numbers, as a tower gives."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.numel() > 0


def ordinary_words(config: Any, ids: Tensor | None, configs: list[Any]) -> Tensor:
    """Lists the ids of the vocabulary without special tokens, some of which announce images.

    Args:
        config: has the vocabulary's size. ids: a batch's, taken instead if there is no size.
        configs: of all parts of the model; they name special tokens, each by an id or by a list of ids.
    """
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        return torch.zeros(1, dtype=torch.int64) if ids is None else ids.unique().cpu()
    allowed = torch.ones(size, dtype=torch.bool)
    for name, value in (entry for part in configs for entry in vars(part).items()):
        if name.endswith(("_token_id", "_token_index")):
            several = value if isinstance(value, (list, tuple)) else [value]
            allowed[[one for one in several if isinstance(one, int) and 0 <= one < size]] = False
    return allowed.nonzero().flatten() if bool(allowed.any()) else torch.arange(size)
