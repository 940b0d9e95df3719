from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.viewed_runs import append_step, write_run

from kapelle.runs.writer import RunDirectory
from kapelle.viewer.index import SORTS, Index, asked


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
    where, values = asked(query)
    rows = index.find(where, values, sort, agent, 0, 100)
    assert index.count(where, values) == len(rows)
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
    done, there = index.refresh(patience=0.0)
    assert done < there == 3
    index.finish()
    index.close()


def test_two_viewers_may_index_one_run(run: Path) -> None:
    one, other = (Index(run, ["solver", "critic"], run.parent / "cache") for _ in range(2))
    one.refresh(0.0)
    other.finish()
    one.finish()
    for index in (one, other):
        assert len(found(index, {})) == len(set(found(index, {}))) == 12
        assert found(index, {"q": "carry 2"})[-1] == (2, 3)
