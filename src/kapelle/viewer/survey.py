"""Which steps of a run are recorded, and which of them an index has."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kapelle.viewer.episode_lines import Place, Stamp, changes, stamps

LOOK_AGAIN = 1.0
"""Seconds for which the list of a run's steps is taken as it was."""
LOOK_ANYWAY = 15.0
"""Seconds after which each file is looked at, even where no folder changed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How many steps an index has, of those that there are."""

    rows: int
    there: int
    sorted: bool = True
    """Whether orders and conditions know all of them."""
    trouble: str = ""
    """Why it is not going on, in words; empty where it is."""

    @property
    def whole(self) -> bool:
        """Whether every step is in the index."""
        return self.rows == self.there

    @property
    def ready(self) -> bool:
        """Whether nothing is left to do."""
        return self.whole and self.sorted


class Survey:
    """The steps of one run beside those of its index; calls may come from several threads."""

    def __init__(self, run: Path, known: Mapping[Place, Stamp]) -> None:
        self.run = run
        self._state = threading.Lock()
        self._known = dict(known)
        self._there: Mapping[Place, Stamp] = {}
        self._missing: list[Place] = []
        """Newest last."""
        self._bytes = self._rows = 0
        self._gone: list[Place] = []
        self._looked = self._listed = float("-inf")
        self._folders: object = None

    def look(self, *, again: bool = False) -> None:
        """List the run's steps, unless that was done just now."""
        now = time.monotonic()
        if not again and now - self._looked < LOOK_AGAIN:
            return
        self._looked = now
        folders = changes(self.run)
        if not again and folders == self._folders and now - self._listed < LOOK_ANYWAY:
            return
        self._folders, self._listed = folders, now
        there = stamps(self.run)
        with self._state:
            self._there = there
            self._compare()

    def relearn(self, known: Mapping[Place, Stamp]) -> None:
        """Take over what the index has now, which another process writes."""
        with self._state:
            self._known = dict(known)
            self._compare()

    def learn(self, written: Mapping[Place, Stamp]) -> None:
        """Note what was written into the index."""
        with self._state:
            self._known |= written
            self._rows += sum(self._there.get(place) == stamp for place, stamp in written.items())

    def forget(self, places: Iterable[Place]) -> None:
        """Note what was taken out of the index."""
        with self._state:
            for place in places:
                self._known.pop(place, None)
            self._gone = [place for place in self._gone if place in self._known]

    def take(self) -> tuple[Place, Stamp] | None:
        """Return the newest step that the index lacks, once; None where it lacks none."""
        with self._state:
            if not self._missing:
                return None
            place = self._missing.pop()
            self._bytes -= self._there[place][0]
            return place, self._there[place]

    @property
    def gone(self) -> Sequence[Place]:
        """Steps that the index has and the run has no more."""
        return self._gone

    @property
    def lacking(self) -> bool:
        """Whether the index is not as the run is."""
        return bool(self._gone or self._missing)

    @property
    def left(self) -> tuple[int, int]:
        """How many steps the index lacks, and their bytes as they are stored."""
        with self._state:
            return len(self._missing), self._bytes

    @property
    def there(self) -> Mapping[Place, Stamp]:
        """The steps that are recorded, as they were when last looked at."""
        return self._there

    def progress(self, ordered: bool, trouble: str = "") -> Progress:
        """Return how far the index is."""
        with self._state:
            return Progress(self._rows, len(self._there), ordered, trouble)

    def _compare(self) -> None:
        self._gone = [place for place in self._known if place not in self._there]
        self._missing = sorted(
            (place for place, stamp in self._there.items() if self._known.get(place) != stamp),
            key=lambda place: place[1],
        )
        self._rows = len(self._there) - len(self._missing)
        self._bytes = sum(self._there[place][0] for place in self._missing)
