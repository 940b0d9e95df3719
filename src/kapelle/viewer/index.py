"""An index of a run's episodes, so that a million of them can be sorted, filtered and searched.

It is a cache: SQLite in the user's cache folder, made from the run's files and made again where it is missing or old, in
memory where nothing can be written. A run is never written to. Newest steps are indexed first, in the background.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kapelle.viewer.episode import Episode, episode_of, rows_of

FORM = 1
"""Version of the tables; another one is made anew."""
SEATS = 8
"""Agents whose rewards have columns of their own."""
AT_ONCE = 0.1
"""Seconds for which a page waits for files that are not indexed yet."""
COUNTED = 10_000
"""Rows that are counted; of more a page says that there are more."""
SORTS = {
    "newest": "step DESC, line",
    "oldest": "step, line",
    "most reward": "{reward} DESC, step DESC",
    "least reward": "{reward}, step DESC",
    "greatest spread": "spread DESC, step DESC, line",
    "longest": "tokens DESC, step DESC",
}
"""Orders of the table of episodes, by the words on the page."""
_TABLES = """
CREATE TABLE IF NOT EXISTS files (split TEXT, step INTEGER, size INTEGER, changed INTEGER, PRIMARY KEY (split, step));
CREATE TABLE IF NOT EXISTS episodes (
  id INTEGER PRIMARY KEY, split TEXT, step INTEGER, line INTEGER, team INTEGER, task TEXT, question TEXT, said TEXT,
  success REAL, reward REAL, spread REAL, tokens INTEGER, turns INTEGER, error TEXT,
  a0 REAL, a1 REAL, a2 REAL, a3 REAL, a4 REAL, a5 REAL, a6 REAL, a7 REAL);
CREATE INDEX IF NOT EXISTS by_step ON episodes (split, step, line);
CREATE INDEX IF NOT EXISTS by_reward ON episodes (split, reward, step);
CREATE INDEX IF NOT EXISTS by_spread ON episodes (split, spread, step, line);
CREATE INDEX IF NOT EXISTS by_tokens ON episodes (split, tokens, step);
CREATE INDEX IF NOT EXISTS by_task ON episodes (task, split, step);
CREATE INDEX IF NOT EXISTS by_error ON episodes (split, step) WHERE error <> '';
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (said, content='', detail=none);
"""


def cache_folder() -> Path:
    """Return where indexes are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kapelle" / "viewer"


class Index:
    """The episodes of one run, as far as they are indexed."""

    def __init__(self, run: Path, agents: Sequence[str], folder: Path | None = None) -> None:
        """Open the run's index in a folder (the user's cache), or make one."""
        self.run = run
        self.agents = list(agents)[:SEATS]
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._waiting: list[tuple[str, int, Path, int, int]] = []
        name = hashlib.sha256(f"{FORM} {run.resolve()} {self.agents}".encode("utf-8", "replace")).hexdigest()[
            :32
        ]
        self._open((folder or cache_folder()) / f"{name}.sqlite")

    def _open(self, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._connect(str(file))
            self._base.execute("DELETE FROM files WHERE step < 0")  # fails where nothing can be written
            self._base.commit()
        except (OSError, sqlite3.Error):
            with suppress(OSError):
                file.unlink(missing_ok=True)
            try:
                self._connect(str(file))
            except sqlite3.Error:
                self._connect(":memory:")

    def _connect(self, where: str) -> None:
        self._base = sqlite3.connect(where, check_same_thread=False, timeout=60.0)
        self._base.execute("PRAGMA journal_mode = WAL")
        self._base.execute("PRAGMA synchronous = OFF")
        self._base.executescript(_TABLES)
        in_memory = where == ":memory:"
        self._reader = (
            self._base if in_memory else sqlite3.connect(where, check_same_thread=False, timeout=5.0)
        )
        self._reading = self._lock if in_memory else threading.Lock()

    def refresh(self, patience: float = AT_ONCE) -> tuple[int, int]:
        """Index what is new for so many seconds, the rest in the background; return the steps indexed and those there are."""
        there = dict(_files(self.run))
        with self._lock:
            known = {
                (s, n): (size, changed) for s, n, size, changed in self._base.execute("SELECT * FROM files")
            }
            gone = [key for key in known if key not in there]
            for key in gone:
                self._forget(*key)
            self._base.commit()
            new = [
                (*key, path, size, changed)
                for key, (path, size, changed) in there.items()
                if known.get(key) != (size, changed)
            ]
            self._waiting = sorted(new, key=lambda each: each[1])
        end = time.monotonic() + patience
        while time.monotonic() < end and self._one():
            pass
        left = len(self._waiting)
        if left and (self._worker is None or not self._worker.is_alive()):
            self._worker = threading.Thread(target=self._work, name="kapelle-index", daemon=True)
            self._worker.start()
        return len(there) - left, len(there)

    def finish(self) -> None:
        """Index everything now."""
        self.refresh(float("inf"))

    def _work(self) -> None:
        while self._one():
            time.sleep(0)  # pages come first

    def _one(self) -> bool:
        """Index the newest file that waits; False when none does."""
        with self._lock:
            if not self._waiting:
                return False
            split, step, path, size, changed = self._waiting.pop()
        rows = [self._row(split, step, each) for each in self._read(path)]
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")  # another viewer may index the same run
            self._forget(split, step)
            # Rows that were forgotten leave their words behind: no row may get their number.
            last = self._base.execute("SELECT rowid FROM words ORDER BY rowid DESC LIMIT 1").fetchone()
            first = 1 + (last[0] if last else 0)
            marks = ", ".join("?" * (14 + SEATS))
            self._base.executemany(
                f"INSERT INTO episodes VALUES ({marks})",
                [(first + k, *row) for k, (row, _) in enumerate(rows)],
            )
            self._base.executemany(
                "INSERT INTO words (rowid, said) VALUES (?, ?)",
                [(first + k, words) for k, (_, words) in enumerate(rows)],
            )
            self._base.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", (split, step, size, changed)
            )
            self._base.commit()
        return True

    def _read(self, path: Path) -> list[tuple[Episode, float]]:
        """Return a file's episodes, each with the spread of rewards in its group."""
        found = [episode_of(row, line) for line, row in rows_of(path) if row is not None]
        groups: dict[int, list[float]] = {}
        for each in found:
            groups.setdefault(each.group, []).append(each.reward or 0.0)
        return [(each, max(groups[each.group]) - min(groups[each.group])) for each in found]

    def _row(self, split: str, step: int, given: tuple[Episode, float]) -> tuple[tuple[Any, ...], str]:
        each, spread = given
        seats = [each.rewards.get(agent) for agent in self.agents]
        row = (
            split, step, each.line, each.group, _storable(each.task), _storable(each.question[:200]), _storable(each.final[:200]),
            each.success, each.reward, spread, each.tokens, len(each.turns), _storable(each.error[:200]),
            *seats, *([None] * (SEATS - len(seats))),
        )  # fmt: skip
        return row, _storable(
            " ".join([each.question, *(turn.text for turn in each.turns), each.final, each.error])
        )

    def _forget(self, split: str, step: int) -> None:
        # Words of a contentless table stay behind; they point to rows that are not there.
        self._base.execute("DELETE FROM episodes WHERE split = ? AND step = ?", (split, step))
        self._base.execute("DELETE FROM files WHERE split = ? AND step = ?", (split, step))

    def find(
        self, where: str, values: Sequence[Any], sort: str, agent: str, start: int, count: int
    ) -> list[dict[str, Any]]:
        """Return rows of the table of episodes; `where` is SQL of this module's own making."""
        order = SORTS[sort].format(reward=self._column(agent))
        with self._reading:
            cursor = self._reader.execute(
                f"SELECT * FROM episodes WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
                [*values, count, start],
            )
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def count(self, where: str, values: Sequence[Any], most: int = COUNTED) -> int:
        """Return how many episodes fit, up to `most`."""
        with self._reading:
            counted = f"SELECT COUNT(*) FROM (SELECT 1 FROM episodes WHERE {where} LIMIT ?)"
            return int(self._reader.execute(counted, [*values, most]).fetchone()[0])

    def _column(self, agent: str) -> str:
        if agent not in self.agents:
            return "reward"
        column = f"a{self.agents.index(agent)}"
        with self._lock:
            self._base.execute(f"CREATE INDEX IF NOT EXISTS by_{column} ON episodes (split, {column}, step)")
        return column

    def close(self) -> None:
        """Stop indexing and close the file."""
        with self._lock:
            self._waiting = []
        if self._worker is not None:
            self._worker.join()
        self._reader.close()
        self._base.close()


def asked(query: dict[str, str]) -> tuple[str, list[Any]]:
    """Return the condition that a page's query asks for, with its values."""
    parts, values = (
        ["split = ?"],
        [query.get("split") if query.get("split") in ("train", "test") else "train"],
    )
    for name, sign in (("from", ">="), ("to", "<=")):
        if query.get(name, "").isdecimal() and len(query[name]) < 12:
            parts.append(f"step {sign} ?")
            values.append(int(query[name]))  # type: ignore[arg-type]
    outcome = {
        "right": "success >= 1",
        "wrong": "success < 1",
        "errors": "error <> ''",
        "scored": "success IS NOT NULL",
    }
    if query.get("outcome") in outcome:
        parts.append(outcome[query["outcome"]])
    if query.get("task"):
        parts.append("task = ?")
        values.append(_storable(query["task"]))
    words = re.findall(r"[^\W_]+", query.get("q", ""))
    if words:
        parts.append("id IN (SELECT rowid FROM words WHERE words MATCH ?)")
        values.append(" AND ".join(f'"{word}"' for word in words))
    return " AND ".join(parts), values


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", " ")


def _files(run: Path) -> Iterator[tuple[tuple[str, int], tuple[Path, int, int]]]:
    for split in ("train", "test"):
        try:
            with os.scandir(run / "episodes" / split) as entries:
                for entry in entries:
                    stem = entry.name.removesuffix(".jsonl")
                    if stem != entry.name and stem.isdecimal() and len(stem) < 12:
                        size, changed = (entry.stat().st_size, entry.stat().st_mtime_ns)
                        yield (split, int(stem)), (Path(entry.path), size, changed)
        except OSError:
            continue
