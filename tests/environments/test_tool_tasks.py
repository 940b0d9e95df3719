from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import Say, expert, lines, play

from kapelle.environments.grading.text.tool_call import Form, ReadCall, parse_calls, write_calls
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.tool_tasks import KINDS, ToolKind, ToolTasks
from kapelle.errors import ConfigError
from kapelle.types import Episode, Message, Split, Task
from kapelle.workflows.tool_use import ToolUse

WITHOUT_PROGRAMS: tuple[ToolKind, ...] = ("calculator", "search", "notes", "calendar")


def tasks(kind: ToolKind, level: int, split: Split = "train", count: int = 8) -> tuple[ToolTasks, list[Task]]:
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
async def test_the_expert_does_every_task_with_its_tools_and_without_a_fault(
    kind: ToolKind, level: int
) -> None:
    environment, found = tasks(kind, level)
    for task in found:
        episode = await one(environment, task, expert(environment))
        assert episode.rewards == {"solver": 1.0}, (task, [turn.text for turn in episode.turns])
        assert episode.info["call_faults"] == {"solver": 0}
        # Step after step, each after the results of the one before.
        assert len(episode.turns) == len(task.data["steps"]) + 1


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_the_experts_programs_give_the_answers(level: int, sandbox: Bubblewrap) -> None:
    environment, found = tasks("python", level, count=2)
    for task in found:
        assert (await one(environment, task, expert(environment))).rewards == {"solver": 1.0}


@pytest.mark.parametrize(("kind", "level"), product(("notes", "calendar"), (1, 2, 3)))
async def test_words_change_no_notes_and_no_calendar(kind: ToolKind, level: int) -> None:
    environment, found = tasks(kind, level, count=3)
    for task in found:
        assert (await one(environment, task, lines("Done."))).rewards == {"solver": 0.0}


async def test_what_else_is_changed_spoils_the_task() -> None:
    environment, [task, *_] = tasks("notes", 1)
    asked = task.data["steps"][0]["calls"][0]
    right = call(asked["name"], **asked["arguments"])
    other = call("write_file", path="mine.txt", text="hello")
    assert (await one(environment, task, lines(right, "Done."))).success == 1.0
    assert (await one(environment, task, lines(f"{right}\n{other}", "Done."))).success == 0.0
    longer = call("write_file", path=asked["arguments"]["path"], text=f"\n{asked['arguments']['text']} \n")
    assert (await one(environment, task, lines(longer, "Done."))).success == 1.0, (
        "space around lines counts for nothing"
    )


async def test_a_whole_episode_is_as_stated() -> None:
    environment = ToolTasks(kinds=("calculator",), difficulty=(1, 1), form="pythonic", listing="signatures")
    task = Task(
        "train-0", "What is 12*34?", {"kind": "calculator", "answer": "408", "steps": [], "difficulty": 1}
    )
    episode = await one(environment, task, lines("[calculator(expression='12*34')]", "It is 408."))
    assert (
        episode.turns[0].heard[0].content
        == 'calculator(expression)\n[tool(argument="value")]\n\nWhat is 12*34?'
    )
    assert [(m.role, m.content) for m in episode.turns[1].heard] == [("tool", "408")]
    assert episode.rewards == {"solver": 1.0}
    assert episode.info["kind"] == "calculator"
    assert episode.info["calls"] == {"solver": ["calculator"]}


async def test_every_agent_has_notes_and_a_calendar_of_its_own() -> None:
    environment, [task, *_] = tasks("calendar", 1)
    scripts = {"idle": lines("Done."), "busy": expert(environment)}
    [episode] = await play(environment, ToolUse(), [*scripts], scripts, task)
    assert episode.rewards == {"idle": 0.0, "busy": 1.0}
    assert episode.success == 0.5


async def test_whoever_never_answers_earns_nothing() -> None:
    environment = ToolTasks(kinds=("calendar",), difficulty=(1, 1), max_turns=2)
    task = environment.task("train", 0)
    again = call("list_events")
    assert (await one(environment, task, lines(again, again))).rewards == {"solver": 0.0}


def test_tasks_of_both_splits_differ_and_documents_are_made_up_for_each() -> None:
    environment = ToolTasks()
    asked = {split: {environment.task(split, k).question for k in range(200)} for split in ("train", "test")}
    assert asked["train"].isdisjoint(asked["test"])
    assert {environment.task("train", k).data["kind"] for k in range(60)} == set(KINDS)
    _, found = tasks("search", 1)
    assert len({json.dumps(task.data["documents"]) for task in found}) == len(found)


@pytest.mark.parametrize("form", ["hermes", "llama", "pythonic"])
def test_scripts_call_in_the_form_that_is_asked_for(form: Form) -> None:
    environment = ToolTasks(kinds=("notes",), form=form)
    task = environment.task("train", 3)
    said = environment.script("solver", task, [Message("user", task.question)], 0)
    assert [c.name for c in parse_calls(said, (form,))] == [c["name"] for c in task.data["steps"][0]["calls"]]


async def test_a_flawed_expert_guesses() -> None:
    environment = ToolTasks(kinds=("calculator",), flaws={"solver": 1.0})
    episode = await one(environment, environment.task("train", 0), expert(environment))
    assert len(episode.turns) == 1
    assert episode.rewards == {"solver": 0.0}


def test_bad_settings_are_refused_in_one_line() -> None:
    with pytest.raises(ValidationError, match="Input should be 'calculator', 'python'"):
        ToolTasks(kinds=("web",))
    with pytest.raises(ValidationError, match="`difficulty` goes to 4; the hardest is 3"):
        ToolTasks(difficulty=(1, 4))
    with pytest.raises(ConfigError, match="solvr"):
        ToolTasks(kinds=("notes",), flaws={"solvr": 0.5}).check(["solver"])
