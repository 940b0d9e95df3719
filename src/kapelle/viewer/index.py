"""An index of a run's episodes, so that a million of them can be sorted, filtered and searched.

It is a cache: SQLite in the user's cache folder, made from the run's files and made again where it is missing or old, in
memory where nothing can be written. A run is never written to. A little is indexed by a thread at once, much by a process
of its own, newest steps first; no page waits for that.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from kapelle.viewer.building import DAMAGED, FAILED, build, is_damage, only_builder
from kapelle.viewer.index_tables import FORM, Progress, Survey, Tables, row_of
from kapelle.viewer.lines import Place, Stamp, group_of, lines_of
from kapelle.viewer.skimming import skimmed, spreads

# -------- The first pages of the table of episodes, read from the steps' own files: what is shown while an index is made

PATIENCE = 0.15
"""Seconds for which steps are counted to find where a page begins; a later page waits for the index."""


def rows_in_order(
    run: Path,
    there: Mapping[Place, Stamp],
    query: Mapping[str, str],
    agents: Sequence[str],
    start: int,
    count: int,
) -> list[dict[str, Any]] | None:
    """Return rows as the index would, newest or oldest steps first; None for a query that needs the index."""
    sort = query.get("sort") or "newest"
    if sort not in ("newest", "oldest") or any(query.get(name) for name in ("q", "outcome", "task", "agent")):
        return None
    split = "test" if query.get("split") == "test" else "train"
    steps = sorted(step for own, step in there if own == split and _within(step, query))
    end = time.monotonic() + PATIENCE
    rows: list[dict[str, Any]] = []
    for step in reversed(steps) if sort == "newest" else steps:
        if len(rows) >= count:
            break
        lines = lines_of(run, split, step)
        if len(lines) <= start:
            start -= len(lines)
            if time.monotonic() > end:
                return None
            continue
        rows += _rows(lines, (split, step), agents, start, count - len(rows))
        start = 0
    return rows


def _within(step: int, query: Mapping[str, str]) -> bool:
    first, last = query.get("from", ""), query.get("to", "")
    after = step >= int(first) if first.isdecimal() and len(first) < 12 else True
    return after and (step <= int(last) if last.isdecimal() and len(last) < 12 else True)


def _rows(
    lines: Sequence[bytes], place: Place, agents: Sequence[str], start: int, count: int
) -> list[dict[str, Any]]:
    """Return rows of one step; besides theirs, only lines of the same groups are read."""
    wanted = range(start, min(start + count, len(lines)))
    groups = {group_of(lines[line]) for line in wanted}
    read = [
        skimmed(raw, line)
        for line, raw in enumerate(lines)
        if line in wanted or None in groups or group_of(raw) in groups
    ]
    found = [each for each in read if each is not None]
    widest = spreads(found)
    return [row_of(place, each, widest[each.group], agents) for each in found if each.line in wanted]


# -------- Whether somebody waits for a page: what works in the background lets them go first


class Traffic:
    """Counts the calls that are being answered; those that stay open to be told news do not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def busy(self) -> bool:
        """Whether a page is being made."""
        return self._calls > 0

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a call while it is being answered."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not count a call while it waits for what works in the background."""
        with self._lock:
            self._calls -= 1
        try:
            yield
        finally:
            with self._lock:
                self._calls += 1


AT_ONCE = 1_000_000
"""Bytes of episodes, as they are stored, that a page waits for; with more to index it goes on without them."""
STEPS_AT_ONCE = 100
"""Steps that it waits for at most: compressed ones have few bytes."""
WAIT = 0.5
"""Seconds that it waits for them at most."""
YIELD = 0.5
"""Seconds for which a thread waits at most, before each step, until no page is being answered."""
LEARN_AGAIN = 2.0
"""Seconds for which what another process writes is taken as it was."""
TRY_AGAIN = 10.0
"""Seconds after which a builder that ended too early is started again."""

Answer = TypeVar("Answer")


def cache_folder() -> Path:
    """Return where indexes are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kapelle" / "viewer"


class Index:
    """The episodes of one run, as far as they are indexed."""

    def __init__(
        self, run: Path, agents: Sequence[str], folder: Path | None = None, traffic: Traffic | None = None
    ) -> None:
        """Open the run's index in a folder (the user's cache), or make one; calls of `traffic` go first."""
        self.run = run
        self._traffic = traffic or Traffic()
        name = hashlib.sha256(f"{FORM} {run.resolve()} {list(agents)}".encode("utf-8", "replace"))
        self._file = (folder or cache_folder()) / f"{name.hexdigest()[:32]}.sqlite"
        self._state, self._renewing = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._started = self._learnt = float("-inf")
        self._trouble, self._damaged = "", False
        self._closed = False
        self._open(agents)

    def _open(self, agents: Sequence[str]) -> None:
        self.tables = _opened(self._file, agents)
        self.agents = self.tables.agents
        self._survey = Survey(self.run, self.tables.known())

    def refresh(self) -> Progress:
        """Start to index what is new; return how far it is. Waits for a little, for a lot not at all."""
        if self._damaged:
            self._renew(self.tables)
        self._survey.look()
        steps, size = self._survey.left
        few = size <= AT_ONCE and steps <= STEPS_AT_ONCE
        with self._state:
            if not self._closed and not self._working() and self._to_do():
                if few or self.tables.file is None:
                    self._work_here()
                elif time.monotonic() - self._started > TRY_AGAIN:
                    self._work_beside()
            thread = self._thread
            self._learn()
        if thread is not None and few:
            with self._traffic.waiting():
                thread.join(WAIT)
        return self._survey.progress(self.tables.sorted, self._trouble)

    def finish(self) -> Progress:
        """Index everything now, in this thread; waits for whoever else does it."""
        with only_builder(self.tables.file, -1):
            self._survey.relearn(self.tables.known())
            self._survey.look(again=True)
            build(self._survey, self.tables, lambda: True, lambda: None)
        return self._survey.progress(self.tables.sorted)

    def there(self) -> Mapping[Place, Stamp]:
        """Return the steps that have episodes, as they were when last looked at."""
        return self._survey.there

    def ask(self, question: Callable[[Tables], Answer]) -> Answer:
        """Return what the tables answer; where they turn out to be damaged, new ones are asked."""
        tables = self.tables
        try:
            return question(tables)
        except sqlite3.Error as error:
            if tables is self.tables and not is_damage(error):
                raise
            self._renew(tables)
            return question(self.tables)

    def _renew(self, tables: Tables) -> None:
        """Begin with an empty file instead of these tables."""
        with self._renewing:
            if tables is not self.tables:
                return
            self.close()
            _remove(self._file)
            self._started = float("-inf")
            self._damaged = self._closed = False
            self._open(self.agents)

    def close(self) -> None:
        """Stop indexing and close the file."""
        self._closed = True
        if self._thread is not None:
            self._thread.join()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._thread = self._process = None
        self.tables.close()

    def _to_do(self) -> bool:
        return self._survey.lacking or not self.tables.sorted

    def _working(self) -> bool:
        """Return whether somebody builds; the state is locked."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._process is not None and self._process.poll() is not None:
            said, _ = self._process.communicate()
            self._trouble = said.strip() if self._process.returncode == FAILED else ""
            self._damaged = self._process.returncode == DAMAGED
            self._process = None
            self._learnt = float("-inf")
        return self._thread is not None or self._process is not None

    def _work_here(self) -> None:
        self._thread = threading.Thread(target=self._build, name="kapelle-index", daemon=True)
        self._thread.start()

    def _work_beside(self) -> None:
        self._started = time.monotonic()
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", "kapelle.viewer.building", str(self._file), str(self.run), json.dumps(self.agents)],
            stdin=subprocess.PIPE,  # it ends with this, and this with the viewer
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C in the terminal is the viewer's to act on
        )  # fmt: skip

    def _learn(self) -> None:
        """Take over what another process, this viewer's or another's, has written; the state is locked."""
        now = time.monotonic()
        if self._thread is None and self._to_do() and now - self._learnt > LEARN_AGAIN:
            self._learnt = now
            with suppress(sqlite3.OperationalError):
                self._survey.relearn(self.tables.known())

    def _build(self) -> None:
        try:
            with only_builder(self.tables.file) as alone:
                if alone:
                    build(self._survey, self.tables, lambda: not self._closed, self._give_way)
                    self._trouble = ""
        except (sqlite3.Error, OSError) as error:  # no room, say: tried again later
            self._trouble, self._damaged = str(error), is_damage(error)
            self._survey.relearn({})  # what was taken is missing still

    def _give_way(self) -> None:
        end = time.monotonic() + YIELD
        while self._traffic.busy and time.monotonic() < end:
            time.sleep(0.005)


def _opened(file: Path, agents: Sequence[str]) -> Tables:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return _readable(file, agents)
    except (OSError, sqlite3.Error) as error:
        if is_damage(error):
            _remove(file)
            with suppress(sqlite3.Error):
                return _readable(file, agents)
        return Tables(":memory:", agents)


def _readable(file: Path, agents: Sequence[str]) -> Tables:
    tables = Tables(str(file), agents)
    try:
        tables.known()
    except sqlite3.Error:
        tables.close()
        raise
    return tables


def _remove(file: Path) -> None:
    for end in ("", "-wal", "-shm"):
        with suppress(OSError):
            file.with_name(file.name + end).unlink(missing_ok=True)
