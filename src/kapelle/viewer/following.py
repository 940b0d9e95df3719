"""Runs as they are written: server-sent events with the rows that were appended, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from kapelle.viewer.answering import dumped
from kapelle.viewer.library import Library, Run

PAUSE = 0.25
"""Seconds between two looks at the sizes of files."""
MOST_WATCHED = 200
"""Runs of a list that are watched, those that changed last."""
MOST_FOLLOWERS = 64
"""Pages that are told news at once; further ones are refused and show what was there."""
BREATH = 15.0
"""Seconds after which a connection without news is shown to be alive."""


class Followers:
    """Pages that are told news."""

    count = 0

    async def counted(self, news: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield what is new, and count it as long as somebody listens."""
        self.count += 1
        try:
            async for event in news:
                yield event
        finally:
            self.count -= 1


async def follow(library: Library, runs: Sequence[Run], query: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield an event for each step that is appended to these runs; without runs, one for each change of any run.

    `from` in the query is how many rows the page has of each run, joined by commas; rows after them are sent first.
    """
    watched = list(runs) or library.runs()[:MOST_WATCHED]
    starts = [int(word) for word in query.get("from", "").split(",") if word.isdecimal() and len(word) < 10]
    at: dict[str, tuple[int, int]] = {}
    measured: dict[str, Mapping[str, Any] | None] = {}
    states: dict[str, tuple[str, str]] = {}
    for k, run in enumerate(watched):
        rows, generation = await asyncio.to_thread(_length, run)
        at[run.key] = (min(starts[k], rows) if k < len(starts) else rows, generation)
        states[run.key], measured[run.key] = _state(run), run.measured()
    quiet = 0.0
    yield b"retry: 1000\n\n"
    while True:
        for run in watched:
            for event in await asyncio.to_thread(_news, run, at, states, measured):
                quiet = 0.0
                yield event
        await asyncio.sleep(PAUSE)
        quiet += PAUSE
        if quiet >= BREATH:
            quiet = 0.0
            yield b": still here\n\n"


def _length(run: Run) -> tuple[int, int]:
    with run.lock:
        run.refresh()
        return len(run.metrics), run.metrics.generation


def _state(run: Run) -> tuple[str, str]:
    status = run.status()
    return str(status["state"]), str(status["phase"])


def _news(
    run: Run,
    at: dict[str, tuple[int, int]],
    states: dict[str, tuple[str, str]],
    measured: dict[str, Mapping[str, Any] | None],
) -> list[bytes]:
    with run.lock:
        run.refresh()
        count, generation = len(run.metrics), run.metrics.generation
        start, known = at[run.key]
        rows: list[dict[str, Any]] = run.metrics.rows_from(start) if generation == known else []
        newest = run.measured()
    events = []
    if generation != known:
        events.append(_event("anew", {"run": run.key}))
    elif rows:
        events.append(_event("rows", {"run": run.key, "rows": rows}))
    at[run.key] = (count, generation)
    if newest is not measured[run.key] and newest is not None:
        events.append(
            _event("measured", {"run": run.key, "success": newest["success"], "step": newest["step"]})
        )
    measured[run.key] = newest
    state = _state(run)
    if state != states[run.key]:
        states[run.key] = state
        events.append(_event("state", {"run": run.key, "state": state[0], "phase": state[1]}))
    return events


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {dumped(data)}\n\n".encode("ascii")
