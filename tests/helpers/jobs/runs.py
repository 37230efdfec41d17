"""Uses of Trainer told as data: on which mesh, with which samples and options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from hf_ring_attn import RingConfig
from tests.helpers.models.tiny_models import BEFORE_IMAGE, IMAGE, VOCABULARY

Row = dict[str, Tensor]


@dataclass(frozen=True)
class Mesh:
    """``dp`` replicas of a ring of ``cp`` ranks. Mesh() is one process without the plugin."""

    dp: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        return self.dp * self.cp

    @property
    def alone(self) -> Mesh:
        """The same data parallel ranks, with no ring: what a ring must be equal to."""
        return Mesh(self.dp)

    def __str__(self) -> str:
        return f"dp{self.dp} x cp{self.cp}"

    def launch_config(self) -> dict[str, str]:
        """The environment that `accelerate launch` sets for it."""
        sizes = {"PARALLELISM_CONFIG_CP_SIZE": self.cp, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": self.dp}
        use = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} if self.cp > 1 else {}
        return {"ACCELERATE_USE_CPU": "true", **use, **{name: str(n) for name, n in sizes.items() if n > 1 and use}}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Samples of random tokens.

    Args:
        count: how many; length: tokens of each.
        shortest: lengths differ from row to row between this and ``length``, if given; ``pad_to`` then says on which
            side the collator pads a batch ("left" or "right"), with a 2-D mask.
        labelled: which tokens have labels: "all", "answers" (a prompt of another length in each row has none), "first"
            or "last" (three tokens of every row, so that most ranks have none).
        packed: rows hold several documents, told by position_ids.
    """

    count: int = 6
    length: int = 24
    shortest: int | None = None
    pad_to: str = ""
    labelled: str = "all"
    packed: bool = False
    seed: int = 1

    def make(self) -> list[Row]:
        generator = torch.Generator().manual_seed(self.seed)
        rows = []
        for index in range(self.count):
            length = self.length
            if self.shortest is not None:
                length = int(torch.randint(self.shortest, length + 1, (), generator=generator))
            ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
            hidden = {
                "all": slice(0, 0), "answers": slice(0, index * 5 % (length - 2)),
                "first": slice(4, None), "last": slice(0, length - 3),
            }[self.labelled]  # fmt: skip
            row = {"input_ids": ids, "labels": ids.clone()}
            row["labels"][hidden] = -100
            if self.packed:
                first = 3 + index % (length - 8)
                row["position_ids"] = torch.cat([torch.arange(n) for n in (first, 2, length - 2 - first)])
            rows.append(row)
        return rows

    def collate(self, rows: list[Row]) -> Row:
        longest = max(len(row["input_ids"]) for row in rows)
        if not self.pad_to:
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if any("attention_mask" not in row for row in rows):
            rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]

        def pad(x: Tensor, value: int) -> Tensor:
            missing = longest - len(x)
            return torch.nn.functional.pad(x, (missing, 0) if self.pad_to == "left" else (0, missing), value=value)

        return {
            name: torch.stack([pad(row[name], -100 if name == "labels" else 0) for row in rows]) for name in rows[0]
        }


@dataclass(frozen=True, kw_only=True)
class Judged(Rows):
    """Samples for a head of whole rows.

    Args:
        by: a "class" of the row, a "score", "several" classes at once, a class of "tokens", "replaced" tokens, "masked"
            tokens (every fifth alone has a label), "pairs" (those, and a class of the row), tokens masked at "random"
            in each batch, tokens "everywhere", padding too, a "span" of tokens, or "nothing".
    """

    by: str = "class"

    def make(self) -> list[Row]:
        rows = super().make()
        generator = torch.Generator().manual_seed(self.seed + 1)
        for index, row in enumerate(rows):
            ids = row["input_ids"] = row["input_ids"].clamp(min=1)  # 0 is padding
            if self.by in ("masked", "pairs"):
                row["labels"] = row["labels"].masked_fill(torch.arange(len(ids)) % 5 != index % 5, -100)
                row["input_ids"] = ids.masked_fill(row["labels"] != -100, VOCABULARY - 1)
                row |= {"next_sentence_label": torch.tensor(index % 2)} if self.by == "pairs" else {}
            elif self.by == "random":
                row["labels"] = ids
            elif self.by == "everywhere":
                row["position_ids"] = torch.arange(len(ids))
            elif self.by == "tokens":
                row["labels"] = (row["labels"] % 3).masked_fill(row["labels"] == -100, -100)
            elif self.by == "replaced":
                row["labels"] = row["labels"].clamp(min=0) % 2
            elif self.by == "nothing":
                del row["labels"]
            elif self.by == "span":
                del row["labels"]
                row |= {"start_positions": torch.tensor(index % 5), "end_positions": torch.tensor(5 + index % 4)}
            else:
                one, three = torch.rand((), generator=generator), torch.rand(3, generator=generator)
                row["labels"] = {"class": (one * 3).long(), "score": one, "several": three.round()}[self.by]
        return rows

    def collate(self, rows: list[Row]) -> Row:
        whole = [name for name, x in rows[0].items() if x.dim() == 0 or (self.by == "several" and name == "labels")]
        batch = super().collate([{name: x for name, x in row.items() if name not in whole} for row in rows])
        if self.by == "random":
            kept = torch.rand(batch["labels"].shape) > 0.3
            batch["labels"] = batch["labels"].masked_fill(kept, -100)
            batch["input_ids"] = batch["input_ids"].where(kept, VOCABULARY - 1)
        if self.by == "everywhere":
            batch["labels"] = batch["labels"].clamp(min=1)
            batch["position_ids"] = torch.arange(batch["labels"].shape[1]).expand(len(rows), -1).contiguous()
        return batch | {name: torch.stack([row[name] for row in rows]) for name in whole}


@dataclass(frozen=True, kw_only=True)
class Placed(Rows):
    """Samples with something beside the text, for which placeholders stand at another place in each row."""

    length: int = 23

    def placeholders(self) -> list[int]:
        raise NotImplementedError

    def beside(self, ids: Tensor, generator: torch.Generator) -> Row:
        """The other inputs of a row."""
        raise NotImplementedError

    def make(self) -> list[Row]:
        generator = torch.Generator().manual_seed(self.seed)
        rows = []
        for index in range(self.count):
            ids = torch.randint(1, BEFORE_IMAGE, (self.length,), generator=generator)
            at, stand = 3 + index % 12, self.placeholders()
            ids[at : at + len(stand)] = torch.tensor(stand)
            row = {"input_ids": ids, "labels": ids.masked_fill(ids >= BEFORE_IMAGE, -100)}
            row["labels"][: index * 5 % 17] = -100  # another number of labels in each row
            rows.append(row | self.beside(ids, generator))
        return rows


@dataclass(frozen=True, kw_only=True)
class Pictures(Placed):
    """Samples with an image each, of Qwen's kind (`qwen`) or Gemma 3's."""

    qwen: bool = False

    def placeholders(self) -> list[int]:
        return [BEFORE_IMAGE, *[IMAGE] * 4]

    def beside(self, ids: Tensor, generator: torch.Generator) -> Row:
        kinds = (ids == IMAGE).long()
        if self.qwen:
            pixels = torch.randn(16, 96, generator=generator)
            return {
                "mm_token_type_ids": kinds.int(), "image_grid_thw": torch.tensor([1, 4, 4]), "pixel_values": pixels,
            }  # fmt: skip
        return {"token_type_ids": kinds, "pixel_values": torch.randn(3, 16, 16, generator=generator)}

    def collate(self, rows: list[Row]) -> Row:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if self.qwen:
            batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
        return batch


@dataclass(frozen=True, kw_only=True)
class Sounds(Placed):
    """Samples with a sound each, which stands at so many `places`.

    ``mask``: under which name the model takes a mask of frames; "": it takes none.
    """

    places: int
    mask: str = ""
    frames: int = 32
    mels: int = 8

    def placeholders(self) -> list[int]:
        return [IMAGE] * self.places

    def beside(self, ids: Tensor, generator: torch.Generator) -> Row:
        sound = {"input_features": torch.randn(self.mels, self.frames, generator=generator)}
        return sound | ({self.mask: torch.ones(self.frames, dtype=torch.int64)} if self.mask else {})


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """One use of Trainer, on any mesh.

    Args:
        why: what it shows that the others do not; unique.
        streamed: the samples come from an IterableDataset.
        model: a name of `tiny_models.MODELS`; lora: train a LoRA adapter of it, and whole modules of these names,
            only; "ada": one of AdaLoRA, whose model adds a penalty to its loss; "all-linear": of all linear layers.
        arguments: TrainingArguments beyond those that all runs share.
        ring: the ring's options; they mean nothing without the plugin.
        loss_function: compute_loss_func is `capped_loss`.
        generates: a callback generates text after every second step.
        steps: optimizer steps, of which some are in a second epoch; 0 only evaluates.
        metrics: compute_metrics is `ordered_metrics`, given all of the logits, their argmax, or batch by batch:
            "logits", "argmax", "batches"; "" for none.
        predicts: Trainer.predict is called at the end, with labels or without: "labelled", "unlabelled", "".
        fsdp2: in a ring FSDP2 shards the model.
        kind: the class of the trainer. change: makes the model to train of the one that ``model`` names.
    """

    why: str
    model: str = "llama"
    lora: bool | str | tuple[str, ...] = False
    streamed: bool = False
    rows: Rows = Rows()
    evaluated: Rows = Rows(count=5, seed=2)
    arguments: dict[str, Any] = field(default_factory=dict)
    ring: RingConfig = RingConfig()
    loss_function: bool = False
    generates: bool = False
    steps: int = 4
    metrics: str = ""
    predicts: str = ""
    fsdp2: bool = False
    kind: type[Trainer] = Trainer
    change: Callable[[Any], Any] | None = None
