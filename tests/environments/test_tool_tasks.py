from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import Say, expert, lines, play

from kapelle.environments.grading.text.tool_call import Form, ReadCall, write_calls
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.tool_tasks import KINDS, ToolKind, ToolTasks
from kapelle.errors import ConfigError
from kapelle.types import Episode, Split, Task
from kapelle.workflows.tool_use import ToolUse

WITHOUT_PROGRAMS: tuple[ToolKind, ...] = ("calculator", "search", "notes", "calendar")


def tasks(kind: ToolKind, level: int, split: Split = "train", count: int = 4) -> tuple[ToolTasks, list[Task]]:
    environment = ToolTasks(kinds=(kind,), difficulty=(level, level))
    return environment, [environment.task(split, k) for k in range(count)]


async def one(environment: ToolTasks, task: Task, say: Say, seed: int = 0) -> Episode:
    [episode] = await play(environment, ToolUse(), ["solver"], {"solver": say}, task, seed=seed)
    assert episode.error is None
    return episode


def call(name: str, form: Form = "hermes", **arguments: Any) -> str:
    return write_calls([ReadCall(name, arguments)], form)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "level"), product(WITHOUT_PROGRAMS, (1, 2, 3)))
async def test_the_script_solves_every_task_without_a_fault(kind: ToolKind, level: int) -> None:
    environment, found = tasks(kind, level)
    for task in found:
        episode = await one(environment, task, expert(environment))
        assert episode.rewards == {"solver": 1.0}, (task, [turn.text for turn in episode.turns])
        assert episode.info["call_faults"] == {"solver": 0}
        assert len(episode.turns) == len(task.data["steps"]) + 1


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_the_scripts_programs_give_the_answers(level: int, sandbox: Bubblewrap) -> None:
    environment, found = tasks("python", level, count=2)
    for task in found:
        assert (await one(environment, task, expert(environment))).rewards == {"solver": 1.0}


@pytest.mark.parametrize(("kind", "level"), product(("notes", "calendar"), (1, 2, 3)))
async def test_words_do_not_change_notes_or_the_calendar(kind: ToolKind, level: int) -> None:
    environment, found = tasks(kind, level, count=3)
    for task in found:
        assert (await one(environment, task, lines("Done."))).rewards == {"solver": 0.0}


async def test_any_other_change_is_incorrect() -> None:
    environment, [task, *_] = tasks("notes", 1)
    step = task.data["steps"][0]["calls"][0]
    right = call(step["name"], **step["arguments"])
    other = call("write_file", path="mine.txt", text="hello")
    assert (await one(environment, task, lines(right, "Done."))).success == 1.0
    assert (await one(environment, task, lines(f"{right}\n{other}", "Done."))).success == 0.0
    longer = call("write_file", path=step["arguments"]["path"], text=f"\n{step['arguments']['text']} \n")
    assert (await one(environment, task, lines(longer, "Done."))).success == 1.0


async def test_a_whole_episode() -> None:
    environment = ToolTasks(kinds=("calculator",), difficulty=(1, 1), form="pythonic", listing="signatures")
    task = Task(
        "train-0", "What is 12*34?", {"kind": "calculator", "answer": "408", "steps": [], "difficulty": 1}
    )
    episode = await one(environment, task, lines("[calculator(expression='12*34')]", "It is 408."))
    assert (
        episode.turns[0].new_messages[0].content
        == 'calculator(expression)\n[tool(argument="value")]\n\nWhat is 12*34?'
    )
    assert [(m.role, m.content) for m in episode.turns[1].new_messages] == [("tool", "408")]
    assert episode.rewards == {"solver": 1.0}
    assert episode.info["kind"] == "calculator"
    assert episode.info["calls"] == {"solver": ["calculator"]}


async def test_every_agent_has_separate_notes_and_events() -> None:
    environment, [task, *_] = tasks("calendar", 1)
    scripts = {"idle": lines("Done."), "busy": expert(environment)}
    [episode] = await play(environment, ToolUse(), [*scripts], scripts, task)
    assert episode.rewards == {"idle": 0.0, "busy": 1.0}
    assert episode.success == 0.5


def test_the_splits_share_no_task() -> None:
    environment = ToolTasks()
    questions = {
        split: {environment.task(split, k).question for k in range(200)} for split in ("train", "test")
    }
    assert questions["train"].isdisjoint(questions["test"])
    assert {environment.task("train", k).data["kind"] for k in range(60)} == set(KINDS)
    _, found = tasks("search", 1)
    assert len({json.dumps(task.data["documents"]) for task in found}) == len(found)


async def test_a_flawed_script_guesses() -> None:
    environment = ToolTasks(kinds=("calculator",), flaws={"solver": 1.0})
    episode = await one(environment, environment.task("train", 0), expert(environment))
    assert len(episode.turns) == 1
    assert episode.rewards == {"solver": 0.0}


def test_impossible_settings_are_errors() -> None:
    with pytest.raises(ValidationError, match="hardest"):
        ToolTasks(difficulty=(1, 4))
    with pytest.raises(ConfigError, match="solvr"):
        ToolTasks(kinds=("notes",), flaws={"solvr": 0.5}).check(["solver"])
