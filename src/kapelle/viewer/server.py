"""Defines the routes of the viewer, the checks of requests, and the responses. No request changes any data."""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from kapelle.runs.findings import read_exact
from kapelle.runs.verdict import ADVICE, YOUNG
from kapelle.services.binding import Binding
from kapelle.services.http import SAFE, Guard
from kapelle.services.request_errors import RequestError
from kapelle.viewer import blame, curves
from kapelle.viewer.comparing import DrawnRuns
from kapelle.viewer.episode import (
    COLUMNS,
    ShownEpisode,
    conversation,
    credit_map,
    folded,
    read_episode,
    read_step,
    trace_of,
    traced,
    vocabulary_of,
)
from kapelle.viewer.index import FILTERS, SORTS, Index
from kapelle.viewer.league import drawn, opposed, standing
from kapelle.viewer.library import Library, ViewedRun
from kapelle.viewer.lines import damaged_files
from kapelle.viewer.pages import chosen, dumped, error_page, html, json_answer, run_of, shown
from kapelle.viewer.pictures import read_picture
from kapelle.viewer.pool import pool
from kapelle.viewer.presenting import (
    at,
    compared,
    ended,
    listed,
    newest_episodes,
    pace,
    readers,
    settings_rows,
    team_rows,
    warnings,
)

# -------- Checks of requests, and the headers that limit what a browser may do with a response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
"""The content security policy. A page may use only resources of its own server, and inline scripts and styles are forbidden."""
NEWS = "/events"
"""The path of the server-sent events."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def check_reading(method: str, headers: Mapping[str, str]) -> None:
    """Raise RequestError unless a request only reads data and does not come from a page of another site."""
    if method not in SAFE:
        raise RequestError(405, "Only GET and HEAD are allowed.", None, None, {"allow": "GET, HEAD"})
    # Other sites may contain links to this viewer, but their pages and scripts may not load its pages.
    if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
        raise RequestError(403, "Pages of other sites may not load this one.")


# -------- Routes of a run's overview, team, settings and machine


def _team(library: Library, request: Request) -> Response:
    run = run_of(library, request.path_params["key"])
    summary = listed(run)
    episodes = newest_episodes(run)
    rows = team_rows(run, episodes)
    return html(
        "team.html",
        run=summary,
        tab="team",
        team=rows,
        readers=readers(episodes),
        count=len(episodes),
        sharing=at(run.settings(), "team", "sharing"),
        workflow=at(run.settings(), "workflow", "name"),
    )


def _settings(library: Library, request: Request) -> Response:
    """Return the page with the settings of a run: the settings that differ from the defaults, or all settings."""
    run = run_of(library, request.path_params["key"])
    query, every = request.query_params.get("q", ""), request.query_params.get("all") == "1"
    rows = [
        row
        for row in settings_rows(run)
        if (every or row["own"] or query) and query.lower() in f"{row['name']} {row['value']}".lower()
    ]
    return html("settings.html", run=listed(run), rows=rows, query=query, all=every)


def _blame(library: Library, request: Request) -> Response:
    """Return the page with the turns that made episodes fail, for the measurement in the query or for the most recent one."""
    run = run_of(library, request.path_params["key"])
    found = blame.kept(run.path)
    result = found.get(request.query_params.get("file", ""), next(iter(found.values()), None))
    return html(
        "blame.html",
        run=listed(run) | {"blame": True},
        path=run.path,
        files=[(name, each.measured) for name, each in found.items()],
        shown=None if result is None else blame.listing(result),
    )


def _blamed(library: Library, request: Request) -> Response:
    """Return the page that shows one conversation turn by turn."""
    given = request.path_params
    run = run_of(library, given["key"])
    result = blame.kept(run.path).get(given["file"])
    number, turn = given["number"], request.query_params.get("turn", "")
    if result is None or number >= len(result.episodes):
        raise HTTPException(404, "There is no such conversation here, or its line is damaged.")
    return html(
        "blamed.html",
        run=listed(run) | {"blame": True},
        file=given["file"],
        before=number - 1 if number else None,
        after=number + 1 if number + 1 < len(result.episodes) else None,
        **blame.conversation(
            result.episodes[number],
            int(turn) if turn.isdecimal() and len(turn) < 10 else None,
            at(run.settings(), "environment", "form"),
        ),
    )


# -------- Runs that are being written: a page reloads its curves after server-sent events

PAUSE = 0.25
"""The number of seconds between two checks of the files."""
MOST_WATCHED = 200
"""The maximum number of runs in a list that are watched. The most recently changed runs are watched."""
MOST_FOLLOWERS = 64
"""The maximum number of pages that receive events at the same time. Further pages are not updated."""
BREATH = 15.0
"""The number of seconds without events after which a comment is sent to keep the connection alive."""


class Followers:
    """Counts the pages that receive events."""

    count = 0

    async def counted(self, news: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events, and count the page until it disconnects."""
        self.count += 1
        try:
            async for event in news:
                yield event
        finally:
            self.count -= 1


async def follow(
    library: Library, runs: Sequence[ViewedRun], query: Mapping[str, str]
) -> AsyncIterator[bytes]:
    """Yield an event for each change of the given runs or, if there are none, for each change in the list of runs.

    The parameter `from` of the query contains the number of rows that the page has for each run, separated by commas. A
    different number counts as a change.
    """
    rows = [int(word) for word in query.get("from", "").split(",") if word.isdecimal() and len(word) < 10]
    watched = list(runs) or library.runs()[:MOST_WATCHED]
    known = {run.key: await asyncio.to_thread(_known, run) for run in watched}
    for run, count in zip(runs, rows, strict=False):
        if count != len(run.metrics):
            known[run.key] = None
    quiet = 0.0
    yield b"retry: 1000\n\n"
    while True:
        if not runs:  # report runs that were added or removed
            watched = (await asyncio.to_thread(library.runs))[:MOST_WATCHED]
        now = {run.key: await asyncio.to_thread(_known, run) for run in watched}
        changed = [key for key in {**known, **now} if known.get(key) != now.get(key)]
        known = dict(now)
        for key in changed:
            yield f"event: changed\ndata: {dumped({'run': key})}\n\n".encode("ascii")
        await asyncio.sleep(PAUSE)
        quiet = 0.0 if changed else quiet + PAUSE
        if quiet >= BREATH:
            quiet = 0.0
            yield b": still here\n\n"


def _known(run: ViewedRun) -> tuple[int, str, str] | None:
    """Return the values that change when a run writes: the edition of its tables, its state and its phase."""
    with run.lock:
        run.refresh()
        status = run.status()
        return run.edition, str(status["state"]), str(status["phase"])


# -------- Pages of episodes: the table of a run's episodes, one episode, several side by side

SELECTING = ("split", "from", "to", *FILTERS)
"""The parameters of a query that select episodes, which are all except the order and the page."""
ROWS = 50
"""The number of episodes on one page of the table."""
MISSING = "There is no such episode in this run, or its line is damaged."
MOST_SAME = 40
"""The maximum number of other episodes of the same task on the page of an episode."""
BESIDE = 8
"""The maximum number of episodes that are shown side by side."""


class Browsing:
    """Responds to requests about the episodes of all runs, and keeps an index for each run that was opened."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._indexes: dict[str, Index] = {}
        self._lock = threading.Lock()

    def index(self, run: ViewedRun) -> Index:
        """Return the index of a run, which is created at the first call."""
        with self._lock:
            return self._indexes.setdefault(run.key, Index(run.path, run.agents()))

    def table(self, request: Request) -> Response:
        """Return a page of the table of episodes."""
        run = run_of(self._library, request.path_params["key"])
        query = dict(request.query_params)
        index = self.index(run)
        done, expression = index.refresh(query), index.expression(query)
        sort = query["sort"] if query.get("sort") in SORTS else "newest"
        at = max(1, _counted(query.get("page", "1")))
        fitting = index.rows(query, sort)
        count, rows = len(fitting), fitting[(at - 1) * ROWS : at * ROWS]
        kept = {name: value for name, value in query.items() if value and name != "page"}
        return html(
            "episodes.html",
            run=listed(run),
            tab="episodes",
            rows=rows,
            agents=index.agents,
            traced={step: traced(run.path, step) for step in {row.step for row in rows}}
            if kept.get("split") != "test"
            else {},
            query=query,
            sorts=SORTS,
            sort=sort,
            count=count,
            done=done,
            faults=damaged_files(run.path),
            before=urlencode({**kept, "page": at - 1}) if at > 1 else None,
            after=urlencode({**kept, "page": at + 1}) if count > at * ROWS else None,
            at=at,
            expression=expression,
            tags=sorted({tag for row in rows for tag in row.tags}),
            command=command_of(run, kept) if kept and not (expression and expression.trouble) else "",
        )

    def league(self, request: Request) -> Response:
        """Return the page of a league, with results, ratings and the pool."""
        run = run_of(self._library, request.path_params["key"])
        index = self.index(run)
        done = index.refresh()
        return html(
            "league.html",
            run=listed(run) | {"league": True, "path": run.path},
            parts=[(part, standing(rows)) for part, rows in opposed(index.met()).items()],
            done=done,
            exact=read_exact(run.path),
            pool=pool(run),
        )

    def league_curves(self, request: Request) -> Response:
        """Return the curves for the page of a league."""
        run = run_of(self._library, request.path_params["key"])
        with run.lock:
            run.refresh()
            return json_answer(drawn(run, read_exact(run.path)))

    def episode(self, request: Request) -> Response:
        """Return the page of one episode."""
        run, split, step, line = self._place(request)
        found, group, count = read_step(run.path, split, step, line)
        if found is None:
            raise HTTPException(404, MISSING)
        index = self.index(run)
        reading = bool(found.task) and not index.refresh().ready
        same = index.rows({"task": found.task, "split": split}, "oldest") if found.task else []
        reader = request.query_params.get("as", "")
        color = request.query_params.get("color", "logprob")
        lines = [line, *(each.line for each in group)]
        return html(
            "episode.html",
            run=listed(run),
            tab="episodes",
            group=group,
            credit=credit_map(run.path, split, step, group),
            blame=blame.offered(run.path, split, step, found),
            reading=reading,
            same=[row for row in same if row.line not in lines or row.step != step][:MOST_SAME],
            color_names=COLUMNS,
            color=color if color in COLUMNS else "logprob",
            reader=reader if reader in found.agents else "",
            before=line - 1 if line else None,
            after=line + 1 if line + 1 < count else None,
            **self._drawn(run, split, step, found, reader),
        )

    def together(self, request: Request) -> Response:
        """Return the page that shows several episodes side by side. The query specifies each episode as `split.step.line`."""
        run = run_of(self._library, request.path_params["key"])
        places = []
        for word in request.query_params.getlist("e")[:BESIDE]:
            split, _, rest = word.partition(".")
            step, _, line = rest.partition(".")
            if split in ("train", "test") and step.isdecimal() and line.isdecimal() and len(rest) < 20:
                places.append((split, int(step), int(line)))
        found = [self._read(run, *place) for place in places]
        drawn = [self._drawn(run, *place[:2], each, "") for place, each in zip(places, found, strict=True)]
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
        """Return the content of one turn as plain text."""
        run, split, step, line = self._place(request)
        found = self._read(run, split, step, line)
        turn = request.path_params["turn"]
        text = next((each.text for each in (*found.turns, *found.branches) if each.index == turn), None)
        if text is None:
            raise HTTPException(404, "There is no such turn in this episode.")
        return PlainTextResponse(shown(text))

    def picture(self, request: Request) -> Response:
        """Return an image that occurs in a prompt."""
        run = run_of(self._library, request.path_params["key"])
        found = read_picture(run.path, request.path_params["file"])
        if found is None:
            raise HTTPException(404, "This run has no such image, or it is damaged or too large to be shown.")
        return Response(found.data, media_type=found.media)

    def _drawn(
        self, run: ViewedRun, split: str, step: int, episode: ShownEpisode, reader: str
    ) -> dict[str, Any]:
        trace = trace_of(run.path, split, step, episode.line)
        vocabulary = vocabulary_of(run.path, step, episode, trace)
        return {
            "episode": episode,
            "split": split,
            "step": step,
            "turns": conversation(
                episode, trace, vocabulary, reader, at(run.settings(), "environment", "form")
            ),
            "info": folded(episode.info),
            "data": folded(episode.data),
            "traced": bool(trace),
        }

    def _place(self, request: Request) -> tuple[ViewedRun, str, int, int]:
        given = request.path_params
        if given["split"] not in ("train", "test"):
            raise HTTPException(404, "The split must be `train` or `test`.")
        return run_of(self._library, given["key"]), given["split"], given["step"], given["line"]

    def _read(self, run: ViewedRun, split: str, step: int, line: int) -> ShownEpisode:
        found = read_episode(run.path, split, step, line)
        if found is None:
            raise HTTPException(404, MISSING)
        return found


def _counted(word: str) -> int:
    return int(word) if word.isdecimal() and len(word) < 10 else 0


def command_of(run: ViewedRun, query: Mapping[str, str]) -> str:
    """Return the command that collects the episodes selected by a query."""
    chosen = urlencode({name: value for name, value in query.items() if name in SELECTING})
    return shlex.join(
        ["kapelle", "collect", str(run.path), "--recorded", chosen, "--for", "sft", "--out", "picked.jsonl"]
    )


KINDS = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}

MOST_LISTED = 500
"""The maximum number of runs in the list. If there are more runs, all of them can still be searched by name."""
FOLLOWERS = Followers()


def viewer(library: Library, binding: Binding) -> Guard:
    """Return the web application that shows the runs of a library."""
    drawing, episodes = DrawnRuns(library), Browsing(library)
    at = "/run/{key}/episode/{split}/{step:int}/{line:int}"
    addresses: dict[str, Callable[[Request], Any]] = {
        "/": lambda request: _runs(library, request),
        "/compare": drawing.page,
        "/run/{key}": lambda request: _run(library, request),
        "/run/{key}/distributions.json": lambda request: json_answer(
            curves.distributions_page(run_of(library, request.path_params["key"]))
        ),
        "/advice": lambda _: html("advice.html", advice=ADVICE, young=YOUNG),
        "/run/{key}/team": lambda request: _team(library, request),
        "/run/{key}/settings": lambda request: _settings(library, request),
        "/run/{key}/episodes": episodes.table,
        at: episodes.episode,
        f"{at}/{{turn:int}}": episodes.whole,
        "/run/{key}/image/{file}": episodes.picture,
        "/run/{key}/blame": lambda request: _blame(library, request),
        "/run/{key}/blame/{file}/{number:int}": lambda request: _blamed(library, request),
        "/run/{key}/league": episodes.league,
        "/run/{key}/league.json": episodes.league_curves,
        "/run/{key}/together": episodes.together,
        "/curves.json": drawing.answer,
        NEWS: lambda request: _events(library, request),
        "/static/{name}": _static,
    }
    routes = [Route(path, answer, methods=["GET"]) for path, answer in addresses.items()]
    pages = Starlette(routes=routes, exception_handlers={HTTPException: error_page})

    def refused(refusal: RequestError, _scope: Scope) -> Response:
        return PlainTextResponse(f"{refusal.message}\n", refusal.status, refusal.headers)

    return Guard(pages, binding, refused, HEADERS, check_reading)


def _runs(library: Library, request: Request) -> Response:
    found, query = library.runs(), request.query_params.get("q", "")
    many = len(found) if len(found) > MOST_LISTED else 0
    if many:
        found = [run for run in found if query.lower() in run.key.lower()]
    rows = [listed(run) for run in found[:MOST_LISTED]]
    return html("runs.html", rows=rows, many=many, fits=len(found), query=query)


def _run(library: Library, request: Request) -> Response:
    run = run_of(library, request.path_params["key"])
    parts = {"warnings": warnings(run), "compared": compared(run), "ended": ended(run), "pace": pace(run)}
    return html("run.html", run=listed(run), **parts)


def _events(library: Library, request: Request) -> Response:
    runs = chosen(library, request)
    if FOLLOWERS.count >= MOST_FOLLOWERS:
        raise HTTPException(503, "Too many pages follow these runs. Close some of them.")
    news = FOLLOWERS.counted(follow(library, runs, request.query_params))
    return StreamingResponse(news, media_type="text/event-stream")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    kind = KINDS.get(name.rpartition(".")[2])
    file = files("kapelle.viewer").joinpath("static", name)
    if kind is None or "/" in name or "\\" in name or not file.is_file():
        raise HTTPException(404, "There is no such file here.")
    return Response(file.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})
