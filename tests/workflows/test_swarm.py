from __future__ import annotations

import pytest
from tests.workflows.stage import expert, lines, play, transcript

from kapelle.environments.matrix import Matrix
from kapelle.environments.sum_lists import SumLists
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.types import Task
from kapelle.workflows.swarm import Swarm

TASK = Task("train-0", "3+8;9+9", {"answer": "11;18", "difficulty": 2})


async def test_a_planner_calls_one_worker_for_all_subtasks_at_once() -> None:
    environment = SumLists()
    scripts = {"planner": expert(environment), "worker": expert(environment)}
    [episode] = await play(environment, Swarm(), ["planner", "worker"], scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 3+8;9+9 -> planner: - 3+8\n- 9+9",
        "1 seen=1 3+8 -> worker: 11",
        "2 seen=1 9+9 -> worker: 18",
        "3 seen=3 11\n18 -> planner: 11;18",
    ]
    assert [turn.caller for turn in episode.turns] == [None, 0, 0, None]
    assert episode.rewards == {"planner": 1.0}


async def test_a_message_without_a_subtask_is_the_answer() -> None:
    scripts = {"planner": lines("11;18"), "worker": lines("")}
    [episode] = await play(SumLists(), Swarm(stages=3), ["planner", "worker"], scripts, TASK)
    assert [turn.agent for turn in episode.turns] == ["planner"]
    assert episode.success == 1.0


async def test_stages_and_calls_are_limited_and_prompts_are_filled() -> None:
    agents = [
        Agent("a", prompt="Plan {question}"),
        Agent("b", system="Add.", prompt="{subtask} of {question}"),
    ]
    scripts = {"a": lines("* x\n* {question}\n* z", "* again", "* 11;18"), "b": lambda _: " one\nline "}
    workflow = Swarm(mark="* ", calls=2, stages=2, report="{question}: {reports}")
    [episode] = await play(SumLists(), workflow, agents, scripts, TASK)
    assert transcript(episode) == [
        "0 seen=0 Plan 3+8;9+9 -> a: * x\n* {question}\n* z",
        "1 seen=1 Add. | x of 3+8;9+9 -> b:  one\nline ",
        "2 seen=1 Add. | {question} of 3+8;9+9 -> b:  one\nline ",
        "3 seen=3 3+8;9+9: one line\none line -> a: * again",
        "4 seen=4 Add. | again of 3+8;9+9 -> b:  one\nline ",
        "5 seen=5 3+8;9+9: one line -> a: * 11;18",
    ]
    assert episode.success == 0.0


@pytest.mark.parametrize(
    ("workflow", "agents"),
    [
        (Swarm(), ["alone"]),
        (Swarm(), ["a", "b", "c"]),
        (Swarm(worker="a"), ["a", "b"]),
        (Swarm(worker="missing"), ["a", "b"]),
        (Swarm(report="{subtask}"), ["a", "b"]),
        (Swarm(), [Agent("a", prompt="{reports}"), Agent("b")]),
        (Swarm(), ["a", "subtask"]),
    ],
)
def test_a_team_that_does_not_fit_is_an_error(workflow: Swarm, agents: list[Agent | str]) -> None:
    team = [Agent(agent) if isinstance(agent, str) else agent for agent in agents]
    with pytest.raises(ConfigError):
        workflow.check(team, SumLists())


def test_a_game_has_no_answer() -> None:
    with pytest.raises(ConfigError):
        Swarm().check([Agent("a"), Agent("b")], Matrix())
