"""What the documentation says of causes, for a reader of a verdict who has only the viewer: its tables, row by row.

`tests/viewer/test_guides.py` holds them to the documentation's.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from kapelle.runs.verdict import FLAT_PAGE, LEARN_PAGE


@dataclass(frozen=True, slots=True)
class Symptom:
    """What one may see in a run, what usually causes it, and what to do (empty where the cause says it)."""

    seen: str
    cause: str
    remedy: str = ""


TITLES = {
    "flat-reward": "My reward is flat",
    "no-learning": "Find out why your team does not learn",
}
"""The parts of the page of advice below the verdicts."""
PAGES = {FLAT_PAGE: "flat-reward", LEARN_PAGE: "no-learning"}
"""The part of the page of advice that has a documentation page's table."""
FOUND: dict[str, tuple[Symptom, ...]] = {
    part: tuple(Symptom(**row) for row in rows)
    for part, rows in tomllib.loads((files("kapelle.viewer") / "guides.toml").read_text("utf-8")).items()
}
"""The rows of each part."""
