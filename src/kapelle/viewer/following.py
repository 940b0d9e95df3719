"""Runs as they are written: server-sent events with the rows that were appended, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
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
    starts = [int(word) for word in query.get("from", "").split(",") if word.isdecimal() and len(word) < 10]
    watched = list(runs) or library.runs()[:MOST_WATCHED]
    known = {}
    for k, run in enumerate(watched):
        known[run.key] = await asyncio.to_thread(_known, run)
        known[run.key].rows = min([known[run.key].rows, *starts[k : k + 1]])
    quiet = 0.0
    yield b"retry: 1000\n\n"
    while True:
        events = []
        if not runs:  # those that came, and those that are gone
            watched = (await asyncio.to_thread(library.runs))[:MOST_WATCHED]
            keys = {run.key for run in watched}
            events += [_event("anew", {"run": key}) for key in sorted(keys ^ known.keys())]
            known = {key: each for key, each in known.items() if key in keys}
        for run in watched:
            if run.key not in known:
                known[run.key] = await asyncio.to_thread(_known, run)
            events += await asyncio.to_thread(_news, run, known[run.key])
        for event in events:
            quiet = 0.0
            yield event
        await asyncio.sleep(PAUSE)
        quiet += PAUSE
        if quiet >= BREATH:
            quiet = 0.0
            yield b": still here\n\n"


@dataclass(slots=True)
class Known:
    """What a page has been told of a run."""

    rows: int
    generation: int
    measured: Mapping[str, Any] | None
    """Its newest evaluation."""
    state: tuple[str, str]


def _known(run: Run) -> Known:
    with run.lock:
        run.refresh()
        return Known(len(run.metrics), run.metrics.generation, run.measured(), _state(run))


def _state(run: Run) -> tuple[str, str]:
    status = run.status()
    return str(status["state"]), str(status["phase"])


def _news(run: Run, known: Known) -> list[bytes]:
    """Return what is new of a run, and note that it has been told."""
    with run.lock:
        now = _known(run)
        rows = run.metrics.rows_from(known.rows) if now.generation == known.generation else []
    events = []
    if now.generation != known.generation:
        events.append(_event("anew", {"run": run.key}))
    elif rows:
        events.append(_event("rows", {"run": run.key, "rows": rows}))
    if now.measured is not known.measured and now.measured is not None:
        measured = {name: now.measured[name] for name in ("success", "step")}
        events.append(_event("measured", {"run": run.key, **measured}))
    if now.state != known.state:
        events.append(_event("state", {"run": run.key, "state": now.state[0], "phase": now.state[1]}))
    known.rows, known.generation, known.measured, known.state = (
        now.rows,
        now.generation,
        now.measured,
        now.state,
    )
    return events


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {dumped(data)}\n\n".encode("ascii")
