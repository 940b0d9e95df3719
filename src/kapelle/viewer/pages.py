"""Renders pages from templates in which every value is escaped, and provides functions for all responses of the viewer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kapelle import __version__
from kapelle.viewer.library import Library, ViewedRun

# -------- Text of unknown origin: control and hidden characters become visible

LONGEST = 20_000
"""The maximum number of characters of one text on a page. A link leads to the complete text."""
_RISKY = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)


def shown(text: object) -> str:
    """Return a string in which control characters, direction overrides and lone surrogates are replaced by visible symbols.

    For example, a terminal escape code becomes `␛[31m`, and a right-to-left override becomes `⟨U+202E⟩`. HTML is not
    escaped by this function but by the templates.
    """

    def sign(found: re.Match[str]) -> str:
        code = ord(found[0])
        return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"

    return _RISKY.sub(sign, str(text).replace("\r\n", "\n"))


def cut(text: str, most: int = LONGEST) -> str:
    """Return the beginning of a string, followed by the number of omitted characters."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} more characters"


def one_line(text: object, most: int = 160) -> str:
    """Return a string as one short line."""
    whole = " ".join(shown(str(text)[: most * 4]).split())
    return whole if len(whole) <= most else f"{whole[: most - 1]}…"


@cache
def environment() -> Environment:
    """Return the environment that renders the templates."""
    made = Environment(
        loader=PackageLoader("kapelle.viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "shown": lambda text: cut(shown(text)),
        "line": one_line,
        "figure": figure,
        "percent": percent,
        "signed": signed,
        "coded": coded,
        "path": lambda text: quote(str(text), safe="~"),
        "spark": spark,
    }
    made.globals |= {"version": __version__}
    return made


def render(template: str, **values: Any) -> bytes:
    """Render a page as UTF-8. Lone surrogates in names become question marks."""
    return environment().get_template(template).render(**values).encode("utf-8", "replace")


def coded(text: str) -> Markup:
    """Return a text of this package as HTML, in which parts between backquotes are formatted as code."""
    parts = text.split("`")
    marked = (Markup("<code>") + part + Markup("</code>") if k % 2 else part for k, part in enumerate(parts))
    return Markup("").join(marked)  # joining escapes the parts that are not `Markup`


def figure(value: object) -> str:
    """Format a number with at most four digits. None is formatted as a dash."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else one_line(value, 40)
    if value != value or abs(value) == float("inf"):  # noqa: PLR0124 - a damaged file may contain NaN
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def percent(value: object) -> str:
    """Format a share as a percentage. None is formatted as a dash."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "–"


def signed(value: float) -> str:
    """Format a number with its sign and three decimals. A number that rounds to 0 has no sign."""
    text = f"{value:+.3f}"
    return "0.000" if text[1:] == "0.000" else text.replace("-", "−")


SPARK = (96, 22)
"""The width and height of a small curve in a list, in CSS pixels."""


def spark(values: Sequence[float]) -> str:
    """Return the points of a small curve for an SVG polyline."""
    step = max(1, len(values) // SPARK[0])
    few = list(values[::step])
    if len(few) < 2:
        return ""
    low, high = min(few), max(few)
    width, height = SPARK[0] - 2, SPARK[1] - 4
    spread = (high - low) or 1.0
    return " ".join(
        f"{1 + k * width / (len(few) - 1):.1f},{2 + height - (v - low) / spread * height:.1f}"
        for k, v in enumerate(few)
    )


# -------- Runs in a request, pages and JSON

MOST_RUNS = 500
"""The maximum number of runs that one page compares."""


def chosen(library: Library, request: Request) -> list[ViewedRun]:
    """Return the runs that a query specifies. Raises an HTTP 404 error for an unknown run."""
    keys = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_RUNS]
    return [run_of(library, key) for key in keys]


def run_of(library: Library, key: str) -> ViewedRun:
    """Return the run with the given key. Raises an HTTP 404 error for an unknown key."""
    run = library.run(key)
    if run is None:
        raise HTTPException(404, "There is no such run here.")
    return run


def labels(runs: Sequence[ViewedRun]) -> list[str]:
    """Return a short name for each run, which is the name of its folder, or its key if several runs have the same folder name."""
    names = [run.path.name for run in runs]
    return [
        run.key.replace("~", "/") if names.count(name) > 1 else name
        for run, name in zip(runs, names, strict=True)
    ]


def json_answer(value: Any) -> Response:
    """Return a response that contains a value as JSON."""
    return Response(dumped(value), media_type="application/json")


def dumped(value: Any) -> str:
    """Return a value as standard JSON. Infinite numbers and NaN, which may occur in damaged files, become null."""
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
    """Return a response that contains a rendered page."""
    return Response(render(template, **values), media_type="text/html")


async def error_page(_request: Request, error: Exception) -> Response:
    """Return the page that describes an error."""
    assert isinstance(error, HTTPException)
    page = render("wrong.html", status=error.status_code, message=error.detail)
    return Response(page, error.status_code, media_type="text/html")
