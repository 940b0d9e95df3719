"""Addresses of what a run is: its team, its settings, its machine."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kapelle.viewer.answering import html, numbers, one
from kapelle.viewer.curves import system_page
from kapelle.viewer.library import Library
from kapelle.viewer.presenting import at, listed, settings_rows, stages
from kapelle.viewer.team_map import graph, newest_episodes, team_rows


def team(library: Library, request: Request) -> Response:
    """Return the page of a run's team."""
    run = one(library, request.path_params["key"])
    summary = listed(run)
    episodes = newest_episodes(run)
    rows = team_rows(run, episodes)
    return html(
        "team.html",
        run=summary,
        tab="team",
        team=rows,
        graph=graph([row["name"] for row in rows], episodes),
        sharing=at(run.settings(), "team", "sharing"),
        workflow=at(run.settings(), "workflow", "name"),
        stages=stages(run, library.runs()),
    )


def settings(library: Library, request: Request) -> Response:
    """Return the page of a run's settings: those that are not defaults, or all."""
    run = one(library, request.path_params["key"])
    query, every = request.query_params.get("q", ""), request.query_params.get("all") == "1"
    rows = [
        row
        for row in settings_rows(run)
        if (every or row["own"] or query) and query.lower() in f"{row['name']} {row['value']}".lower()
    ]
    return html("settings.html", run=listed(run), rows=rows, query=query, all=every)


def system(library: Library, request: Request) -> Response:
    """Return the page of a run's machine."""
    return html("system.html", run=listed(one(library, request.path_params["key"])))


def system_curves(library: Library, request: Request) -> Response:
    """Return what that page draws."""
    run = one(library, request.path_params["key"])
    return numbers(system_page(run, run.path.name))
