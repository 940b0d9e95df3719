"""The first pages of the table of episodes, read from the steps' own files: what is shown while an index is made."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kapelle.viewer.episode_lines import Place, Stamp, group_of, lines_of
from kapelle.viewer.index_tables import row_of
from kapelle.viewer.skimming import skimmed, spreads

PATIENCE = 0.15
"""Seconds for which steps are counted to find where a page begins; a later page waits for the index."""


def rows_in_order(
    run: Path,
    there: Mapping[Place, Stamp],
    query: Mapping[str, str],
    agents: Sequence[str],
    start: int,
    count: int,
) -> list[dict[str, Any]] | None:
    """Return rows as the index would, newest or oldest steps first; None for a query that needs the index."""
    sort = query.get("sort") or "newest"
    if sort not in ("newest", "oldest") or any(query.get(name) for name in ("q", "outcome", "task", "agent")):
        return None
    split = "test" if query.get("split") == "test" else "train"
    steps = sorted(step for own, step in there if own == split and _within(step, query))
    end = time.monotonic() + PATIENCE
    rows: list[dict[str, Any]] = []
    for step in reversed(steps) if sort == "newest" else steps:
        if len(rows) >= count:
            break
        lines = lines_of(run, split, step)
        if len(lines) <= start:
            start -= len(lines)
            if time.monotonic() > end:
                return None
            continue
        rows += _rows(lines, (split, step), agents, start, count - len(rows))
        start = 0
    return rows


def _within(step: int, query: Mapping[str, str]) -> bool:
    first, last = query.get("from", ""), query.get("to", "")
    after = step >= int(first) if first.isdecimal() and len(first) < 12 else True
    return after and (step <= int(last) if last.isdecimal() and len(last) < 12 else True)


def _rows(
    lines: Sequence[bytes], place: Place, agents: Sequence[str], start: int, count: int
) -> list[dict[str, Any]]:
    """Return rows of one step; besides theirs, only lines of the same groups are read."""
    wanted = range(start, min(start + count, len(lines)))
    groups = {group_of(lines[line]) for line in wanted}
    read = [
        skimmed(raw, line)
        for line, raw in enumerate(lines)
        if line in wanted or None in groups or group_of(raw) in groups
    ]
    found = [each for each in read if each is not None]
    widest = spreads(found)
    return [row_of(place, each, widest[each.group], agents) for each in found if each.line in wanted]
