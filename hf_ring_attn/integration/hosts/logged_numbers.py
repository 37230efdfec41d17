"""Numbers that a Trainer's program logs: a warning if ranks of a ring log others, each of its own tokens.

A count of right tokens in ``compute_loss``, for example. Trainer writes what rank 0 logs. A ring cannot know which
numbers are of tokens, so none is refused. The comparison travels with the next batch.
"""

from __future__ import annotations

import re
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from ...comm.fingerprint import number_of
from ...comm.ring import Ring
from ..log import warn

OF_A_RANK = re.compile("time|second|minute|memory|mem_|gpu|cpu|flos|speed|throughput|_per_|rank")
"""Names of numbers that differ between ranks anyway."""
OF_HOSTS = {
    "loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen", "train_loss", "eval_loss",
    "entropy", "mean_token_accuracy", "num_tokens", "aux_loss",
}  # fmt: skip
"""Numbers of Trainer and SFTTrainer, which ranks have alike: a message with new numbers waits for a GPU."""
_SEEN: Any = WeakIdKeyDictionary()
"""The number of entries in a trainer's log that were compared; -1: ranks differed once, so no more are."""
_DIFFERENT = (
    "the ranks of a ring logged different numbers: {}. If they are of tokens, each is of its rank's tokens: add them "
    "up over ranks before you log them, as by self.accelerator.reduce(count)."
)


def _new(trainer: Any) -> list[dict[str, float]]:
    """The numbers of each entry of a trainer's log that were not compared."""
    log, seen = trainer.state.log_history, _SEEN.get(trainer, 0)
    entries = [] if seen < 0 else log[seen if seen <= len(log) else 0 :]
    numbers = [
        {name: x for name, x in entry.items() if name not in OF_HOSTS and isinstance(x, (int, float))}
        for entry in entries
    ]
    own = [{name: x for name, x in entry.items() if not OF_A_RANK.search(name)} for entry in numbers]
    return [entry for entry in own if entry]


def digest(trainer: Any) -> int:
    """One integer for the numbers logged since the last batch, as in `compare`."""
    entries = _new(trainer)
    return int(number_of(repr([sorted(entry.items()) for entry in entries]))) if entries else 0


def compare(trainer: Any, ring: Ring, everyone: list[int]) -> None:
    """Warns, once, of numbers that differ between ranks, by name. ``everyone``: the `digest` of each rank."""
    entries = _new(trainer)
    if _SEEN.get(trainer, 0) < 0:
        return
    if len(set(everyone)) == 1:
        _SEEN[trainer] = len(trainer.state.log_history)
        return
    _SEEN[trainer] = -1
    logs: list[Any] = ring.objects(entries, "compared what it logged")
    found: dict[str, list[float]] = {}
    for each in zip(*logs, strict=False):  # rank 0 alone may log, too
        for name in each[0]:
            values = [entry[name] for entry in each if name in entry]
            if len(values) == ring.size and len({repr(x) for x in values}) > 1:
                found.setdefault(name, values)
    if found:
        words = [f"{name} ({', '.join(f'{x:.6g}' for x in values)})" for name, values in found.items()]
        warn(_DIFFERENT.format("; ".join(words)), everywhere=False)
