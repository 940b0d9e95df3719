"""An episode state whose module, where a run imports it, kills one of the run's processes at a moment of its training.

`KAPELLE_KILL` says it: moment, victim and a file that stands once it has been done.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from tests.support.plugins import Digest

STEP = 2
"""The step in which it happens."""
MOMENTS = ("rollout", "update", "publish", "save")
SIGNS = {
    "worker": "ray::RayPlayer",
    "scorer": "ray::RayScorer",
    "sampler": "ray::RaySampler",
    "host": "ray::RankHost",
    "rank": "kapelle.runtime.process_tree",
    "driver": "kapelle.cluster.launcher",
    "gcs": "gcs_server",
    "raylet": "raylet/raylet",
    "world": "kapelle.rollout.workers.server",
    "world host": "ray::StateHost",
}
"""Victim → what stands in its command line."""


class Killed(Digest):
    """The same world as `Digest`."""

    name: Literal["tests.support.kills:Killed"] = "tests.support.kills:Killed"  # type: ignore[assignment]


def processes(session: int) -> list[tuple[int, str]]:
    """Return the processes of a session: number, command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == session:
                found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")))
        except OSError:
            continue
    return sorted(found)


def marked(mark: str) -> list[tuple[int, str]]:
    """Return the processes that carry a mark in their environment: number, command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")))
        except OSError:
            continue
    return sorted(found)


def kill(victim: str) -> None:
    """Kill one process of this run; the last one of its kind where there are several."""
    if victim == "guard":
        os.kill(int(os.environ["KAPELLE_GUARD"]), signal.SIGKILL)
        return
    run = [*marked(os.environ["KAPELLE_TEST"]), *processes(os.getsid(0))]
    numbers = sorted({number for number, line in run if SIGNS[victim] in line})
    os.kill(numbers[-1], signal.SIGKILL)


def _armed(moment: str, victim: str, done: Path) -> None:
    from kapelle.cluster.actors import Actor
    from kapelle.cluster.ray_workers import RayWorkers
    from kapelle.training.loop import Loop
    from kapelle.training.progress import Progress

    places: dict[str, tuple[type, str]] = {
        "rollout": (Actor, "call"),
        "score": (Actor, "call"),
        "update": (Loop, "_learn"),
        "publish": (RayWorkers, "load"),
        "save": (Progress, "save"),
    }
    kind, name = places[moment]
    inner: Callable[..., Any] = getattr(kind, name)
    steps: list[int] = []
    step = Loop.step

    def counted(self: Loop, number: int) -> Any:
        steps.append(number)
        return step(self, number)

    def outer(*given: Any, **named: Any) -> Any:
        asks = {"rollout": "play", "score": "score"}.get(moment)
        answer = inner(*given, **named) if asks else None  # then its question is on its way
        here = asks is None or given[1] == asks
        if here and steps and steps[-1] >= STEP and not done.exists() and os.environ.get("RANK") == "0":
            done.touch()
            kill(victim)
        return answer if asks else inner(*given, **named)

    Loop.step = counted  # type: ignore[method-assign]
    setattr(kind, name, outer)


if "KAPELLE_KILL" in os.environ and "RANK" in os.environ:
    _moment, _victim, _done = os.environ["KAPELLE_KILL"].split(",")
    _armed(_moment, _victim, Path(_done))
