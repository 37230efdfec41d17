"""Every class of transformers' auto mappings once in a ring of two, held to the filed table of supported models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from tests.helpers.live_ranks import LiveRanks, RanksFailed

from . import table
from .alone import alone, inert
from .comparison import Outcome, rows_of, sweep
from .configs import Entry, build, entries, known_inert, not_text
from .rows import KINDS, LENGTHS, Row

Ranks = Callable[[int], LiveRanks]
HEAD, FILED = table.read()
LINES = {line.key: line for line in FILED}
SAME_TRANSFORMERS = HEAD["versions"]["transformers"] == transformers.__version__
AGAIN = f"If that is right, file it: {table.COMMAND} (with --only {{}} for some classes)."

ENTRIES = entries()
AT_ONCE = 12


def representative(number: int, entry: Entry) -> Row:
    """One row for each class; neighbours in the list get other kinds, so that all kinds are covered."""
    row = Row(KINDS[number % len(KINDS)], LENGTHS[number // len(KINDS) % len(LENGTHS)])
    return row if rows_of(entry, [row]) else Row("plain", row.length)


CASES = [(entry, representative(number, entry)) for number, entry in enumerate(ENTRIES)]


BY_LENGTH = {"blt"}
"""Model types that are refused always, but by the first of two reasons that a row's length brings up."""


def complaint(entry: Entry, row: Row, got: Outcome) -> str:
    """What is wrong with the outcome of a class; "" if nothing is."""
    if got.status not in table.GOOD or got.inert:
        return f"{entry.name}, {row.name}: {got.status} {got.reason} {got.inert or ''}"
    line = LINES.get((entry.model_type, entry.model_class, entry.variant))
    if not SAME_TRANSFORMERS or line is None:
        return ""
    filed = line.of(row.kind)
    want = None if filed is None else (filed.status, filed.reason, filed.labels, filed.positions)
    either = entry.model_type in BY_LENGTH and want is not None and want[0] == got.status == "refused"
    if either or want == table.said(got):
        return ""
    return f"{entry.name}, {row.name}: filed is {want}, got {table.said(got)}. {AGAIN.format(entry.model_type)}"


def built(entry: Entry) -> bool:
    """Whether a class can be built: the overrides are those of the version that the table was filed with."""
    if SAME_TRANSFORMERS or not_text(entry):
        return True
    try:
        build(entry, "eager")
    except Exception as error:  # noqa: BLE001 - a config that other versions refuse is no matter of the ring
        warnings.warn(f"{entry.name} is not built by transformers {transformers.__version__}: {error}", stacklevel=2)
        return False
    return True


@pytest.mark.parametrize("first", range(0, len(CASES), AT_ONCE), ids=lambda at: f"from {ENTRIES[at].model_type}")
@pytest.mark.turns
def test_a_class_is_exact_or_refused_as_filed(ranks: Ranks, first: int) -> None:
    several = [(entry, row) for entry, row in CASES[first : first + AT_ONCE] if built(entry) and rows_of(entry, [row])]
    shares = ranks(2).run(sweep, [(entry, [row]) for entry, row in several])
    complaints = []
    for (entry, row), *parts in zip(several, *shares, strict=True):
        (got,) = (part[row.name] for part in parts if part)
        complaints.append(complaint(entry, row, got))
    assert not any(complaints), "\n".join(filter(None, complaints))


@pytest.mark.skipif(not SAME_TRANSFORMERS, reason="the table was filed with another version of transformers")
def test_every_class_is_filed() -> None:
    assert {(entry.model_type, entry.model_class, entry.variant) for entry in ENTRIES} == set(LINES), table.COMMAND


def test_the_filed_table_holds_no_problem_and_is_what_people_read() -> None:
    assert {said.status for line in FILED for said in line.outcomes} == set(table.GOOD)
    assert (table.FILED.parent / "README.md").read_text() == table.markdown(HEAD, FILED)


# ---- the sweep can fail ----------------------------------------------------------------------------------------------

MISTRAL, MOSHI = (next(entry for entry in ENTRIES if entry.model_type == name) for name in ("mistral", "moshi"))


def outcome(ranks: Ranks, defect: str, patience_seconds: float = 25) -> Outcome:
    row = Row("plain", 23)
    shares = ranks(2).run(sweep, [(MISTRAL, [row])], defect, patience_seconds)
    (found,) = (part[row.name] for (part,) in shares if part)
    return found


@pytest.mark.parametrize("defect", ["a window dropped", "positions of the shard"])
def test_a_planted_defect_is_a_difference(ranks: Ranks, defect: str) -> None:
    found = outcome(ranks, defect)
    assert found.status == "different" and "logits" in found.reason
    assert "different" in complaint(MISTRAL, Row("plain", 23), found)


def test_a_foreign_error_is_reported_as_one(ranks: Ranks) -> None:
    found = outcome(ranks, "a foreign error")
    assert found.status == "crashed" and found.reason.startswith("KeyError: 'a foreign error' (comparison.py:")
    assert complaint(MISTRAL, Row("plain", 23), found)


@pytest.mark.turns
def test_an_error_of_one_rank_alone_names_the_class(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"MistralForCausalLM \(mistral\), plain 23: ranks ended differently|hang"):
        outcome(ranks, "a foreign error on one rank", patience_seconds=2)


def test_a_mechanism_that_changes_nothing_is_told() -> None:
    """Moshi's code reads its window in flash attention only; Mistral's reads it always."""
    row = Row("plain", 24)
    assert inert(MISTRAL, row, alone(MISTRAL, row)) == []
    assert list(known_inert(MOSHI)) == ["sliding_window"]
    assert complaint(MISTRAL, row, Outcome("exact", inert=["sliding_window"]))


def test_a_problem_of_any_row_is_told() -> None:
    good, other = Outcome("exact"), Outcome("refused", "UnsupportedModel: why")
    for found, text in [
        ([("plain", good), ("plain", other)], "plain: its outcome depends on length or ring size"),
        ([("plain", good), ("left", Outcome("different", "logits 3e-02"))], "left: different: logits 3e-02"),
        ([("left", Outcome("crashed", "KeyError: x"))], "left: crashed: KeyError: x"),
        ([("plain", Outcome("exact", inert=["sliding_window"]))], "plain: without ['sliding_window'] nothing changes"),
        ([("plain", good), ("left", other), ("left", other)], None),
    ]:
        assert table.problems(table.line(MISTRAL, found), found) == ([text] if text else [])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    outcome = Outcome("exact", labels="LossNotSharded: why", errors={"logits": 3.14159e-7, "gradients": 2e-6})
    lines = [table.line(MISTRAL, [("plain", outcome), ("left", Outcome("refused", "UnsupportedModel: a | b."))])]
    table.write(tmp_path, HEAD, lines)
    head, read = table.read(tmp_path / table.FILED.name)
    assert head == HEAD and read == lines and read[0].largest["logits"] == 3.1e-7
    result = "exact (plain), without labels, since its own loss is refused; refused (left): UnsupportedModel: a \\| b."
    assert f"| mistral | MistralForCausalLM | {result} |" in (tmp_path / "README.md").read_text()


def test_a_changed_outcome_is_stale() -> None:
    if SAME_TRANSFORMERS:
        assert "filed is" in complaint(MISTRAL, Row("plain", 24), Outcome("refused", "UnsupportedModel: why"))
