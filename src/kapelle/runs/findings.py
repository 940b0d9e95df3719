"""What commands measured on a run afterwards, kept in its directory for the viewer.

    exact.json        `kapelle play RUN --exact`: format 1, `rows` with part, step, nash_conv, exploitability, legal, legal_mean, returns
    evaluated.jsonl   one row for each `kapelle eval RUN`: what it prints as JSON, with `format` (1), `time` and the
                      `settings` that it was given

A run does without these files: they are left out where they cannot be written, and what cannot be read counts as absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kapelle.runtime.files import plain_bytes, replace_file, write_all

FORMAT = 1
EXACT, EVALUATED = FINDINGS = ("exact.json", "evaluated.jsonl")
"""The names of the files."""


def keep_exact(run: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Keep exact values of checkpoints, in place of earlier ones."""
    with suppress(OSError):
        replace_file(run / EXACT, json.dumps({"format": FORMAT, "rows": list(rows)}).encode(), sync=False)


def read_exact(run: Path) -> list[dict[str, Any]]:
    """Return the exact values of checkpoints."""
    try:
        found = json.loads(plain_bytes(run / EXACT))
    except (OSError, ValueError, RecursionError):
        return []
    rows = found.get("rows") if isinstance(found, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


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
