"""A whole batch before sharding: its tokens, documents, padding, blocks and labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ...arguments import check_dense, check_tensor
from ...config import RingConfig
from ...dtypes import FLOATS, INTEGERS
from ...sharding.balance import balanced
from ...sharding.layout import Layout
from .introspect import CACHES, TOKENS

LOSS_INPUTS = ("labels", "shift_labels", "num_items_in_batch")
"""Inputs of which a model computes the loss of a row."""
IGNORED = -100
PADDING = {
    "labels": IGNORED, "shift_labels": IGNORED, "block_sequence_ids": -1, "input_ids": None, "inputs_embeds": None,
    "per_layer_inputs": None,
}  # fmt: skip
"""Values of padding tokens by input; `padding_of` has those of others. None repeats the row's last token, since a zero
embedding makes gradients nan in models that divide by its norm."""
_TARGETS, _NO_TARGETS = re.compile("label|target"), re.compile("mask|type_ids|position_ids")
KERNEL_HINTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""Inputs that describe documents to kernels; valid for the whole row only, so they are not passed on."""
FEATURES = re.compile(
    "pixel_values|input_features|input_values|image_patches|flattened_patches|audio_input_ids|mm_encoder_outputs"
)
"""Inputs of images and sound; a batch with any is sharded at the text model's input: see `multimodal`. So are positions
by time, height and width."""
DENSE = {"labels", "shift_labels", "position_ids", "attention_mask"}
"""Inputs that are read here, so they must be tensors with values."""
OF_HEADS = ("labels", "start_positions", "end_positions")
"""Inputs of which a head of whole rows computes its loss."""
_NO_TOKENS = "a row must have a token at least. Take empty rows out of the dataset, or pad them with labels of -100"
FOREIGN = {"decoder_input_ids", "encoder_outputs", *CACHES}


def padding_of(name: str, x: Tensor) -> int | None:
    """The value of an input's padding tokens: -100 for integers that are named as labels or targets, or hold -100.

    A loss of further labels, as of a second next token, ignores it as it does that of ``labels``.
    """
    if name in PADDING:
        return PADDING[name]
    if x.is_floating_point() or x.dtype == torch.bool or _NO_TARGETS.search(name):
        return 0
    return IGNORED if _TARGETS.search(name) or bool((x == IGNORED).any()) else 0


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskFacts:
    """Facts about whole rows that a mask needs, padded, on the CPU.

    Args:
        documents: [B, S padded] ids, -1 for padding to the ring; None: one document, causal masks only.
        hidden: [B, S padded] bool, keys that a 2-D padding mask hides; None: none.
        positions: [B, S padded], the position ids of documents; None: indices in the row.
        blocks: [B, S padded], ids of spans that attend both ways (images), -1 for other tokens.
    """

    documents: Tensor | None = None
    hidden: Tensor | None = None
    positions: Tensor | None = None
    blocks: Tensor | None = None


@dataclass(eq=False)
class WholeBatch:
    """A batch ready to be sharded.

    Args:
        inputs: the model's inputs. names: those with an entry per token.
        facts: None in a batch that is sharded at a text model's input, until that model is called.
        items: the number of labelled tokens; None without labels of tokens. rows: B. head: the model's head gets whole
            rows.
    """

    inputs: dict[str, Any]
    names: set[str]
    layout: Layout
    facts: MaskFacts | None
    max_position: int | None
    items: Tensor | None
    rows: int
    head: bool = False


def tokens_of(batch: Mapping[str, Any]) -> Tensor:
    """The tokens of a batch: input_ids [B, S], else inputs_embeds [B, S, width].

    Raises:
        BadBatch, BadShape: it has neither, or of another shape, or it has inputs that cannot be sharded.
    """
    foreign = sorted(name for name in FOREIGN if batch.get(name) is not None)
    if foreign:
        raise errors.BadBatch(
            f"the batch holds {foreign}: encoders and caches cannot be sharded along the sequence yet. Train the text "
            "model alone, or without a ring."
        )
    for name in TOKENS:
        tokens = batch.get(name)
        if isinstance(tokens, Tensor):
            check_dense(name, tokens)
            if tokens.dim() != (2 if name == "input_ids" else 3):
                need = "it must be [B, S] (inputs_embeds: [B, S, width])"
                need += ". Multiple choice is not supported" if name == "input_ids" and tokens.dim() == 3 else ""
                raise errors.BadShape(name, tuple(tokens.shape), need)
            if not len(tokens):
                raise errors.BadShape(name, tuple(tokens.shape), "it must have a row at least")
            if not tokens.shape[1]:
                raise errors.BadShape(name, tuple(tokens.shape), _NO_TOKENS)
            return tokens
    found = next((name for name in TOKENS if batch.get(name) is not None), None)
    if found is not None:
        raise errors.BadBatch(f"{found} is a {type(batch[found]).__name__}, not a tensor. Make it one, [B, S, ...].")
    todo = ""
    if any(name.endswith("input_ids") for name in batch):
        todo = " If it has several kinds of rows, call the model with each in hf_ring_attn.whole_rows(model)."
    raise errors.BadBatch(f"the batch holds neither input_ids nor inputs_embeds, only {sorted(batch)}.{todo}")


def read_batch(
    batch: Mapping[str, Any], tokens: Tensor, layout: Layout, config: RingConfig, late: bool = False, head: bool = False
) -> WholeBatch:
    """Reads a batch before sharding. ``layout``: the zigzag. ``late``: shard at the text model's input.

    ``head``: shard at the input of the model below the head, which gets whole rows, and labels of any shape.

    Raises:
        BadBatch, BadShape, UnevenLength: it cannot be sharded exactly.
    """
    rows, length = tokens.shape[:2]
    if layout.padded != length and not config.pad:
        raise errors.UnevenLength(length, layout.world_size)
    inputs = {name: x for name, x in batch.items() if x is not None and name not in KERNEL_HINTS}
    _check_tensors(inputs, rows, length)
    attention_mask = inputs.get("attention_mask")
    items = None if head else _labels(inputs, rows, length)
    ignored = inputs.get("ignore_index")
    if items is not None and ignored is not None and ignored != IGNORED:
        raise errors.OtherIgnoreIndex("the batch holds", ignored)
    featured = any(map(FEATURES.search, inputs))
    if head and featured:
        raise errors.BadBatch(
            "the batch holds images or sound, and the model classifies: its rows cannot be sharded yet. Train it on "
            "text, or without a ring."
        )
    if late or head or featured or _has_axes(inputs.get("position_ids"), rows, length):
        text = text_positions(inputs.get("position_ids"))
        counted = torch.arange(length, device="cpu")[None] if text is None else text
        _check_hints(batch, lambda: mask_facts(layout, rows, counted, attention_mask), rows, length)
        # Its documents are not known yet, so it stays in the zigzag layout.
        names = set() if head else {"labels", "shift_labels"} & inputs.keys()
        return WholeBatch(inputs, names, layout, None, None, items, rows, head)
    inputs["position_ids"], on_cpu = _positions(inputs.get("position_ids"), tokens)
    facts = mask_facts(layout, rows, on_cpu, attention_mask)
    _check_hints(batch, lambda: facts, rows, length)
    if (blocks := batch.get("block_sequence_ids")) is not None:
        if tuple(blocks.shape) != (rows, length):
            raise errors.BadShape("block_sequence_ids", tuple(blocks.shape), f"it must be [{rows}, {length}]")
        facts = replace(facts, blocks=layout.pad(blocks.to("cpu", torch.int64), 1, -1))
    # 1 for every real token: with a 2-D mask present, masking_utils looks for no documents in a shard's positions.
    if attention_mask is None:
        inputs["attention_mask"] = torch.ones(rows, length, dtype=torch.int64, device=tokens.device)

    per_token = {n for n, x in inputs.items() if isinstance(x, Tensor) and tuple(x.shape[:2]) == (rows, length)}
    arranged, facts = _arranged(facts, layout, config)
    largest = max(0, length - 1) if on_cpu is None else int(on_cpu.max()) if length else 0
    return WholeBatch(inputs, per_token, arranged, facts, largest, items, rows)


def _positions(given: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """The position ids of all rows [B, S], and those given on the CPU: None for 0, 1, 2, ..., known without a wait for
    the GPU."""
    rows, length = tokens.shape[:2]
    if given is None:
        return torch.arange(length, device=tokens.device).repeat(rows, 1), None
    if given.dim() != 2 or given.shape[1] != length or given.shape[0] not in (1, rows):
        raise errors.BadShape("position_ids", tuple(given.shape), f"it must be [{rows}, {length}]")
    return given.expand(rows, -1).contiguous(), given.cpu()


def _has_axes(position_ids: Any, rows: int, length: int) -> bool:
    """Returns True for positions [3, B, S] or [4, B, S] by time, height and width, which a text model inside takes.

    Programs make them of rows without images, too, where the model's own layers of images are not asked.
    """
    shape = tuple(position_ids.shape) if isinstance(position_ids, Tensor) else ()
    return len(shape) == 3 and shape[0] in (3, 4) and shape[1] in (1, rows) and shape[2] == length


def _check_tensors(inputs: Mapping[str, Any], rows: int, length: int) -> None:
    """Refuses inputs that are no dense tensors, and a mask that has not one entry a token."""
    mask = inputs.get("attention_mask")
    masked = isinstance(mask, Tensor)
    for name in DENSE & inputs.keys():
        if name != "attention_mask" or masked:
            check_tensor(name, inputs[name], (*INTEGERS, *FLOATS, torch.bool))
    if mask is not None and (not masked or mask.shape != (rows, length)):
        what = f"has shape {tuple(mask.shape)}" if masked else "is no tensor"
        raise errors.BadBatch(
            f"attention_mask {what}, but a ring takes [{rows}, {length}], one entry a "
            "token: pass the 2-D mask of the tokenizer, or position_ids that restart at each document."
        )


def _arranged(facts: MaskFacts, layout: Layout, config: RingConfig) -> tuple[Layout, MaskFacts]:
    """Returns the layout of a batch: the zigzag ``layout``, or a balanced one, to which the facts are padded."""
    if config.layout != "balanced" or layout.world_size == 1 or facts.documents is None:
        return layout, facts
    documents = facts.documents[:, : layout.length]
    if bool((documents == documents[:, :1]).all()):
        return layout, facts
    chosen = balanced(documents, layout, config.pad)
    if chosen.padded == layout.padded:
        return chosen, facts
    values = {"documents": -1, "hidden": False, "positions": 0, "blocks": -1}
    known = {name: x for name, x in vars(facts).items() if x is not None}
    return chosen, MaskFacts(**{n: chosen.pad(x[:, : layout.length], 1, values[n]) for n, x in known.items()})


def next_labels(labels: Tensor) -> Tensor:
    """The labels [B, S] of whole rows, each at the token before its own."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _labels(inputs: dict[str, Any], rows: int, length: int) -> Tensor | None:
    """Shifts the labels of the whole row and counts those not ignored; None without labels."""
    labels = inputs.get("labels")
    if labels is not None:
        if tuple(labels.shape) != (rows, length):
            need = (
                f"a ring needs one label a token, [{rows}, {length}]: a causal language model's. For a model that "
                "classifies rows use transformers.Trainer, or name it: hf_ring_attn.shard(batch, model=model); a class "
                "of your own also needs model.loss_type = 'ForSequenceClassification'. For others call the model in "
                "hf_ring_attn.whole_rows(model)"
            )
            if inputs.get("logits_to_keep") is not None:
                need = f"a ring needs one label a token, [{rows}, {length}]: let the program keep all logits and labels"
                need += ", without logits_to_keep. The chunked loss holds few logits at a time"
            raise errors.BadShape("labels", tuple(labels.shape), need)
        if "shift_labels" not in inputs:
            inputs["shift_labels"] = next_labels(labels)
    if "shift_labels" in inputs:
        inputs.setdefault("labels", inputs["shift_labels"])  # models compute a loss only if labels are given
        items: Tensor = (inputs["shift_labels"] != IGNORED).sum()
        return items
    return None


def text_positions(position_ids: Tensor | None) -> Tensor | None:
    """The [B, S] position ids that define documents: the first of [4, B, S], none of [3, B, S]."""
    if position_ids is None or position_ids.dim() == 2:
        return position_ids
    return position_ids[0] if len(position_ids) == 4 else None


def mask_facts(layout: Layout, rows: int, position_ids: Tensor | None, attention_mask: Tensor | None) -> MaskFacts:
    """Reads documents from restarts of position_ids [B, S], and padding from zeros of attention_mask [B, S].

    Raises:
        NumberedMask: the mask has numbers above 1, by which hybrids multiply hidden states.
    """
    if attention_mask is not None and bool((attention_mask > 1).any()):
        raise errors.NumberedMask(int(attention_mask.max()))
    documents = positions = hidden = None
    if position_ids is not None:
        position_ids = position_ids.expand(rows, -1).cpu()
        documents = _documents(position_ids, attention_mask)
        positions = None if documents is None else layout.pad(position_ids, 1)
    if attention_mask is not None and not bool(attention_mask.all()):
        hidden = layout.pad(attention_mask.to("cpu", torch.bool).logical_not(), 1, False)
    if documents is None and layout.padded != layout.length:
        documents = torch.zeros(rows, layout.length, dtype=torch.int64, device="cpu")
    documents = None if documents is None else layout.pad(documents, 1, -1)
    return MaskFacts(documents=documents, hidden=hidden, positions=positions)


def restarts(positions: Tensor) -> Tensor:
    """[B, S - 1] bool of position ids [B, S]: which tokens, from the second on, begin a document."""
    return torch.diff(positions, dim=1) != 1


def _documents(positions: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """[B, S] ids on the CPU, as transformers finds them; None for one document a row."""
    restart = restarts(positions)
    if attention_mask is not None:
        # Position ids of padding are arbitrary; only a restart between two real tokens begins a document. Ids that
        # skip ahead (PoSE) begin none here: beside a mask transformers takes such a row for one document.
        real = attention_mask.to("cpu", torch.bool)
        restart &= real[:, 1:] & real[:, :-1] & (torch.diff(positions, dim=1) < 1)
        if bool(restart.any()):
            row, token = restart.nonzero()[0].tolist()
            raise errors.MixedDocuments(row, token + 1)
        return None
    return torch.nn.functional.pad(restart.cumsum(1), (1, 0)) if bool(restart.any()) else None


def _check_hints(batch: Mapping[str, Any], read: Callable[[], MaskFacts], rows: int, length: int) -> None:
    """Refuses hints of documents that differ from position_ids: kernels use the hints, masks the positions.

    ``read`` gives the facts of the positions; without hints it is not called.
    """
    given = {}
    if (hint := batch.get("cu_seq_lens_q")) is not None:
        given["cu_seq_lens_q"] = set(hint.tolist()) - {rows * length}
    if (ids := batch.get("seq_idx")) is not None:
        if tuple(ids.shape) not in ((rows, length), (1, length)):
            raise errors.BadShape("seq_idx", tuple(ids.shape), f"it must be [{rows}, {length}]")
        given["seq_idx"] = _starts(ids.cpu().expand(rows, -1))
    if not given:
        return
    documents = read().documents
    known = _starts(torch.zeros(rows, length, device="cpu") if documents is None else documents[:, :length])
    for name, starts in given.items():
        if odd := starts ^ known:
            row, token = divmod(min(odd), length)
            raise errors.BadBatch(
                f"{name} and position_ids define different documents (first difference at token {token} of row {row}). "
                "Let position_ids restart at 0 with every document, as DataCollatorWithFlattening does."
            )


def _starts(documents: Tensor) -> set[int]:
    """The places in the flattened rows [B, S] at which documents begin."""
    rows, length = documents.shape
    borders = torch.diff(documents.flatten()).nonzero().flatten() + 1
    return {*borders.tolist(), *(row * length for row in range(rows))}
