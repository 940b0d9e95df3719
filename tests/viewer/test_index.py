from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.episode_lines import step_lines, write_steps
from tests.support.viewed_runs import client_of, write_run

from kapelle.runs.step_rows import append_step
from kapelle.viewer.index import SORTS, Index


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=3)


def made(run: Path) -> Index:
    index = Index(run, ["solver", "critic"])
    index.finish()
    return index


def found(index: Index, query: dict[str, str], sort: str = "oldest") -> list[tuple[int, int]]:
    index.finish(query)
    return [(row.step, row.line) for row in index.rows(query, sort)]


def test_conditions_hold(run: Path) -> None:
    index = made(run)
    assert found(index, {"from": "2", "to": "2", "outcome": "wrong"}) == [(2, 1), (2, 3)]
    assert found(index, {"q": "carry 3"}) == [(2, 2), *((3, line) for line in range(4))], (
        "2+1 was answered by 3"
    )
    assert found(index, {"q": "carry nowhere"}) == []
    assert found(index, {"task": "t2-1"}) == [(2, 2), (2, 3)]
    assert found(index, {"outcome": "errors"}) == []


def test_an_agent_without_a_reward_is_not_selected(run: Path) -> None:
    lines = step_lines(run / "episodes" / "train")
    lines[2] = [line.replace(b'"critic":1.0', b'"third":1.0') for line in lines[2]]
    write_steps(run / "episodes" / "train", lines)
    index = made(run)
    assert {step for step, _ in found(index, {"agent": "critic"})} == {1, 2, 3}
    assert (2, 0) not in found(index, {"agent": "critic"})
    assert len(found(index, {"agent": "solver"})) == len(found(index, {"agent": "nobody"})) == 12


@pytest.mark.parametrize(
    "word", ['"', "' OR 1=1 --", "a AND", "NEAR(", "*", "said:x", "\0", "8,11", "-1", "日本"]
)
def test_words_are_never_syntax(word: str, run: Path) -> None:
    found(made(run), {"q": word, "task": word, "from": word, "outcome": word, "split": word})


def test_orders_of_the_table(run: Path) -> None:
    index = made(run)
    assert found(index, {}, "most reward")[0][1] % 2 == 0
    assert found(index, {"agent": "critic"}, "least reward")[0][1] % 2 == 1
    assert {len(found(index, {"agent": "nobody"}, sort)) for sort in SORTS} == {12}


def test_changed_steps_are_indexed_again(run: Path) -> None:
    index = made(run)
    lines = step_lines(run / "episodes" / "train")
    fourth = [line.replace(b"3+", b"4+").replace(b"the 3", b"the 4") for line in lines[3]]
    write_steps(run / "episodes" / "train", {2: lines[2][:1], 3: lines[3], 4: fourth})
    index.finish()
    assert found(index, {}) == [(2, 0), *((3, k) for k in range(4)), *((4, k) for k in range(4))]
    # Words of deleted rows find nothing.
    assert found(index, {"q": "carry 1"}) == [(step, line) for step in (3, 4) for line in (2, 3)]
    assert found(index, {"q": "carry 4"}) == [(3, 2), *((4, k) for k in range(4))]


@pytest.mark.slow
def test_the_first_page_of_a_long_run_says_that_it_is_reading(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    lines = b"".join(step_lines(run / "episodes" / "train")[1]) * 32
    for step in range(2, 152):
        append_step(run / "episodes" / "train", step, lines)
    absent = "/run/run/episodes?q=nowhere"
    with client_of(tmp_path) as web:
        page = web.get(absent).text
        assert "Reading …" in page
        assert "No episode matches" not in page
        while "data-indexing" in (page := web.get(absent).text):
            assert "Reading …" in page
        assert "No episode matches" in page
        assert '<p class="quiet tight" id="count">19,204 episodes</p>' in web.get("/run/run/episodes").text
