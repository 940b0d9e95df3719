"""The table of all kinds of faults: what was tried and what it came to, as the page in the documentation shows it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.judging import DEFECTS, Outcome, Verdict

_COLUMNS = tuple(Outcome)


@dataclass(slots=True)
class Row:
    """One kind of fault."""

    name: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COLUMNS, 0))
    kills: int = 0
    skipped: str = ""
    """Why nothing, or not everything, was tried."""
    defects: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Trials that ended in some way."""
        return sum(self.counts.values())

    def add(self, trial: str, verdict: Verdict) -> None:
        """Count a trial."""
        self.counts[verdict.outcome] += 1
        self.kills += verdict.kills
        if verdict.outcome in DEFECTS:
            self.defects.append(f"{verdict.outcome}: {trial}: {verdict.detail}")


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Return the table in Markdown."""
    head = ["fault", "tried", *_COLUMNS]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for row in rows:
        name = f"{row.name} ({row.kills} kills)" if row.kills else row.name
        counts = [str(row.counts[column]) for column in _COLUMNS]
        lines.append("| " + " | ".join([name, str(row.tried), *counts]) + " |")
    return lines


def machine() -> str:
    """Return in words what the trials ran on."""
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    return f"{os.cpu_count()} cores of {platform.machine()}, {system}, Python {platform.python_version()}"


def write_page(page: Path, rows: Sequence[Row], seed: int) -> None:
    """Put the table in the place of the one that stands between two marks on a page."""
    before, _, rest = page.read_text("utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    left_out = [f"- {row.name}: {row.skipped}" for row in rows if row.skipped]
    said = [f"Seed {seed}, on {machine()}.", "", *lines_of(rows), ""]
    if left_out:
        said += ["Not tried:", "", *left_out, ""]
    page.write_text(before + _BEGIN + "\n\n" + "\n".join(said) + "\n" + _END + after, "utf-8")


_BEGIN = "<!-- table: written by `make test-faults` -->"
_END = "<!-- end of the table -->"
