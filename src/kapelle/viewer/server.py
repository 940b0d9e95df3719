"""The viewer's addresses and what answers them; every one of them only reads."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kapelle.services.binding import Binding
from kapelle.viewer import about_runs
from kapelle.viewer.answering import chosen, html, one, said
from kapelle.viewer.browsing import Browsing
from kapelle.viewer.drawn_runs import DrawnRuns
from kapelle.viewer.following import MOST_FOLLOWERS, Followers, follow
from kapelle.viewer.guarding import NEWS, Guard
from kapelle.viewer.library import Library
from kapelle.viewer.presenting import compared, differing, listed, warnings
from kapelle.viewer.traffic import Traffic

KINDS = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}

MOST_LISTED = 500
"""Runs of the list; where there are more it can be asked for names."""
FOLLOWERS = Followers()


def viewer(library: Library, binding: Binding) -> Guard:
    """Return the application that shows these runs."""
    traffic = Traffic()
    pages = Starlette(routes=routes(library, traffic), exception_handlers={HTTPException: said})
    return Guard(pages, binding, traffic)


def routes(library: Library, traffic: Traffic) -> list[Route]:
    """Return every address of the viewer."""

    def own(path: str, show: Callable[[Library, Request], Response]) -> Route:
        def answer(request: Request) -> Response:
            return show(library, request)

        return Route(path, answer, methods=["GET"])

    drawing = DrawnRuns(library)
    episodes, at = Browsing(library, traffic), "/run/{key}/episode/{split}/{step:int}/{line:int}"
    return [
        own("/", _runs),
        own("/compare", _compare),
        own("/run/{key}", _run),
        own("/run/{key}/team", about_runs.team),
        own("/run/{key}/settings", about_runs.settings),
        own("/run/{key}/system", about_runs.system),
        own("/run/{key}/system.json", about_runs.system_curves),
        Route("/run/{key}/episodes", episodes.table, methods=["GET"]),
        Route(at, episodes.episode, methods=["GET"]),
        Route(f"{at}/{{turn:int}}", episodes.whole, methods=["GET"]),
        Route("/run/{key}/league", episodes.league, methods=["GET"]),
        Route("/run/{key}/league.json", episodes.league_curves, methods=["GET"]),
        Route("/run/{key}/together", episodes.together, methods=["GET"]),
        Route("/curves.json", drawing.answer, methods=["GET"]),
        own(NEWS, _events),
        Route("/static/{name}", _static, methods=["GET"]),
    ]


def _runs(library: Library, request: Request) -> Response:
    found, query = library.runs(), request.query_params.get("q", "")
    many = len(found) if len(found) > MOST_LISTED else 0
    if many:
        found = [run for run in found if query.lower() in run.key.lower()]
    rows = [listed(run) for run in found[:MOST_LISTED]]
    return html("runs.html", rows=rows, many=many, fits=len(found), query=query)


def _run(library: Library, request: Request) -> Response:
    run = one(library, request.path_params["key"])
    return html("run.html", run=listed(run), warnings=warnings(run), compared=compared(run))


def _compare(library: Library, request: Request) -> Response:
    runs = chosen(library, request)
    return html(
        "compare.html",
        runs=[listed(run) for run in runs],
        differences=differing(runs),
    )


def _events(library: Library, request: Request) -> Response:
    runs = chosen(library, request)
    if FOLLOWERS.count >= MOST_FOLLOWERS:
        raise HTTPException(503, "Too many pages are being told news. Close some.")
    news = FOLLOWERS.counted(follow(library, runs, request.query_params))
    return StreamingResponse(news, media_type="text/event-stream")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    kind = KINDS.get(name.rpartition(".")[2])
    file = files("kapelle.viewer").joinpath("static", name)
    if kind is None or "/" in name or "\\" in name or not file.is_file():
        raise HTTPException(404, "There is no such file here.")
    return Response(file.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})
