"""The whole sweep, on live CPU ranks of this machine. See the package; `--help` for the options."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
REPOSITORY = Path(__file__).resolve().parents[2]

from hf_ring_attn.bench.provenance import facts  # noqa: E402  only after the variable
from tests.helpers.live_ranks import LiveRanks, RanksFailed  # noqa: E402  only after the variable
from tests.sweep import table  # noqa: E402  only after the variable
from tests.sweep.comparison import Outcome, sweep  # noqa: E402  only after the variable
from tests.sweep.configs import Entry, entries  # noqa: E402  only after the variable
from tests.sweep.rows import KINDS, LENGTHS, ROWS, Row  # noqa: E402  only after the variable


def outcomes_of(ranks: LiveRanks, entry: Entry, rows: list[Row]) -> list[tuple[str, Outcome]]:
    """(kind, outcome) for every row of a class; a class that breaks the ranks is a crash of each of its rows."""
    try:
        found: dict[str, Outcome] = {}
        for (part,) in ranks.run(sweep, [(entry, rows)]):
            found |= part
    except RanksFailed as error:
        return [(row.kind, Outcome("crashed", f"the ranks failed: {str(error)[-2000:]}")) for row in rows]
    return [(row.kind, found[row.name]) for row in rows if row.name in found]


def head(arguments: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    return {
        **facts(),
        "command": table.COMMAND,
        "ring_sizes": arguments.ring,
        "kinds": [kind for kind in KINDS if any(row.kind == kind for row in rows)],
        "lengths": [length for length in LENGTHS if any(row.length == length for row in rows)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ring", type=int, nargs="+", default=[2], help="ring sizes")
    parser.add_argument("--rows", nargs="+", default=["all"], choices=["all", *KINDS], help="kinds of rows")
    parser.add_argument("--only", nargs="+", default=[], help="model types or classes; none: every one")
    parser.add_argument(
        "--save", type=Path, help="folder for results.jsonl, README.md; with --only only those rows are new"
    )
    arguments = parser.parse_args()
    rows = [row for row in ROWS if "all" in arguments.rows or row.kind in arguments.rows]
    chosen = [e for e in entries() if not arguments.only or {e.model_type, e.model_class} & set(arguments.only)]
    top = head(arguments, rows)
    worlds = [LiveRanks(size, timeout_seconds=90) for size in arguments.ring]
    lines: list[table.Line] = []
    wrong: dict[str, list[str]] = {}
    for number, entry in enumerate(chosen, 1):
        began = time.monotonic()
        outcomes = [x for ranks in worlds for x in outcomes_of(ranks, entry, rows)]
        made = table.line(entry, outcomes)
        lines.append(made)
        found = table.problems(made, outcomes)
        if found:
            wrong[entry.name] = found
        note = "PROBLEM " + "; ".join(found)[:500] if found else table.summary(made)
        print(f"{number}/{len(chosen)} {entry.name}, {time.monotonic() - began:.1f} s: {note}", flush=True)
    for ranks in worlds:
        ranks.close()
    if arguments.save:
        if arguments.only:
            filed_top, filed = table.read(arguments.save / table.FILED.name)
            again = dict.fromkeys((entry.name for entry in chosen), f"{top['date']}, commit {top['commit'][:7]}")
            top = {**filed_top, "run_again": {**filed_top.get("run_again", {}), **again}}
            made_now = {x.key: x for x in lines}
            known = {(e.model_type, e.model_class, e.variant): at for at, e in enumerate(entries())}
            lines = sorted(({x.key: x for x in filed} | made_now).values(), key=lambda x: known.get(x.key, len(known)))
        table.write(arguments.save, top, lines)
    print(f"{len(chosen)} classes, {len(wrong)} with problems: {sorted(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
