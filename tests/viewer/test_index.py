from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.episode_lines import lay_plain
from tests.support.viewed_runs import append_step, write_run

from kapelle.runs.writer import RunDirectory
from kapelle.viewer.index import TAKEN, Index, build, only_builder
from kapelle.viewer.index_tables import SORTS, IndexProgress, StepSurvey, Tables, asked


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=3)


def made(run: Path) -> Index:
    index = Index(run, ["solver", "critic"], run.parent / "cache")
    index.finish()
    return index


def found(
    index: Index, query: dict[str, str], sort: str = "oldest", agent: str = ""
) -> list[tuple[int, int]]:
    wanted = asked(query, index.agents)
    rows = index.tables.find(wanted, sort, agent, 0, 100)
    assert index.tables.count(wanted) == len(rows)
    return [(row["step"], row["line"]) for row in rows]


def test_every_episode_is_there_once(run: Path) -> None:
    index = made(run)
    assert found(index, {}) == [(step, line) for step in (1, 2, 3) for line in range(4)]
    assert found(index, {"split": "test"}) == []
    index.finish()
    assert len(found(index, {})) == 12


def test_conditions_hold(run: Path) -> None:
    index = made(run)
    assert found(index, {"from": "2", "to": "2", "outcome": "wrong"}) == [(2, 1), (2, 3)]
    assert found(index, {"q": "carry 3"}) == [(2, 2), *((3, line) for line in range(4))], (
        "2+1 was answered by 3"
    )
    assert found(index, {"q": "carry nowhere"}) == []
    assert found(index, {"task": "t2-1"}) == [(2, 2), (2, 3)]
    assert found(index, {"outcome": "errors"}) == []


def test_words_that_many_said_are_found_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = made(run)
    few = found(index, {"q": "carry", "outcome": "wrong"})
    monkeypatch.setattr("kapelle.viewer.index_tables.HITS", 2)
    wanted = asked({"q": "carry", "outcome": "wrong"})
    rows = index.tables.find(wanted, "oldest", "", 0, 100)
    assert [(row["step"], row["line"]) for row in rows] == few == [(s, k) for s in (1, 2, 3) for k in (1, 3)]
    assert index.tables.count(wanted) is None, "they are not counted"


def test_an_agent_that_was_not_paid_took_no_part(run: Path) -> None:
    lay_plain(run / "episodes" / "train")
    path = run / "episodes" / "train" / "00000002.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"critic":1.0', b'"third":1.0'))
    index = made(run)
    assert {step for step, _ in found(index, {"agent": "critic"})} == {1, 2, 3}
    assert (2, 0) not in found(index, {"agent": "critic"})
    assert len(found(index, {"agent": "solver"})) == len(found(index, {"agent": "nobody"})) == 12


@pytest.mark.parametrize(
    "word", ['"', "' OR 1=1 --", "a AND", "NEAR(", "*", "said:x", "\0", "8,11", "-1", "日本"]
)
def test_no_word_is_a_command(word: str, run: Path) -> None:
    found(made(run), {"q": word, "task": word, "from": word, "outcome": word, "split": word})


def test_every_order_is_an_order(run: Path) -> None:
    index = made(run)
    assert found(index, {}, "most reward")[0][1] % 2 == 0
    assert found(index, {}, "least reward", "critic")[0][1] % 2 == 1
    assert {len(found(index, {}, sort, "nobody")) for sort in SORTS} == {12}


def test_what_changed_is_indexed_anew(run: Path) -> None:
    index = made(run)
    lay_plain(run / "episodes" / "train")
    (run / "episodes" / "train" / "00000001.jsonl").unlink()
    path = run / "episodes" / "train" / "00000002.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with RunDirectory.create(
        run, config=(run / "config.yaml").read_text(), provenance={}, resume=True
    ) as opened:
        opened.rewind({"metrics.jsonl": (run / "metrics.jsonl").stat().st_size, "episodes/train": 3})
        append_step(opened, 4)
    index.finish()
    assert found(index, {}) == [(2, 0), *((3, k) for k in range(4)), *((4, k) for k in range(4))]
    # Words of rows that are gone find nothing, and no row that came later.
    assert found(index, {"q": "carry 1"}) == [(step, line) for step in (3, 4) for line in (2, 3)]
    assert found(index, {"q": "carry 4"}) == [(3, 2), *((4, k) for k in range(4))]


def test_it_is_kept_and_made_again_where_it_is_missing_or_broken(run: Path) -> None:
    made(run).close()
    (file,) = (run.parent / "cache").glob("*.sqlite")
    again = Index(run, ["solver", "critic"], run.parent / "cache")
    assert len(found(again, {})) == 12, "without reading a file"
    again.close()
    file.write_bytes(b"no database" * 1000)
    assert len(found(made(run), {})) == 12
    whole = file.read_bytes()
    file.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    assert len(found(made(run), {})) == 12
    shutil.rmtree(run.parent / "cache")
    assert len(found(made(run), {})) == 12


def test_nothing_is_written_to_the_run_and_no_folder_is_needed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    (run.parent / "file").write_text("")
    index = Index(run, ["solver"], run.parent / "file" / "cache")
    index.finish()
    assert len(found(index, {})) == 12
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_a_page_waits_no_longer_than_it_says(run: Path) -> None:
    index = Index(run, [], run.parent / "cache")
    done = index.refresh()
    assert done.rows <= done.there == 3
    index.finish()
    index.close()


def test_two_viewers_may_index_one_run(run: Path) -> None:
    one, other = (Index(run, ["solver", "critic"], run.parent / "cache") for _ in range(2))
    one.refresh()
    other.finish()
    one.finish()
    for index in (one, other):
        assert len(found(index, {})) == len(set(found(index, {}))) == 12
        assert found(index, {"q": "carry 2"})[-1] == (2, 3)


def wait(index: Index, holds: Callable[[IndexProgress], bool]) -> IndexProgress:
    """Ask as pages do until something holds; a page never waits for a process."""
    end = time.monotonic() + 120.0
    while not holds(done := index.refresh()):
        assert time.monotonic() < end, done
        time.sleep(0.05)
    return done


@pytest.fixture
def much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything is much, and what fails is tried again at once."""
    monkeypatch.setattr("kapelle.viewer.index.AT_ONCE", 0)
    monkeypatch.setattr("kapelle.viewer.index.TRY_AGAIN", 0.0)


@pytest.mark.usefixtures("much")
@pytest.mark.slow
def test_much_is_indexed_by_a_process_that_may_be_killed(run: Path) -> None:
    index = Index(run, ["solver", "critic"], run.parent / "cache")
    index.refresh()
    assert index._process is not None
    assert index._thread is None
    index._process.kill()
    assert wait(index, lambda done: done.ready).rows == 3
    assert len(found(index, {})) == 12
    assert found(index, {"q": "carry 2"})[-1] == (2, 3)
    with RunDirectory.create(
        run, config=(run / "config.yaml").read_text(), provenance={}, resume=True
    ) as opened:
        opened.rewind({"metrics.jsonl": (run / "metrics.jsonl").stat().st_size, "episodes/train": 3})
        append_step(opened, 4)
    wait(index, lambda done: done.rows == 4)
    index.close()


@pytest.mark.usefixtures("much")
@pytest.mark.slow
def test_the_process_ends_with_the_viewer(run: Path) -> None:
    index = Index(run, ["solver", "critic"], run.parent / "cache")
    with only_builder(index.tables.file):  # so that it cannot be done before
        index.refresh()
        process = index._process
        assert process is not None
        assert process.stdin is not None
        assert process.wait(60) == TAKEN, "there is one builder of an index"
        index.refresh()
        assert index.refresh().trouble == ""
    pipe = os.pipe()
    command = [sys.executable, "-c", ENDLESS, str(run.parent / "endless.sqlite"), str(run), "[]"]
    endless = subprocess.Popen(command, stdin=pipe[0], stdout=subprocess.PIPE)
    assert endless.stdout is not None
    assert endless.stdout.readline() == b"started\n"
    os.close(pipe[1])
    os.close(pipe[0])
    assert endless.wait(60) == 0
    endless.stdout.close()
    index.close()


ENDLESS = """
import json, sys, time
from kapelle.viewer import index
def build(*_):
    print("started", flush=True)
    time.sleep(3600)
index.build = build
index.main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
"""


def test_until_it_is_sorted_orders_know_the_newest_episodes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kapelle.viewer.index_tables.WINDOW", 8)
    monkeypatch.setattr(Tables, "sort", lambda _: None)
    index = Index(run, ["solver", "critic"], run.parent / "cache")
    build(
        survey := StepSurvey(run, {}), index.tables, lambda: not survey.there or survey.lacking, lambda: None
    )
    done = index.refresh()
    assert (done.whole, done.ready) == (True, False)
    assert {step for step, _ in found(index, {"outcome": "right"})} == {2, 3}
    assert len(found(index, {})) == 12
    assert found(index, {"q": "carry 2"})[0] == (1, 2), "rare words are found everywhere"
    monkeypatch.setattr("kapelle.viewer.index_tables.HITS", 3)
    many = index.tables.find(wanted := asked({"q": "carry"}), "longest", "", 0, 100)
    assert {row["step"] for row in many} == {3}, "of words that many said, those that were indexed first"
    assert len(many) == 3
    assert index.tables.count(wanted) is None
    monkeypatch.undo()
    wait(index, lambda done: done.ready)
    assert {step for step, _ in found(index, {"outcome": "right"})} == {1, 2, 3}
    index.close()


def test_one_that_turns_out_to_be_damaged_is_made_again(run: Path) -> None:
    made(run).close()
    (file,) = (run.parent / "cache").glob("*.sqlite")
    with sqlite3.connect(file) as base:
        base.execute("ALTER TABLE episodes RENAME COLUMN spread TO width")  # as by another version
    base.close()
    index = Index(run, ["solver", "critic"], run.parent / "cache")
    assert index.ask(lambda tables: tables.find(asked({}), "greatest spread", "", 0, 9)) == []
    assert wait(index, lambda done: done.ready).rows == 3
    assert len(found(index, {})) == 12
    index.close()


def test_why_it_cannot_be_written_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Tables, "put", full)
    index = Index(run, ["solver", "critic"], run.parent / "cache")
    assert "full" in wait(index, lambda done: bool(done.trouble)).trouble
    monkeypatch.undo()
    assert wait(index, lambda done: done.ready).trouble == ""
    index.close()


def test_tables_that_nobody_holds_close_their_file(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path / "index.sqlite"), ["solver"])
    held = (tables._base, tables._reader)
    del tables
    for base in held:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            base.execute("SELECT 1")
