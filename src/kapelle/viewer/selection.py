"""Selects the episodes of a run that match a query, for the episodes page and for `kapelle collect --recorded`.

A query is the part of the page's URL after `?`. The conditions are `split`, `from` and `to` (steps), `outcome`,
`agent`, `task`, `q` (words), `least` and `most` (reward, of `agent` if given), `short` and `long` (tokens), `finish`,
`tag`, and `re`. The condition `re` is a regular expression for the question, the turns and the answer, or only for the
turns of `agent` if `agent` is given.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl

from kapelle.errors import ConfigError, did_you_mean
from kapelle.types import Split
from kapelle.viewer.index import FILTERS, OUTCOMES, Index
from kapelle.viewer.library import Library


def check_query(run: Path, text: str) -> None:
    """Raise ConfigError for an unknown condition or value in a query, which `Index.rows` would ignore."""
    known = Library([run]).runs()
    values = {
        "outcome": OUTCOMES,
        "split": ("train", "test"),
        "agent": tuple(known[0].agents()) if known else (),
    }
    for name, value in parse_qsl(text.removeprefix("?"), keep_blank_values=True):
        # The order and the page do not change the selection.
        if name not in (*FILTERS, "split", "from", "to", "sort", "page", "skip"):
            raise ConfigError(
                f"--recorded has no filter '{name}'.{did_you_mean(name, (*FILTERS, 'split', 'from', 'to'))}"
            )
        if value and name in values and value not in values[name]:
            raise ConfigError(f"--recorded: `{name}` cannot be '{value}'.{did_you_mean(value, values[name])}")


def selected(run: Path, text: str) -> tuple[list[tuple[Split, int, int]], str]:
    """Return the split, step and line of every selected episode, oldest first, and the reason if the regular expression failed."""
    query = dict(parse_qsl(text.removeprefix("?"), keep_blank_values=False))
    known = Library([run]).runs()
    index = Index(run, known[0].agents() if known else [])
    index.finish(query)
    expression = index.expression(query)
    if expression is not None and expression.trouble:
        return [], expression.trouble
    rows = index.rows(query, "oldest")
    return [("test" if row.split == "test" else "train", row.step, row.line) for row in rows], ""
