"""Break everything around kapelle and see that it loses nothing: `python -m tests.faults`.

    python -m tests.faults --list               the kinds of faults
    python -m tests.faults --only kills         one kind; may be repeated
    python -m tests.faults --seed 7             other instants, bits and draws
    python -m tests.faults --minutes 5          what fits into that time
    python -m tests.faults --page docs/faults.md    write the table there

It ends with 1 when anything was lost, hung or showed a traceback, or when a planted loss was not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import kinds, shim
from tests.faults.forks import import_all
from tests.faults.judging import Outcome, Verdict
from tests.faults.table import Row, lines_of, write_page
from tests.faults.workers import spread
from tests.faults.world import Trial, World


def main(words: Sequence[str] | None = None) -> int:
    """Try the kinds that are asked for, print the table and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="KIND", help="this kind of fault; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (0)")
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no trial after that (20)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--page", type=Path, help="a page whose table is replaced")
    parser.add_argument("--keep", type=Path, help="folder to work in, which is kept; an empty one")
    parser.add_argument("--list", action="store_true", help="print the kinds and stop")
    chosen = parser.parse_args(words)
    if chosen.list:
        for name, kind in kinds.KINDS.items():
            print(f"{name:14} {kind.title} ({kind.about})")
        return 0
    if unknown := set(chosen.only or ()) - kinds.KINDS.keys():
        parser.error(f"no kind {sorted(unknown)}; --list shows all")
    until = time.monotonic() + 60 * chosen.minutes
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="kapelle-faults-"))
    try:
        rows = _try(World(folder.resolve()), chosen, until)
    finally:
        if chosen.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(*lines_of(rows), sep="\n")
    for row in rows:
        print(*(f"{row.name}: {defect}" for defect in row.defects), sep="\n", end="\n" if row.defects else "")
    if chosen.page is not None:
        write_page(chosen.page, rows, chosen.seed)
    return int(any(row.defects for row in rows))


def _try(world: World, chosen: argparse.Namespace, until: float) -> list[Row]:
    _say("importing")
    import_all()
    world.furnish()
    asked = [kinds.KINDS[name] for name in chosen.only or kinds.KINDS]
    if all(kind.runs is not None for kind in asked):
        needed = {run for kind in asked for run in kind.runs or ()}
        world.kinds = {name: kind for name, kind in world.kinds.items() if name in needed}
    rows = [_play_undisturbed(world, chosen.workers, until)]
    names = list(chosen.only or kinds.KINDS)
    for number, name in enumerate(names):
        kind = kinds.KINDS[name]
        left = sum(kinds.KINDS[each].weight for each in names[number:])
        mine = time.monotonic() + (until - time.monotonic()) * kind.weight / left
        row = Row(kind.title, skipped=kind.missing() or "")
        if not row.skipped:
            trials = list(kind.trials(world, chosen.seed))
            random.Random(chosen.seed).shuffle(trials)  # what there is time for is a sample of all
            started = time.monotonic()
            found = spread(trials, world.folder, chosen.workers, mine)
            for trial, verdict in found:
                row.add(trial, verdict)
            if time.monotonic() >= mine:
                row.skipped = "a part, for lack of time"
            _say(
                f"{name}: {len(found)} tried in {time.monotonic() - started:.0f} s, {len(row.defects)} defects"
            )
            _note(world.folder / "verdicts.jsonl", name, found)
        rows.append(row)
    return rows


def _play_undisturbed(world: World, workers: int, until: float) -> Row:
    row = Row("nothing at all: each kind of run twice")

    def trial(name: str) -> Trial:
        def run() -> Verdict:
            found = world.play_undisturbed(name)
            return Verdict(Outcome.BITWISE if found.repeats else Outcome.LOST, found.detail)

        return Trial(name, run)

    # Those that play against what others saved come after them.
    for later in (False, True):
        names = [name for name, kind in world.kinds.items() if (kind.after is not None) == later]
        for each, verdict in spread([trial(name) for name in names], world.folder, workers, until):
            row.add(each, verdict)
    world.take()
    _say(f"{len(world.undisturbed)} kinds of run, undisturbed")
    return row


def _note(file: Path, kind: str, found: Sequence[tuple[str, Verdict]]) -> None:
    with file.open("a", encoding="utf-8") as notes:
        for trial, verdict in found:
            row = {"kind": kind, "trial": trial, "outcome": verdict.outcome, "detail": verdict.detail}
            notes.write(json.dumps(row) + "\n")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    shim.start_with_shim()
    try:
        sys.exit(main())
    finally:
        shim.remove_built()
