"""What may not be opened as a run directory, and what differs between two configs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kapelle.errors import RunDirectoryError
from kapelle.runs.reader import is_run, read_config
from kapelle.runs.tables import TABLES


def changed_lines(old: str, new: str) -> list[str]:
    """Return what differs between two config texts, line by line, in words."""
    before, after = old.splitlines(), new.splitlines()
    gone = [f"no longer '{line.strip()}'" for line in before if line not in after]
    return gone + [f"now '{line.strip()}'" for line in after if line not in before]


def refuse_run_without_config(path: Path) -> None:
    """Raise RunDirectoryError for a run that has lost its config: a new one would be mixed with what is left of it."""
    if is_run(path):
        return
    tables = [path / table for table in TABLES if (path / table).is_file() and (path / table).stat().st_size]
    left = [*tables, *path.glob("checkpoints/[0-9]*"), *path.glob("episodes/*/[0-9]*")]
    if left:
        missing = "neither lock nor metrics.jsonl" if (path / "config.yaml").is_file() else "no config.yaml"
        raise RunDirectoryError(
            f"{path} holds what a run has left ('{left[0].relative_to(path)}') and {missing}. Put that back from a copy, or "
            "name another --run-dir."
        )


def refuse_other_run(
    path: Path, config: str, differences: Callable[[str, str], Sequence[str]], *, resume: bool
) -> None:
    """Raise RunDirectoryError for a run that is there without `resume`, or whose config differs in what may not."""
    if not resume:
        raise RunDirectoryError(
            f"{path} already holds a run. Continue it with --resume, or choose another --run-dir (in Python: `resume=True`, or another `run_dir`)."
        )
    changed = differences(read_config(path), config)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise RunDirectoryError(
            f"The run at {path} has another config: {changed[0]}{more}. "
            f"Resume it with {path / 'config.yaml'}, or choose another --run-dir."
        )
