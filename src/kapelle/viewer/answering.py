"""What all answers of the viewer share: runs that a call names, pages, and words for what is not there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kapelle.viewer.library import Library, Run
from kapelle.viewer.pages import render

MOST_RUNS = 24
"""Runs that are drawn over one another at once."""


def chosen(library: Library, request: Request) -> list[Run]:
    """Return the runs that a query names; 404 for one that is not there."""
    keys = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_RUNS]
    return [one(library, key) for key in keys]


def one(library: Library, key: str) -> Run:
    """Return the run of a key; 404 where there is none."""
    run = library.run(key)
    if run is None:
        raise HTTPException(404, "There is no such run here.")
    return run


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a short name for each run: its folder's, or its whole key where two share one."""
    names = [run.path.name for run in runs]
    return [
        run.key.replace("~", "/") if names.count(name) > 1 else name
        for run, name in zip(runs, names, strict=True)
    ]


def numbers(value: Any) -> Response:
    """Return numbers as JSON."""
    return json_text(dumped(value))


def json_text(text: str) -> Response:
    """Return JSON that is made."""
    return Response(text, media_type="application/json")


def dumped(value: Any) -> str:
    """Return JSON that every reader takes: sums of what a damaged file holds may leave the range of numbers, and become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def html(template: str, **values: Any) -> Response:
    """Return a page."""
    return Response(render(template, **values), media_type="text/html")


async def said(_request: Request, error: Exception) -> Response:
    """Return the page that says what is wrong."""
    assert isinstance(error, HTTPException)
    page = render("wrong.html", status=error.status_code, message=error.detail)
    return Response(page, error.status_code, media_type="text/html")
