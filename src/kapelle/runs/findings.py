"""Stores the results of later commands on a run and the notes of users in the run directory, for the viewer.

    exact.json        `kapelle play RUN --exact`: format 1; `rows` with part, step, nash_conv, exploitability, legal,
    legal_mean, returns
    evaluated.jsonl   one row for each `kapelle eval RUN`: its JSON output, with `format` (1), `time` and `settings`
    notes.json        `kapelle runs note RUN`: format 1; `tags` and `note`

A run does not need these files, and they are not read when the run is resumed. Failures to write these files are
ignored, and parts that cannot be read are treated as missing.
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
    """Store the exact values of checkpoints, which replace earlier values."""
    with suppress(OSError):
        replace_file(run / EXACT, json.dumps({"format": FORMAT, "rows": list(rows)}).encode(), sync=False)


def read_exact(run: Path) -> list[dict[str, Any]]:
    """Return the exact values of checkpoints."""
    rows = _mapping(run / EXACT).get("rows")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _mapping(file: Path) -> dict[str, Any]:
    """Return the JSON mapping in a file, or an empty mapping if the file cannot be read."""
    try:
        found = json.loads(plain_bytes(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_evaluation(run: Path, row: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Append an evaluation to the evaluations of a run."""
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
    """Return the set, the metric, the value and the standard error of every rate of an evaluation, in the order of measurement.

    For the run's own environment, the name of the set is empty. For the run's own environment, the metric is `success`
    or, if success is not defined, the return of each agent.
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


# -------- Notes and tags

TAG = re.compile(r"[\w.:+-]{1,40}")
"""A regular expression for a tag, which is a word without spaces."""
MOST_TAGS, LONGEST_NOTE = 32, 10_000
"""The maximum number of tags of a run, and the maximum number of characters in a note."""


@dataclass(frozen=True, slots=True)
class RunNotes:
    """The note and the tags of a run."""

    tags: tuple[str, ...] = ()
    text: str = ""


def keep_notes(
    run: Path, *, text: str | None = None, add: Sequence[str] = (), remove: Sequence[str] = ()
) -> RunNotes:
    """Change the note and the tags of a run, and return the result. If `text` is None, the note is not changed.

    Raises ConfigError for an invalid tag, too many tags or a note that is too long, and RunDirectoryError if writing to
    the disk fails.
    """
    wrong = next((tag for tag in add if not TAG.fullmatch(tag)), None)
    if wrong is not None:
        raise ConfigError(
            f"'{wrong}' is not a valid tag. Use at most 40 characters: letters, digits and . : + - _ "
            "without spaces."
        )
    before = read_notes(run)
    tags = tuple(tag for tag in dict.fromkeys((*before.tags, *add)) if tag not in remove)
    note = before.text if text is None else text
    if len(tags) > MOST_TAGS or len(note) > LONGEST_NOTE:
        raise ConfigError(
            f"A run can have at most {MOST_TAGS} tags and a note of at most {LONGEST_NOTE:,} "
            "characters. Remove tags with --untag, or shorten the note."
        )
    with writing(run / NOTES):
        row = {"format": FORMAT, "tags": list(tags), "note": note}
        replace_file(run / NOTES, json.dumps(row, indent=1).encode(), sync=False)
    return RunNotes(tags, note)


def read_notes(run: Path) -> RunNotes:
    """Return the note and the tags of a run. Both results are empty if the file cannot be read."""
    found = _mapping(run / NOTES)
    tags, text = found.get("tags"), found.get("note")
    listed = tags if isinstance(tags, list) else []
    valid = [tag for tag in listed if isinstance(tag, str) and TAG.fullmatch(tag)]
    return RunNotes(tuple(valid[:MOST_TAGS]), text[:LONGEST_NOTE] if isinstance(text, str) else "")
