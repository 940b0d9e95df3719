"""Creates a page of runs that works without a server, with curves, teams, settings and a few episodes in a single file."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from markupsafe import Markup
from starlette.datastructures import QueryParams

from kapelle.errors import RunDirectoryError
from kapelle.viewer import curves
from kapelle.viewer.comparing import ComparisonQuery, drawn
from kapelle.viewer.episode import (
    COLUMNS,
    conversation,
    folded,
    step_episodes,
    trace_of,
    traced,
    vocabulary_of,
)
from kapelle.viewer.library import Library, ViewedRun
from kapelle.viewer.pages import dumped, render
from kapelle.viewer.presenting import (
    at,
    differing,
    listed,
    newest_episodes,
    settings_rows,
    team_rows,
    warnings,
)

SCRIPTS = ("uplot.js", "saving.js", "charts.js", "episode.js")
STYLES = ("uplot.css", "viewer.css")
MOST_RUNS = 24
"""The maximum number of runs on the page. The most recently changed runs are shown."""
EPISODES = 4
"""The number of episodes of each run on the page."""


def exported(library: Library) -> bytes:
    """Return the page. Raises RunDirectoryError if there is no run."""
    runs = library.runs()[:MOST_RUNS]
    if not runs:
        raise RunDirectoryError(f"There is no run under {library.roots[0]}. Give a run directory.")
    sources = drawn(runs, ComparisonQuery.of(QueryParams(), runs))
    agents = list(dict.fromkeys(agent for run in runs for agent in run.agents()))
    # A `<` could end the JSON block.
    content = dumped(curves.page(sources, agents)).replace("<", "\\u003c")
    scripts, styles = [_file(name) for name in SCRIPTS], [_file(name) for name in STYLES]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "base-uri 'none'; form-action 'none'"
    )
    return render(
        "export.html",
        policy=policy,
        scripts=[Markup(text) for text in scripts],  # noqa: S704 - the package's own files
        styles=[Markup(text) for text in styles],  # noqa: S704
        curves=Markup(content),  # noqa: S704 - JSON without `<`
        runs=[_run(run) for run in runs],
        differences=differing(runs),
        color_names=COLUMNS,
        color="logprob",
    )


def _run(run: ViewedRun) -> dict[str, Any]:
    step = int(run.metrics.axes["step"][-1]) if len(run.metrics) else 0
    rows = step_episodes(run.path, "train", step)
    kept = traced(run.path, step)
    chosen = sorted(rows, key=lambda each: (each.line not in kept, each.line))[:EPISODES]
    episodes = []
    for each in chosen:
        trace = trace_of(run.path, "train", step, each.line)
        form = at(run.settings(), "environment", "form")
        turns = conversation(each, trace, vocabulary_of(run.path, step, each, trace), "", form)
        episodes.append({"episode": each, "step": step, "turns": turns, "info": folded(each.info)})
    return {
        "run": listed(run),
        "warnings": warnings(run),
        "team": team_rows(run, newest_episodes(run)),
        "settings": [row for row in settings_rows(run) if row["own"]],
        "episodes": episodes,
    }


def _file(name: str) -> str:
    text = files("kapelle.viewer").joinpath("static", name).read_text("utf-8")
    assert "</script" not in text, "it would end the block that contains it"
    assert "</style" not in text
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
