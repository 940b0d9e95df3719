"""An index of a run's episodes, so that a million of them can be sorted, filtered and searched.

It is a cache in SQLite, made from the run's files and made again when it is missing or old. It lies in the user's cache
folder, or in memory where that cannot be written; the run itself is only read. A thread indexes a few steps at once. Many
are indexed by a process of its own, `python -m kapelle.viewer.index FILE RUN AGENTS`, newest steps first, while pages are
answered from what is there. That process has a lower priority and ends when its standard input does. Only one process
builds an index at a time: it holds the lock beside the file. What it has committed stays when it is killed, and the next
one continues from there.
"""

from __future__ import annotations

import gc
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

from filelock import FileLock, Timeout

from kapelle.viewer.index_tables import FILTERS, FORM, IndexProgress, StepSurvey, Tables, row_of
from kapelle.viewer.lines import Place, Stamp, group_of, lines_of
from kapelle.viewer.skimming import Skimmed, skimmed, spreads

# -------- The first pages of the table of episodes, read from the steps' own files while the index is being made

PATIENCE = 0.15
"""Seconds spent on counting steps to find where a page begins; later pages wait for the index."""


def rows_in_order(
    run: Path,
    there: Mapping[Place, Stamp],
    query: Mapping[str, str],
    agents: Sequence[str],
    start: int,
    count: int,
) -> list[dict[str, Any]] | None:
    """Return the rows that the index would give, newest or oldest steps first; None for a query that needs the index."""
    sort = query.get("sort") or "newest"
    if sort not in ("newest", "oldest") or any(query.get(name) for name in FILTERS):
        return None
    split = "test" if query.get("split") == "test" else "train"
    first, last = (
        int(word) if (word := query.get(name, "")).isdecimal() and len(word) < 12 else None
        for name in ("from", "to")
    )
    steps = sorted(
        step
        for own, step in there
        if own == split and (first is None or step >= first) and (last is None or step <= last)
    )
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
        # A group's spread needs all of its episodes: the lines of the groups on the page are read, and no others.
        wanted = range(start, min(start + count - len(rows), len(lines)))
        groups = {group_of(lines[line]) for line in wanted}
        read = [
            skimmed(raw, line)
            for line, raw in enumerate(lines)
            if line in wanted or None in groups or group_of(raw) in groups
        ]
        found = [each for each in read if each is not None]
        widest = spreads(found)
        rows += [
            row_of((split, step), each, widest[each.group], agents) for each in found if each.line in wanted
        ]
        start = 0
    return rows


# -------- Building: missing steps are read, newest first, and written in short transactions

BATCH = 0.5
"""Seconds of reading between two commits."""
NICE = 5
"""Added to the niceness of the builder's process, so that pages get the processor first."""
TAKEN = 3
"""Exit code if another process builds the index."""
FAILED = 4
"""Exit code if the index cannot be written; the reason is on standard output."""
DAMAGED = 5
"""Exit code if the file is damaged."""


def build(survey: StepSurvey, tables: Tables, wanted: Callable[[], bool], pause: Callable[[], None]) -> None:
    """Index all missing steps, newest first, for as long as `wanted` says so; `pause` is called before each step.

    Raises `sqlite3.Error` or `OSError` if the index cannot be written.
    """
    while wanted():
        survey.look()
        if gone := list(survey.gone):
            tables.forget(gone)
            survey.forget(gone)
        found: dict[Place, tuple[Stamp, list[Skimmed]]] = {}
        end = time.monotonic() + BATCH
        while time.monotonic() < end and wanted():
            pause()
            taken = survey.take()
            if taken is None:
                break
            place, stamp = taken
            raws = enumerate(lines_of(survey.run, *place))
            found[place] = stamp, [each for line, raw in raws if (each := skimmed(raw, line)) is not None]
        if found:
            tables.put(found)
            survey.learn({place: stamp for place, (stamp, _) in found.items()})
        elif wanted():
            tables.sort()
            if not survey.lacking:
                return


@contextmanager
def only_builder(file: Path | None, seconds: float = 0.0) -> Iterator[bool]:
    """Hold the right to build an index and yield True; yield False if another process still has it after `seconds`.

    None stands for tables in memory, which are this process's own.
    """
    if file is None:
        yield True
        return
    lock = FileLock(f"{file}.lock")
    try:
        lock.acquire(timeout=seconds)
    except (Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def main(file: str, run: str, agents: Sequence[str]) -> int:
    """Build one index in this process; return its exit code."""

    def end_with_input() -> None:
        """End at once when the viewer does; transactions that are not committed are rolled back."""
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()
    with suppress(OSError):
        os.nice(NICE)
    gc.disable()  # rows hold no cycles
    try:
        with only_builder(Path(file)) as alone:
            if not alone:
                return TAKEN
            tables = Tables(file, agents)
            build(StepSurvey(Path(run), tables.known()), tables, lambda: True, lambda: None)
            tables.close()
    except (OSError, sqlite3.Error) as error:
        sys.stdout.write(str(error))
        return DAMAGED if is_damage(error) else FAILED
    return 0


def is_damage(error: Exception) -> bool:
    """Return whether an error means that the file is damaged; other errors may pass, as when the disk is full."""
    passing = ("locked", "full", "readonly", "I/O", "unable to open", "interrupted")
    return isinstance(error, sqlite3.DatabaseError) and not any(word in str(error) for word in passing)


# -------- Whether a page is being answered: background work lets pages go first


class Traffic:
    """Counts the calls that are being answered, except those that stay open for news."""

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
        """Leave a call out of the count while it waits for background work."""
        with self._lock:
            self._calls -= 1
        try:
            yield
        finally:
            with self._lock:
                self._calls += 1


AT_ONCE = 1_000_000
"""Most bytes of stored episodes whose indexing a page waits for."""
STEPS_AT_ONCE = 100
"""Most steps whose indexing a page waits for; compressed steps have few bytes."""
WAIT = 0.5
"""Seconds that a page waits for them at most."""
YIELD = 0.5
"""Seconds that the thread waits at most, before each step, until all pages are answered."""
LEARN_AGAIN = 2.0
"""Seconds between two looks at what another process has written."""
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
        self._survey = StepSurvey(self.run, self.tables.known())

    def refresh(self) -> IndexProgress:
        """Start to index new steps and return the progress. Waits for a few steps; many are indexed in the background."""
        if self._damaged:
            self._renew(self.tables)
        self._survey.look()
        steps, size = self._survey.left
        few = size <= AT_ONCE and steps <= STEPS_AT_ONCE
        with self._state:
            if not self._closed and not self._working() and self._to_do():
                if few or self.tables.file is None:
                    self._thread = threading.Thread(target=self._build, name="kapelle-index", daemon=True)
                    self._thread.start()
                elif time.monotonic() - self._started > TRY_AGAIN:
                    self._start_builder()
            thread, now = self._thread, time.monotonic()
            if thread is None and self._to_do() and now - self._learnt > LEARN_AGAIN:
                # Another process, started by this viewer or by another one, writes: take over what it has written.
                self._learnt = now
                with suppress(sqlite3.OperationalError):
                    self._survey.relearn(self.tables.known())
        if thread is not None and few:
            with self._traffic.waiting():
                thread.join(WAIT)
        return self._survey.progress(self.tables.sorted, self._trouble)

    def finish(self) -> IndexProgress:
        """Index everything now, in this thread; waits for another builder first."""
        with only_builder(self.tables.file, -1):
            self._survey.relearn(self.tables.known())
            self._survey.look(again=True)
            build(self._survey, self.tables, lambda: True, lambda: None)
        return self._survey.progress(self.tables.sorted)

    def there(self) -> Mapping[Place, Stamp]:
        """Return the steps that have episodes, as they were when last looked at."""
        return self._survey.there

    def ask(self, question: Callable[[Tables], Answer]) -> Answer:
        """Return what the tables answer; damaged tables are replaced and the new ones asked."""
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
        """Return whether the thread or the process builds; the caller holds the state's lock."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._process is not None and self._process.poll() is not None:
            said, _ = self._process.communicate()
            self._trouble = said.strip() if self._process.returncode == FAILED else ""
            self._damaged = self._process.returncode == DAMAGED
            self._process = None
            self._learnt = float("-inf")
        return self._thread is not None or self._process is not None

    def _start_builder(self) -> None:
        self._started = time.monotonic()
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", "kapelle.viewer.index", str(self._file), str(self.run), json.dumps(self.agents)],
            stdin=subprocess.PIPE,  # it ends with this, and this with the viewer
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C in the terminal is the viewer's to act on
        )  # fmt: skip

    def _build(self) -> None:
        def let_pages_go_first() -> None:
            end = time.monotonic() + YIELD
            while self._traffic.busy and time.monotonic() < end:
                time.sleep(0.005)

        try:
            with only_builder(self.tables.file) as alone:
                if alone:
                    build(self._survey, self.tables, lambda: not self._closed, let_pages_go_first)
                    self._trouble = ""
        except (sqlite3.Error, OSError) as error:  # for example a full disk; a later call tries again
            self._trouble, self._damaged = str(error), is_damage(error)
            self._survey.relearn({})  # the steps that were taken are still missing


def _opened(file: Path, agents: Sequence[str]) -> Tables:
    """Return the tables of a file; a damaged one is replaced once. In memory if the file cannot be used."""
    for _ in range(2):
        tables = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            tables = Tables(str(file), agents)
            tables.known()  # raises if the file is damaged
        except (OSError, sqlite3.Error) as error:
            if tables is not None:
                tables.close()
            if not is_damage(error):
                break
            _remove(file)
        else:
            return tables
    return Tables(":memory:", agents)


def _remove(file: Path) -> None:
    for end in ("", "-wal", "-shm"):
        with suppress(OSError):
            file.with_name(file.name + end).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
