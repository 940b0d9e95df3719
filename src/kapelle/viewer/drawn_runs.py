"""The address of curves, which remembers its newest answers: of ten thousand steps one takes a tenth of a second to make."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from kapelle.viewer import curves
from kapelle.viewer.answering import chosen, dumped, json_text, labels
from kapelle.viewer.library import Library, Run
from kapelle.viewer.presenting import agents_of, alike, listed

KEPT = 4
"""Answers that are remembered; one has a megabyte for each long run."""


class DrawnRuns:
    """Answers with the curves of runs."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._answers: deque[tuple[list[curves.Source], list[list[str]], str]] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Response:
        """Return what a page of curves draws, as JSON."""
        runs = chosen(self._library, request)
        together = request.query_params.get("group") == "1"
        # Runs of a group are cut at the same steps.
        width = curves.width_of(max(map(curves.rows_of, runs), default=0)) if together else None
        sources = [curves.source_of(run, name, width) for run, name in zip(runs, labels(runs), strict=True)]
        groups = group_names(runs) if together else []
        agents = list(dict.fromkeys(agent for run in runs for agent in agents_of(run)))
        said = self._remembered(sources, [groups, agents])
        if said is None:
            drawn = curves.grouped(list(zip(groups, sources, strict=True))) if together else sources
            said = dumped(curves.page(drawn, agents))
            with self._lock:
                self._answers.append((sources, [groups, agents], said))
        return json_text(said)

    def _remembered(self, sources: Sequence[curves.Source], names: Sequence[Sequence[str]]) -> str | None:
        """Return the answer that was made of these very sources; None where there is none."""
        with self._lock:
            for known, called, said in self._answers:
                same = len(known) == len(sources) and all(a is b for a, b in zip(known, sources, strict=True))
                if same and called == names:
                    return said
        return None


def group_names(runs: Sequence[Run]) -> list[str]:
    """Return what each run's group is called; the first run's folder tells groups of one recipe and algorithm apart."""
    kinds = [alike(run) for run in runs]
    first = dict(reversed(list(zip(kinds, runs, strict=True))))
    names = {kind: "{recipe}, {algorithm}".format(**listed(run)) for kind, run in first.items()}
    shared = list(names.values())
    return [
        f"{names[kind]} ({first[kind].path.name})" if shared.count(names[kind]) > 1 else names[kind]
        for kind in kinds
    ]
