"""Tries a row with the batch's own placeholders: tokens in whose places a model puts its features, in their order.

A ring shards rows before a model of the program's own reads them, so a rank would give its first placeholder the first
feature. Only inputs of known names are read whole (`whole_batch.FEATURES`). Random words are no placeholders, and which
ids are is not known: the ids of the batch's longest runs and its largest ids stand in the row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import errors
from ..gradients import fsdp_units
from ..log import warn
from .across_ranks import stays_in
from .row import Sample, is_feature

SPOTS = 4
"""The most places of each id: one in each chunk of the row, if there are as many features."""


@dataclass
class PlantedSample(Sample):
    """A sample whose row has placeholders. ``marks``: their ids; ``spots``: the places of each."""

    marks: tuple[int, ...] = ()
    spots: int = 1

    def row(self, *given: Any, **named: Any) -> dict[str, Any]:
        found = super().row(*given, **named)
        found |= {name: x for name, x in self.others.items() if _is_list(x, self.rows)}
        ids = found["input_ids"].clone()
        for number, mark in enumerate(self.marks):
            for spot in range(self.spots):
                ids[:, spot * ids.shape[1] // self.spots + number + 1] = mark
        return {**found, "input_ids": ids}


def try_placeholders(job: Any) -> None:
    """Compares tokens once more with the batch's placeholders, if the model takes such a row. ``job``: a `_Check`.

    Raises:
        FeaturesSplit: in the ring they get other features.
    """
    sample = planted(job.sample)
    if sample is None:
        return
    names = [name for name, x in sample.others.items() if is_feature(x)]
    if not stays_in(job.ring, job.sharding):  # rings whose batches have no features would not take part
        warn(UNTRIED.format(names, job.name))
        return
    try:
        other = replace(job, sample=sample)
        other.run(other.try_tokens, 1)
    except errors.SelfCheckNotRun:  # it counts its placeholders, and would count those of a rank
        fsdp_units.end_forward(job.model)
        return
    except (errors.SelfCheckFailed, errors.SelfCheckRaised) as error:
        raise errors.FeaturesSplit(job.name, names) from error


UNTRIED = (
    "under FSDP2 over several rings the self-check cannot try how {1} uses {0}. If it puts them in order into the "
    "places of tokens, each rank would begin with the first one, and train wrong: then name them pixel_values or "
    "input_features."
)


def planted(sample: Sample) -> PlantedSample | None:
    """Plants placeholders in the row of a sample; None if it has no features that could stand in their places."""
    if sample.unnamed is None or not sample.unnamed.numel():
        return None
    ids = sample.unnamed.flatten()
    values, lengths = torch.unique_consecutive(ids, return_counts=True)
    longest = values[lengths.argsort(descending=True, stable=True)[:2]]
    marks = sorted({*longest.tolist(), *values.unique()[-2:].tolist()})
    features = [x for x in sample.others.values() if is_feature(x)]
    spots = min(SPOTS, *((x if _is_list(x, sample.rows) else x[0]).numel() // x.shape[-1] for x in features))
    return PlantedSample(**vars(sample), marks=tuple(marks), spots=spots)


def _is_list(x: Any, rows: int) -> bool:
    """Returns True for features [N, width] of all rows, one after the other."""
    return is_feature(x) and x.dim() == 2 and len(x) != rows
