"""Trials spread over a few processes: each takes the next that no one has taken, and writes down what it came to."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import Value
from pathlib import Path
from typing import Any

from tests.faults.judging import Outcome, Verdict
from tests.faults.world import Trial


def spread(trials: Sequence[Trial], folder: Path, workers: int, until: float) -> list[tuple[str, Verdict]]:
    """Run trials in `workers` processes and return their names and what they came to.

    None is begun once the monotonic clock says `until`; those are omitted. A trial that breaks the harness itself
    ends it: a harness that does not know what it saw has seen nothing.
    """
    taken = Value("q", 0)
    notes = [folder / f"verdicts-{worker}.jsonl" for worker in range(workers)]
    children = []
    for note in notes:
        child = os.fork()
        if child == 0:
            _work(trials, taken, note, until)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    rows = [
        json.loads(line) for note in notes if note.exists() for line in note.read_text("utf-8").splitlines()
    ]
    for note in notes:
        note.unlink(missing_ok=True)
    if any(codes):
        raise SystemExit(f"the harness itself broke in a worker (exit codes {codes}); see above")
    return [(row.pop("name"), Verdict(**{**row, "outcome": Outcome(row["outcome"])})) for row in rows]


def _work(trials: Sequence[Trial], taken: Any, note: Path, until: float) -> None:
    code = 1
    try:
        with note.open("w", encoding="utf-8") as file:
            while time.monotonic() < until:
                with taken.get_lock():
                    place = int(taken.value)
                    taken.value += 1
                if place >= len(trials):
                    break
                try:
                    came_to = trials[place].run()
                except Exception:
                    print(f"in the trial '{trials[place].name}':", flush=True)
                    raise
                several = came_to if isinstance(came_to, list) else [(trials[place].name, came_to)]
                for name, verdict in several:
                    file.write(json.dumps({"name": name, **asdict(verdict)}) + "\n")
                file.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
