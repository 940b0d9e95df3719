from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pytest
from tests.workflows.stage import TASK, expert, lines, play, transcript

from kapelle.environment import TeamMoves
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.base import BaseEnvironment, BaseState
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.types import Split, Task
from kapelle.workflows.chain import Chain

REASONER = Agent("reasoner", prompt="{question}")
ACTOR = Agent("actor", prompt="{reasoner}")


async def test_the_actor_sees_the_notes_alone_and_answers() -> None:
    environment = Arithmetic()
    say = expert(environment)
    [episode] = await play(environment, Chain(), [REASONER, ACTOR], {"reasoner": say, "actor": say}, TASK)
    assert transcript(episode) == [
        "0 seen=0 47+85 -> reasoner: 2,12+1",
        "1 seen=1 2,12+1 -> actor: 132",
    ]
    assert episode.error is None
    assert episode.rewards == {"actor": 1.0}, "only the one who acts is scored"
    assert episode.success == 1.0
    assert episode.info["final"] == "132"
    assert episode.info["carry"] is True


async def test_each_bad_habit_alone_spoils_the_answer() -> None:
    environment = Arithmetic()
    good = expert(environment)
    for flawed in ("reasoner", "actor"):
        bad = expert(Arithmetic(flaws={flawed: 1.0}))
        scripts = {"reasoner": good, "actor": good} | {flawed: bad}
        [episode] = await play(environment, Chain(), [REASONER, ACTOR], scripts, TASK)
        assert episode.info["final"] == "122"
        assert episode.success == 0.0
        assert episode.rewards == {"actor": 0.0}


async def test_without_prompts_agents_read_the_question_and_all_earlier_texts() -> None:
    scripts = {"a": lines("add"), "b": lines("carry 1"), "c": lines("132")}
    [episode] = await play(Arithmetic(), Chain(), ["a", "b", "c"], scripts, TASK)
    assert [turn.new_messages[0].content for turn in episode.turns] == [
        "47+85",
        "47+85\n\na: add",
        "47+85\n\na: add\n\nb: carry 1",
    ]


async def test_an_agent_s_text_cannot_change_a_template() -> None:
    scripts = {"a": lines("{question} {b}"), "b": lines("132")}
    [episode] = await play(Arithmetic(), Chain(), ["a", Agent("b", prompt="<{a}>")], scripts, TASK)
    assert episode.turns[1].new_messages[0].content == "<{question} {b}>"


async def test_a_chain_of_one_is_solo() -> None:
    [episode] = await play(Arithmetic(), Chain(), ["a"], {"a": lines("132")}, TASK)
    assert episode.success == 1.0


def test_a_prompt_may_use_earlier_agents_only() -> None:
    with pytest.raises(ConfigError, match=r"agent 'reasoner' uses {actor}.*may use {question}\)"):
        Chain().check([Agent("reasoner", prompt="{actor}"), Agent("actor")], Arithmetic())
    with pytest.raises(ConfigError, match=r"{reasonr}.*Did you mean 'reasoner'"):
        Chain().check([Agent("reasoner"), Agent("actor", prompt="{reasonr}")], Arithmetic())
    with pytest.raises(ConfigError, match=r"agent 'b' uses \{c\}"):
        Chain().check([Agent("a"), Agent("b", prompt="{a} {c}"), Agent("c")], Arithmetic())
    with pytest.raises(ConfigError, match="Rename"):
        Chain().check([Agent("question")], Arithmetic())


class Echo(BaseEnvironment, TeamMoves):
    """Two moves; each shows the last one."""

    name: Literal["tests.workflows.test_chain:Echo"] = "tests.workflows.test_chain:Echo"

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "echoes", "test": "other echoes"}

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", "")

    def start(self, task: Task, agents: Sequence[str], seed: int) -> EchoState:
        return EchoState(task, agents)


class EchoState(BaseState):
    moves: tuple[str, ...] = ("begin",)

    def observe(self, agent: str) -> str:
        return self.moves[-1]

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        self.moves = (*self.moves, final or "")
        self.over = len(self.moves) == 3
        return dict.fromkeys(actions, 0.25)


async def test_with_team_moves_the_chain_runs_for_every_move() -> None:
    said = {"a": lines("left?", "right?"), "b": lines("left", "right")}
    environment = Echo()
    (episode,) = await play(environment, Chain(), ["a", "b"], said, environment.task("train", 0))
    new_messages = [(turn.agent, turn.new_messages[-1].content) for turn in episode.turns]
    assert new_messages == [
        ("a", "begin"),
        ("b", "begin\n\na: left?"),
        ("a", "left"),
        ("b", "left\n\na: right?"),
    ]
    assert [turn.reward for turn in episode.turns] == [0.0, 0.25, 0.0, 0.25]
