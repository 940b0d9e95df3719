"""Addresses of episodes: the table of a run's episodes, one episode, a group or several side by side."""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kapelle.runs.findings import read_exact
from kapelle.viewer.answering import html, numbers, one
from kapelle.viewer.drawing import COLUMNS, conversation, folded
from kapelle.viewer.episode import Episode, read_episode, read_step
from kapelle.viewer.episode_lines import damaged_files
from kapelle.viewer.index import Index
from kapelle.viewer.index_tables import COUNTED, SORTS, WINDOW, Tables, asked, elsewhere
from kapelle.viewer.league import drawn, opposed, standing
from kapelle.viewer.library import Library, Run
from kapelle.viewer.newest import rows_in_order
from kapelle.viewer.plain_text import shown
from kapelle.viewer.presenting import agents_of, listed
from kapelle.viewer.traces import trace_of, traced, vocabulary_of
from kapelle.viewer.traffic import Traffic

ROWS = 50
"""Episodes of one page of the table."""
MISSING = "There is no such episode in this run, or its line is damaged."
BESIDE = 8
"""Episodes that are shown side by side at most."""


class Browsing:
    """Answers for the episodes of all runs; keeps an index for each run that was looked into."""

    def __init__(self, library: Library, traffic: Traffic) -> None:
        self._library = library
        self._traffic = traffic
        self._indexes: dict[str, Index] = {}
        self._lock = threading.Lock()

    def index(self, run: Run) -> Index:
        """Return a run's index, opened when it is first asked for."""
        with self._lock:
            if run.key not in self._indexes:
                self._indexes[run.key] = Index(run.path, agents_of(run), traffic=self._traffic)
            return self._indexes[run.key]

    def table(self, request: Request) -> Response:
        """Return a page of the table of episodes."""
        run = one(self._library, request.path_params["key"])
        query = dict(request.query_params)
        index = self.index(run)
        done = index.refresh()
        sort = query.get("sort") if query.get("sort") in SORTS else "newest"
        word = query.get("page", "1")
        at = max(1, int(word)) if word.isdecimal() and len(word) < 7 else 1
        start, count = (at - 1) * ROWS, None
        wanted = asked(query, index.agents)
        rows = None
        if not done.whole:
            rows = rows_in_order(run.path, index.there(), query, index.agents, start, ROWS + 1)
        if rows is None:
            rows = index.ask(
                lambda tables: tables.find(wanted, str(sort), query.get("agent", ""), start, ROWS + 1)
            )
            count = index.ask(lambda tables: tables.count(wanted))
        kept = {name: value for name, value in query.items() if value and name != "page"}
        return html(
            "episodes.html",
            run=listed(run),
            tab="episodes",
            rows=rows[:ROWS],
            agents=index.agents,
            traced={step: traced(run.path, step) for step in {row["step"] for row in rows}}
            if kept.get("split") != "test"
            else {},
            query=query,
            sorts=list(SORTS),
            sort=sort,
            count=count,
            more=count == COUNTED and not wanted.plain,
            done=done,
            faults=damaged_files(run.path),
            window=WINDOW,
            before=urlencode({**kept, "page": at - 1}) if at > 1 else None,
            after=urlencode({**kept, "page": at + 1}) if len(rows) > ROWS else None,
            at=at,
        )

    def league(self, request: Request) -> Response:
        """Return the page of who played whom."""
        run = one(self._library, request.path_params["key"])
        index = self.index(run)
        done = index.refresh()
        parts = [(part, standing(rows)) for part, rows in opposed(index.ask(Tables.met)).items()]
        summary = listed(run) | {"league": True, "path": run.path}
        return html("league.html", run=summary, parts=parts, done=done, exact=read_exact(run.path))

    def league_curves(self, request: Request) -> Response:
        """Return what that page draws."""
        run = one(self._library, request.path_params["key"])
        index = self.index(run)
        index.refresh()
        with run.lock:
            run.refresh()
            return numbers(drawn(run, index.ask(Tables.met), read_exact(run.path)))

    def episode(self, request: Request) -> Response:
        """Return the page of one episode."""
        run, split, step, line = self._place(request)
        found, group, count = read_step(run.path, split, step, line)
        if found is None:
            raise HTTPException(404, MISSING)
        index = self.index(run)
        done = index.refresh()
        same: list[dict[str, Any]] = []
        if done.ready:
            wanted = elsewhere(found.task, split, step, line)
            same = index.ask(lambda tables: tables.find(wanted, "oldest", "", 0, 40))
        reader = request.query_params.get("as", "")
        color = request.query_params.get("color", "logprob")
        lines = [each.line for each in group]
        return html(
            "episode.html",
            run=listed(run),
            tab="episodes",
            group=group,
            same=[row for row in same if row["line"] not in lines or row["step"] != step],
            color_names=COLUMNS,
            color=color if color in COLUMNS else "logprob",
            reader=reader if reader in found.agents else "",
            before=line - 1 if line else None,
            after=line + 1 if line + 1 < count else None,
            **self._drawn(run, split, step, found, reader),
        )

    def together(self, request: Request) -> Response:
        """Return several episodes side by side: those of a group, or those that the query names as `split.step.line`."""
        run = one(self._library, request.path_params["key"])
        places = []
        for word in request.query_params.getlist("e")[:BESIDE]:
            split, _, rest = word.partition(".")
            step, _, line = rest.partition(".")
            if split in ("train", "test") and step.isdecimal() and line.isdecimal() and len(rest) < 20:
                places.append((split, int(step), int(line)))
        drawn = [self._drawn(run, *place[:2], self._read(run, *place), "") for place in places]
        color = request.query_params.get("color", "logprob")
        return html(
            "together.html",
            run=listed(run),
            tab="episodes",
            drawn=drawn,
            color_names=COLUMNS,
            color=color if color in COLUMNS else "logprob",
        )

    def whole(self, request: Request) -> Response:
        """Return all of one turn's text, as plain text."""
        run, split, step, line = self._place(request)
        found = self._read(run, split, step, line)
        turn = request.path_params["turn"]
        text = next((each.text for each in (*found.turns, *found.branches) if each.index == turn), None)
        if text is None:
            raise HTTPException(404, "There is no such turn in this episode.")
        return PlainTextResponse(shown(text))

    def _drawn(self, run: Run, split: str, step: int, episode: Episode, reader: str) -> dict[str, Any]:
        trace = trace_of(run.path, split, step, episode.line)
        vocabulary = vocabulary_of(run.path, episode, trace)
        return {
            "episode": episode,
            "split": split,
            "step": step,
            "turns": conversation(episode, trace, vocabulary, reader),
            "info": folded(episode.info),
            "data": folded(episode.data),
            "traced": bool(trace),
        }

    def _place(self, request: Request) -> tuple[Run, str, int, int]:
        given = request.path_params
        if given["split"] not in ("train", "test"):
            raise HTTPException(404, "Episodes are of `train` or `test`.")
        return one(self._library, given["key"]), given["split"], given["step"], given["line"]

    def _read(self, run: Run, split: str, step: int, line: int) -> Episode:
        found = read_episode(run.path, split, step, line)
        if found is None:
            raise HTTPException(404, MISSING)
        return found
