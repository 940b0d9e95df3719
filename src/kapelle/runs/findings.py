"""What commands measured on a run afterwards, and what people note of it, kept in its directory for the viewer.

    exact.json        `kapelle play RUN --exact`: format 1, `rows` with part, step, nash_conv, exploitability, legal, legal_mean, returns
    evaluated.jsonl   one row for each `kapelle eval RUN`: what it prints as JSON, with `format` (1), `time` and the
                      `settings` that it was given
    notes.json        `kapelle runs note RUN`: format 1, `tags` and `note`

A run does without these files, and no resume reads them: they are left out where they cannot be written, and what cannot be read counts as absent.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kapelle.errors import ConfigError
from kapelle.runtime.files import plain_bytes, replace_file, write_all, writing

FORMAT = 1
EXACT, EVALUATED, NOTES = FINDINGS = ("exact.json", "evaluated.jsonl", "notes.json")
"""The names of the files."""


def keep_exact(run: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Keep exact values of checkpoints, in place of earlier ones."""
    with suppress(OSError):
        replace_file(run / EXACT, json.dumps({"format": FORMAT, "rows": list(rows)}).encode(), sync=False)


def read_exact(run: Path) -> list[dict[str, Any]]:
    """Return the exact values of checkpoints."""
    rows = _mapping(run / EXACT).get("rows")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _mapping(file: Path) -> dict[str, Any]:
    """Return the JSON mapping that a file holds; empty where it cannot be read."""
    try:
        found = json.loads(plain_bytes(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_evaluation(run: Path, row: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Add an evaluation to those of a run."""
    about = {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": list(settings),
    }
    with suppress(OSError):
        descriptor = os.open(
            run / EVALUATED,
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o666,
        )
        try:
            write_all(descriptor, json.dumps({**about, **row}).encode() + b"\n")
        finally:
            os.close(descriptor)


def read_evaluated(run: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run, oldest first."""
    found = []
    try:
        lines = plain_bytes(run / EVALUATED).split(b"\n")[:-1]
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                found.append(row)
    return found


def measured(row: Mapping[str, Any]) -> list[tuple[str, str, float, float | None]]:
    """Return (set, metric, value, standard error) of every rate of one evaluation, in the order in which they were measured.

    The set's name is empty for the run's own environment. Its metric is `success`, or each agent's return where nothing is solved.
    """
    team = row["team"]
    found = []
    if team["success"] is not None:
        found.append(("", "success", team["success"], team["stderr"]))
    else:
        found += [("", f"return/{agent}", value, None) for agent, value in team["reward"].items()]
    for name, part in team["parts"].items():
        if part["success"] is None:
            continue
        first, _, rest = name.partition(" ")
        own = first in row["sets"]
        found.append(
            (first if own else "", (rest if own else name) or "success", part["success"], part["stderr"])
        )
    return found


# -------- What people note of a run

TAG = re.compile(r"[\w.:+-]{1,40}")
"""What a tag may be: a word without spaces."""
MOST_TAGS, LONGEST_NOTE = 32, 10_000
"""Tags of a run; characters of a note."""


@dataclass(frozen=True, slots=True)
class RunNotes:
    """What people note of one run."""

    tags: tuple[str, ...] = ()
    text: str = ""


def keep_notes(
    run: Path, *, text: str | None = None, add: Sequence[str] = (), remove: Sequence[str] = ()
) -> RunNotes:
    """Change a run's note (None leaves it) and tags, and return what it has now.

    Raises ConfigError for a tag that is no word, too many tags or too long a note, RunDirectoryError where the disk refuses.
    """
    wrong = next((tag for tag in add if not TAG.fullmatch(tag)), None)
    if wrong is not None:
        raise ConfigError(
            f"'{wrong}' is no tag. Use letters, digits and . : + - _ without spaces, 40 at most."
        )
    before = read_notes(run)
    tags = tuple(tag for tag in dict.fromkeys((*before.tags, *add)) if tag not in remove)
    said = before.text if text is None else text
    if len(tags) > MOST_TAGS or len(said) > LONGEST_NOTE:
        raise ConfigError(
            f"A run has {MOST_TAGS} tags and a note of {LONGEST_NOTE:,} characters at most. Remove some with --untag, or write less."
        )
    with writing(run / NOTES):
        row = {"format": FORMAT, "tags": list(tags), "note": said}
        replace_file(run / NOTES, json.dumps(row, indent=1).encode(), sync=False)
    return RunNotes(tags, said)


def read_notes(run: Path) -> RunNotes:
    """Return what is noted of a run; nothing where the file cannot be read."""
    found = _mapping(run / NOTES)
    tags, text = found.get("tags"), found.get("note")
    known = (
        [tag for tag in tags if isinstance(tag, str) and TAG.fullmatch(tag)] if isinstance(tags, list) else []
    )
    return RunNotes(tuple(known[:MOST_TAGS]), text[:LONGEST_NOTE] if isinstance(text, str) else "")
