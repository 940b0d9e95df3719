from __future__ import annotations

import pytest

from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import QuestionState
from kapelle.errors import EpisodeError
from kapelle.types import Task

TASK = Task("train-0", "2+2", {"answer": 4})


def grade(text: str) -> Grade:
    if text == "?":
        return Grade(0.0, None, "the checker ran out of time", "ungraded")
    return Grade(float(text == "4"), text, "")


def world() -> QuestionState:
    return QuestionState(TASK, ["a", "b"], grade, {"source": "made up"})


async def test_agents_are_scored_by_their_own_texts_and_the_team_by_the_final_one() -> None:
    state = world()
    assert state.observe("a") == state.observe("b") == "2+2"
    assert state.movers() == ("a", "b")
    assert await state.step({"a": "5", "b": "4"}, final="5") == {}
    assert state.movers() == ()
    outcome = state.outcome()
    assert outcome.rewards == {"a": 0.0, "b": 1.0}
    assert outcome.success == 0.0
    assert outcome.info["answers"] == {"a": "5", "b": "4"}
    assert outcome.info["source"] == "made up"
    assert not outcome.truncated


async def test_without_a_final_text_success_is_the_mean() -> None:
    state = world()
    await state.step({"a": "5", "b": "4"})
    assert state.outcome().success == 0.5


@pytest.mark.parametrize(("answer", "final"), [("?", None), ("4", "?")])
async def test_a_missing_verdict_is_an_error(answer: str, final: str | None) -> None:
    with pytest.raises(EpisodeError, match="out of time"):
        await world().step({"a": answer}, final=final)


async def test_impossible_steps_are_errors() -> None:
    state = world()
    with pytest.raises(EpisodeError, match="answered"):
        await state.step({})
    with pytest.raises(EpisodeError, match="'c'"):
        await state.step({"c": "4"})
    await state.step({"a": "4"})
    with pytest.raises(EpisodeError, match="already"):
        await state.step({"a": "4"})


def test_a_question_without_an_answer_is_truncated() -> None:
    outcome = world().outcome()
    assert outcome.truncated
    assert (outcome.rewards, outcome.success) == ({}, 0.0)
