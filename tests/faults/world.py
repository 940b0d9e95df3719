"""What all trials share: the recipes, their undisturbed ends, and how a run is started and continued with."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.faults.data import write_data
from tests.faults.forks import Ended, command, fork
from tests.faults.judging import Remains, Verdict, differing, last_line, remains
from tests.faults.recipes import SANDBOXED, Kind, write_recipes


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing that is tried."""

    name: str
    run: Callable[[], Verdict | list[tuple[str, Verdict]]]
    """Returns what it came to; what tries several things returns each with its name."""


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A kind of run that nothing happened to."""

    remains: Remains
    seconds: float
    """Of the processor."""
    repeats: bool
    """Whether a second run came to the same end: one that does not cannot be compared."""
    detail: str = ""


@dataclass(slots=True)
class World:
    """A folder of its own with everything that trials start from."""

    folder: Path
    kinds: dict[str, Kind] = field(default_factory=dict)
    undisturbed: dict[str, Undisturbed] = field(default_factory=dict)

    @property
    def scratch(self) -> Path:
        """Folder of what trials write."""
        return self.folder / "scratch"

    @property
    def ended(self) -> Path:
        """Folder of the undisturbed runs, by kind."""
        return self.folder / "ended"

    def furnish(self) -> None:
        """Write data and recipes; the cache of warmed-up models lies here too."""
        for folder in (self.scratch, self.ended):
            folder.mkdir(parents=True)
        os.environ["KAPELLE_CACHE"] = str(self.folder / "cache")
        write_data(self.folder / "data")
        kinds = write_recipes(self.folder / "recipes", self.folder / "data", self.ended)
        sandboxed = _has_sandbox()
        self.kinds = {kind.name: kind for kind in kinds if sandboxed or kind.name not in SANDBOXED}

    def take(self) -> None:
        """Read the undisturbed ends that `undisturbed_trials` left."""
        for name in self.kinds:
            file = self.ended / f"{name}.json"
            if file.is_file():
                self.undisturbed[name] = Undisturbed(**json.loads(file.read_bytes()))

    def play_undisturbed(self, name: str) -> Undisturbed:
        """Run a kind twice, keep the first as the one that others are compared with, and return how it went."""
        first, second = self.ended / name, self.scratch / f"{name}-again"
        log = self.scratch / f"{name}.log"
        ended = go_on(self, name, first, log)
        if ended.code != 0:
            return Undisturbed({}, ended.seconds, repeats=False, detail=last_line(ended.said))
        again = go_on(self, name, second, log)
        expected = remains(first)
        other = differing(remains(second), expected) if again.code == 0 else [last_line(again.said)]
        shutil.rmtree(second, ignore_errors=True)
        # The second took the warmed-up model from the cache, as every killed run will.
        found = Undisturbed(expected, again.seconds, repeats=not other, detail=", ".join(other[:4]))
        (self.ended / f"{name}.json").write_text(json.dumps(asdict(found)), "utf-8")
        return found


def go_on(
    world: World,
    kind: str,
    run: Path,
    log: Path,
    *,
    kill_after: float | None = None,
    within: Callable[[Callable[[], int]], Callable[[], int]] = lambda call: call,
) -> Ended:
    """Train, or resume what is there, as someone would who looks into the folder.

    `within` wraps what the process does, to have something happen to it.
    """
    begun = (run / "config.yaml").is_file() or (run / "stages.yaml").is_file()
    words: Mapping[bool, tuple[str | Path, ...]] = {
        True: ("train", "--resume", run),
        False: ("train", world.kinds[kind].recipe, "--run-dir", run),
    }
    call = seeded(run, command(*words[begun], "--no-rich"))
    return fork(within(call), log, kill_after=kill_after)


def seeded(run: Path, call: Callable[[], int]) -> Callable[[], int]:
    """Return a call with generators of its process that only a checkpoint can make those of the undisturbed run.

    A run that begins finds those that the undisturbed run began with; one that continues finds other ones.
    """

    seed = int(
        any(run.glob("**/checkpoints/[0-9]*"))
    )  # looked up here: what breaks in the fork is the library's

    def begin() -> int:
        import numpy as np
        import torch

        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return call()

    return begin


def _has_sandbox() -> bool:
    from kapelle.environments.sandbox.bubblewrap import Bubblewrap

    return all(layer.present for layer in Bubblewrap().layers() if layer.required)
