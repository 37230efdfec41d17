"""What ranks run: a class in a ring, and alone with eager attention; how far the two are apart, as data.

Everything a rank meets comes back as data, foreign exceptions too. A rank that fails alone says so, with the class's
name, before the others wait for it for good.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.testing import relative_error

from .alone import Answer, alone, changes_of, gradients_of, inert, projected, without_the_plugin
from .configs import OFF, Entry, build, not_text, rope_changes
from .rows import Row

FLOOR = 0.05
"""A parameter's gradient counts for at least this share of the gradient of all: a key's bias has none but rounding."""
NEEDS_POSITIONS = "; put its position_ids into the batch"

LOGITS, LOSS, GRADIENTS = 2e-5, 2e-5, 1e-5


@dataclass
class Outcome:
    """What came of a class on one kind of row.

    Attributes:
        status: "exact", "refused", "different" or "crashed".
        reason: of a refusal or crash, as "Type: text"; of a difference, what differs most.
        labels: why the model's own loss was refused, if the rest was exact without labels.
        positions: why position_ids had to be in the batch, if it was exact with them.
        errors: relative differences of logits, loss and gradients.
        inert: mechanisms that change nothing when switched off.
    """

    status: str
    reason: str = ""
    labels: str = ""
    positions: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    inert: list[str] = field(default_factory=list)


DEFECTS = ("a window dropped", "positions of the shard", "a foreign error", "a foreign error on one rank")

Task = tuple[Entry, Sequence[Row]]
_meetings: dict[float, Any] = {}
"""Process groups by their patience: where ranks meet after each row, beside the ring's own group."""


def sweep(tasks: Sequence[Task], defect: str = "", patience_seconds: float = 25) -> list[dict[str, Outcome]]:
    """For each task, the outcome by row name of the rows whose eager answer this rank computed.

    The eager answers are shared out among the ranks, and computed for as many rows at a time as there are ranks, so
    that no rank waits for another's.

    Args:
        defect: one of `DEFECTS`, to see that the sweep can fail.
        patience_seconds: how long a rank that has ended a row waits for the others.
    """
    logging.getLogger("hf_ring_attn").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rank, size = dist.get_rank(), dist.get_world_size()
    if patience_seconds not in _meetings:
        _meetings[patience_seconds] = dist.new_group(timeout=timedelta(seconds=patience_seconds))
    meeting = _meetings[patience_seconds]
    found: list[dict[str, Outcome]] = [{} for _ in tasks]
    cases = [(at, entry, row) for at, (entry, rows) in enumerate(tasks) for row in rows_of(entry, rows)]
    for first in range(0, len(cases), size):
        several = cases[first : first + size]
        answers = [_in_a_ring(entry, row, meeting, defect) for _, entry, row in several]
        for owner, ((at, entry, row), answer) in enumerate(zip(several, answers, strict=True)):
            if owner == rank:
                found[at][row.name] = _judge(entry, row, answer)
    return found


def rows_of(entry: Entry, rows: Sequence[Row]) -> list[Row]:
    """Without those that are nothing of their own for this class."""
    if not_text(entry):
        return []
    return [row for row in rows if row.kind != "rope" or rope_changes(entry)]


# ---- in a ring -------------------------------------------------------------------------------------------------------


def _in_a_ring(entry: Entry, row: Row, meeting: Any, defect: str) -> tuple[Outcome, Answer | None]:
    """The outcome so far, and the answer if there is one; the ranks agree on how it ended, or one of them raises.

    Two refusals say what to leave out or put into the batch: that is done, and noted.
    """
    outcome = Outcome("exact")
    # Odd rows with the self-check, which must not refuse what is exact; even ones without, which it would hide, in
    # checkpointed layers that save their attention. What is refused by its structure is tried with it, since it
    # decides on that.
    checks = row.length % 2 == 1
    while True:
        ended: tuple[str, str] | None = None
        foreign = False
        answer: Answer | None = None
        try:
            answer = _ring_answer(entry, row, not outcome.labels, bool(outcome.positions), checks, defect)
        except errors.RingAttentionError as error:
            ended = (type(error).__name__, str(error))
        except Exception as error:  # noqa: BLE001 - whatever a model raises is an outcome of the sweep
            foreign, ended = True, (type(error).__name__, _where(error))
        _agree(entry, row, meeting, ended)
        if ended is None:
            return outcome, answer
        text = f"{ended[0]}: {ended[1]}"
        if ended[0] in ("LossNotSharded", "UnnamedModel") and not outcome.labels:
            outcome.labels = re.sub(r" \(the self-check found [^)]*\)", "", text)  # its numbers depend on the row
        elif not outcome.positions and text.count("; ") + 1 == 2 * text.count(NEEDS_POSITIONS):  # the only reason
            outcome.positions = text
        elif ended[0] == "UnsupportedModel" and not checks:
            checks = True
        else:
            return Outcome("crashed" if foreign else "refused", text), None


def _ring_answer(entry: Entry, row: Row, labelled: bool, numbered: bool, checks: bool, defect: str = "") -> Answer:
    dropped = {"sliding_window": OFF} if defect == "a window dropped" else {}
    model: Any = build(entry, "ring_fp32", **changes_of(entry, row), **dropped)
    batch = row.batch(numbered)
    if not labelled:
        del batch["labels"]
    saves = row.length % 2 == 0 and model.supports_gradient_checkpointing
    if saves:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sharded = hf_ring_attn.shard(batch, config=RingConfig(self_check=checks, save_attention=saves))
    if defect == "positions of the shard":
        # Written past its count of changes: another tensor in its place would be refused.
        sharded.inputs["position_ids"].data[:] = torch.arange(sharded.layout.local_length)
    if defect == "a foreign error" or (defect == "a foreign error on one rank" and dist.get_rank() == 1):
        raise KeyError(defect)
    with warnings.catch_warnings(), sharded:
        warnings.simplefilter("ignore")
        out = model(**sharded.inputs)
    logits = sharded.gather(out.logits)
    loss = out.loss if labelled else projected(logits, batch)
    loss.backward()
    sharded.reduce_gradients(model)
    return Answer(logits.detach(), sharded.reduce(loss), gradients_of(model))


def _agree(entry: Entry, row: Row, meeting: Any, ended: tuple[str, str] | None) -> None:
    """Raises on a rank that alone ended otherwise, or waits for ranks that hang in a collective."""
    everybody: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everybody, None if ended is None else ended[0], group=meeting)
    except RuntimeError as error:
        raise RuntimeError(f"{entry.name}, {row.name}: this rank ended with {ended}, others hang") from error
    if len(set(everybody)) > 1:
        raise RuntimeError(f"{entry.name}, {row.name}: ranks ended differently, {everybody}; this one with {ended}")


def _where(error: BaseException) -> str:
    """The text of a foreign exception, and the place that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = "" if at is None else f" ({at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno})"
    return f"{str(error)[:300]}{place}"


# ---- judgement -------------------------------------------------------------------------------------------------------


def _judge(entry: Entry, row: Row, result: tuple[Outcome, Answer | None]) -> Outcome:
    outcome, got = result
    if outcome.status != "exact" or got is None:
        return outcome
    labelled = not outcome.labels
    try:
        with without_the_plugin():
            want = alone(entry, row, labelled, bool(outcome.positions))
            if row.kind in ("plain", "rope"):
                outcome.inert = inert(entry, row, want)
    except Exception as error:  # noqa: BLE001 - then there is no oracle, which is a fault of the sweep's own
        return Outcome("crashed", f"alone: {type(error).__name__}: {_where(error)}")
    real = row.batch().get("attention_mask", torch.ones(2, row.length)).bool()
    outcome.errors = {
        "logits": relative_error(got.logits[real], want.logits[real]),
        **({"loss": relative_error(got.loss, want.loss)} if labelled else {}),
        **gradient_errors(got.gradients, want.gradients),
    }
    bounds = {"logits": LOGITS, "loss": LOSS, "gradients": GRADIENTS}
    wrong = {name: x for name, x in outcome.errors.items() if not x <= bounds[name]}
    if wrong:
        outcome.status = "different"
        outcome.reason = ", ".join(f"{name} {x:.1e}" for name, x in wrong.items()) + f" ({_worst(got, want)})"
    return outcome


def gradient_errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """ "gradients": the largest over parameters of norm(got - want) / max(norm(want), FLOOR * norm(all of want))."""
    floor = FLOOR * float(torch.stack([x.double().norm() for x in want.values()]).norm())
    return {"gradients": max(_parameter_errors(got, want, floor).values(), default=torch.inf)}


def _parameter_errors(got: dict[str, Tensor], want: dict[str, Tensor], floor: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in {*got, *want}:
        a, b = got.get(name), want.get(name)
        shape = a if a is not None else b
        assert shape is not None
        a, b = (torch.zeros_like(shape, dtype=torch.float64) if x is None else x.double() for x in (a, b))
        found[name] = float((a - b).norm()) / max(float(b.norm()), floor) if a.isfinite().all() else torch.inf
    return found


def _worst(got: Answer, want: Answer) -> str:
    floor = FLOOR * float(torch.stack([x.double().norm() for x in want.gradients.values()]).norm())
    each = _parameter_errors(got.gradients, want.gradients, floor)
    return max(each, key=lambda name: each[name]) if each else "no gradients"
