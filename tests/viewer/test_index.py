from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.episode_lines import lay_plain
from tests.support.viewed_runs import append_step, write_run

from kapelle.runs.writer import RunDirectory
from kapelle.viewer.index import SORTS, Index


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=3)


def made(run: Path) -> Index:
    index = Index(run, ["solver", "critic"])
    index.finish()
    return index


def found(index: Index, query: dict[str, str], sort: str = "oldest") -> list[tuple[int, int]]:
    return [(row.step, row.line) for row in index.rows(query, sort)]


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
    assert found(index, {"agent": "critic"}, "least reward")[0][1] % 2 == 1
    assert {len(found(index, {"agent": "nobody"}, sort)) for sort in SORTS} == {12}


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


def test_a_page_waits_for_few_steps(run: Path) -> None:
    index = Index(run, ["solver"])
    while not index.refresh().ready:
        pass
    assert len(found(index, {})) == 12


def test_what_a_row_says_is_what_was_recorded(run: Path) -> None:
    row = made(run).rows({})[0]
    assert (row.split, row.step, row.line, row.question, row.answer) == ("train", 3, 0, "3+0", "3")
    assert (row.spread, row.tokens, row.turns, row.rewards["solver"]) == (1.0, 14, 2, 1.0)
