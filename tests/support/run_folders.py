"""A run directory that is written by hand: what tests of writing and of its faults build on."""

from __future__ import annotations

from pathlib import Path

from kapelle.runs.writer import RunDirectory
from kapelle.types import Episode, Group, Task

CONFIG = "algorithm:\n  lr: 0.001\nsteps: 50\n"


def open_run(path: Path, *, resume: bool = False, config: str = CONFIG) -> RunDirectory:
    return RunDirectory.create(path, config=config, provenance={"steps": "default"}, resume=resume)


def group(name: str, *seeds: int) -> Group:
    task = Task(name, "12+30")
    return Group(task, tuple(Episode(task, seed, ("actor",)) for seed in seeds))


def files(run: Path) -> dict[str, bytes]:
    """The content of every file but those that say who runs and when."""
    live = {"lock", "status.json", "run.log"}
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name not in live
    }
