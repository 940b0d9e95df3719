"""The viewer's addresses and what answers them; every one of them only reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kapelle.services.binding import Binding
from kapelle.viewer import about_runs, curves
from kapelle.viewer.answering import chosen, html, labels, one, said
from kapelle.viewer.browsing import Browsing
from kapelle.viewer.following import follow
from kapelle.viewer.guarding import Guard
from kapelle.viewer.library import Library, Run
from kapelle.viewer.presenting import agents_of, alike, differing, listed, warnings

KINDS = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}


def viewer(library: Library, binding: Binding) -> Guard:
    """Return the application that shows these runs."""
    return Guard(Starlette(routes=routes(library), exception_handlers={HTTPException: said}), binding)


def routes(library: Library) -> list[Route]:
    """Return every address of the viewer."""

    def own(path: str, show: Callable[[Library, Request], Response]) -> Route:
        def answer(request: Request) -> Response:
            return show(library, request)

        return Route(path, answer, methods=["GET"])

    episodes, at = Browsing(library), "/run/{key}/episode/{split}/{step:int}/{line:int}"
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
        Route("/run/{key}/together", episodes.together, methods=["GET"]),
        own("/curves.json", _curves),
        own("/events", _events),
        Route("/static/{name}", _static, methods=["GET"]),
    ]


def _runs(library: Library, request: Request) -> Response:
    rows = [listed(run) for run in library.runs()]
    return html("runs.html", rows=rows, fragment="fragment" in request.query_params)


def _run(library: Library, request: Request) -> Response:
    run = one(library, request.path_params["key"])
    return html("run.html", run=listed(run), warnings=warnings(run))


def _compare(library: Library, request: Request) -> Response:
    runs = chosen(library, request)
    return html(
        "compare.html",
        runs=[listed(run) for run in runs],
        differences=differing(runs),
        all=[listed(run) for run in library.runs()],
    )


def _curves(library: Library, request: Request) -> Response:
    runs = chosen(library, request)
    names = labels(runs)
    sources = [curves.source_of(run, name) for run, name in zip(runs, names, strict=True)]
    if request.query_params.get("group") == "1":
        sources = curves.grouped(
            [(_group_name(run, runs), source) for run, source in zip(runs, sources, strict=True)]
        )
    agents = list(dict.fromkeys(agent for run in runs for agent in agents_of(run)))
    return JSONResponse(curves.page(sources, agents))


def _group_name(run: Run, runs: Sequence[Run]) -> str:
    """Return what a run's group is called; the first run's folder tells groups of one recipe and algorithm apart."""
    kinds = {alike(other): (listed(other), other) for other in reversed(runs)}
    row, first = kinds[alike(run)]
    names = [f"{each['recipe']}, {each['algorithm']}" for each, _ in kinds.values()]
    name = f"{row['recipe']}, {row['algorithm']}"
    return f"{name} ({first.path.name})" if names.count(name) > 1 else name


def _events(library: Library, request: Request) -> Response:
    runs = chosen(library, request)
    return StreamingResponse(follow(library, runs, request.query_params), media_type="text/event-stream")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    kind = KINDS.get(name.rpartition(".")[2])
    file = files("kapelle.viewer").joinpath("static", name)
    if kind is None or "/" in name or "\\" in name or not file.is_file():
        raise HTTPException(404, "There is no such file here.")
    return Response(file.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})
