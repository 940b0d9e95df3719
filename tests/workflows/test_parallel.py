from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
from tests.workflows.stage import expert, lines, play, transcript

from kapelle.environment import Environment, Outcome
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.matrix import Matrix
from kapelle.errors import ConfigError
from kapelle.team import Agent
from kapelle.types import Split, Task
from kapelle.workflows.parallel import Parallel

MATCH = Task("train-0", "")


async def test_a_repeated_game_is_played_to_its_end() -> None:
    environment = Matrix(game="prisoners_dilemma", rounds=2, rules="none")
    scripts = {"b": lines("C", "D"), "a": lines("C", "C")}
    [episode] = await play(environment, Parallel(), ["a", "b"], scripts, MATCH)
    assert transcript(episode) == [
        "0 seen=0 1/2 CD -> a: C",
        "1 seen=0 2/2 CD -> b: C",
        "2 seen=2 1/2 CD CC -> a: C",
        "3 seen=2 2/2 CD CC -> b: D",
    ]
    assert [turn.reward for turn in episode.turns] == [3.0, 3.0, 0.0, 5.0]
    assert (episode.total("a"), episode.total("b")) == (3.0, 8.0)
    assert episode.error is None


async def test_an_agent_continues_its_own_conversation() -> None:
    environment = Matrix(game="xor", rounds=2, rules="none")
    scripts = {"a": lines("A", "A"), "b": lines("B", "B")}
    [episode] = await play(environment, Parallel(), ["a", "b"], scripts, MATCH)
    first, second = episode.by("a")
    assert second.prompt_ids[: len(first.prompt_ids) + 1] == (*first.prompt_ids, *b"A")
    assert b"B" not in bytes(first.prompt_ids).replace(b"AB", b""), "nothing of b's move of the same round"


async def test_simultaneous_turns_are_in_team_order() -> None:
    scripts = {name: lines("A") for name in ("z", "y", "x")}
    payoffs = dict.fromkeys((a + b + c for a in "AB" for b in "AB" for c in "AB"), 1.0)
    [episode] = await play(
        Matrix(game="custom", payoffs=payoffs), Parallel(), ["z", "y", "x"], scripts, MATCH
    )
    assert [(turn.index, turn.agent, turn.completed_before) for turn in episode.turns] == [
        (0, "z", 0),
        (1, "y", 0),
        (2, "x", 0),
    ]


async def test_on_a_question_every_agent_answers_for_itself() -> None:
    task = Task("train-0", "47+85", {"answer": 132})
    scripts = {"a": lines("132"), "b": lines("122"), "c": expert(Arithmetic())}
    [episode] = await play(
        Arithmetic(), Parallel(), ["a", "b", Agent("c", prompt="{question}=")], scripts, task
    )
    assert [turn.new_messages[0].content for turn in episode.turns] == ["47+85", "47+85", "47+85="]
    assert episode.rewards == {"a": 1.0, "b": 0.0, "c": 1.0}
    assert episode.success == pytest.approx(2 / 3)
    assert "final" not in episode.info


class Secrets:
    """Each agent is shown a number that only it may know, and moves alone in turn."""

    name = "secrets"
    reward_range = (0.0, 1.0)
    sources: Mapping[Split, str] = {"train": "made up", "test": "made up"}

    def __init__(self, pays: float = 1.0, stranger: bool = False) -> None:
        self.pays, self.stranger = pays, stranger
        self.closed = 0

    def check(self, agents: Sequence[str]) -> None: ...

    def size(self, split: Split) -> int | None:
        return 1

    def task(self, split: Split, index: int) -> Task:
        return Task("train-0", "", {"secrets": {"a": "secret-of-a", "b": "secret-of-b"}})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SecretsState:
        return SecretsState(self, task, tuple(agents))


class SecretsState:
    def __init__(self, environment: Secrets, task: Task, agents: tuple[str, ...]) -> None:
        self.environment, self.task, self.waiting = environment, task, agents

    def observe(self, agent: str) -> str:
        return str(self.task.data["secrets"][agent])

    def movers(self) -> tuple[str, ...]:
        return self.waiting[:1]

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        if "stumble" in actions.values():
            raise RuntimeError("the world broke")
        self.waiting = self.waiting[1:]
        return dict.fromkeys(actions, self.environment.pays)

    def outcome(self) -> Outcome:
        return Outcome({"nobody": 1.0} if self.environment.stranger else {})

    async def close(self) -> None:
        self.environment.closed += 1


SECRET_TASK = Secrets().task("train", 0)


async def test_a_private_view_reaches_its_agent_alone() -> None:
    scripts = {"a": lines("x"), "b": lines("y")}
    [episode] = await play(Secrets(), Parallel(), ["a", "b"], scripts, SECRET_TASK)
    assert transcript(episode) == ["0 seen=0 secret-of-a -> a: x", "1 seen=1 secret-of-b -> b: y"]
    assert b"secret-of-a" not in bytes(episode.turns[1].prompt_ids)


async def test_a_failing_environment_gives_a_failed_episode_and_is_closed() -> None:
    environment = Secrets()
    said = iter(["x", "y", "x", "stumble"])
    scripts = dict.fromkeys(("a", "b"), lambda request: next(said))
    good, bad = await play(environment, Parallel(), ["a", "b"], scripts, SECRET_TASK, samples=2)
    failed = [episode for episode in (good, bad) if episode.error]
    (error,) = [str(episode.error) for episode in failed]
    assert re.fullmatch(r"RuntimeError: the world broke \(test_parallel.py, line \d+\)", error)
    assert failed[0].turns, "what was said is kept"
    assert failed[0].rewards == {}
    assert environment.closed == 2


@pytest.mark.parametrize("pays", [1.5, -0.1, float("nan"), float("inf")])
async def test_a_reward_outside_the_declared_range_is_an_error_never_a_number(pays: float) -> None:
    scripts = {"a": lines("x"), "b": lines("y")}
    [episode] = await play(Secrets(pays), Parallel(), ["a", "b"], scripts, SECRET_TASK)
    assert episode.error
    assert "outside the declared range [0.0, 1.0]" in episode.error


async def test_a_reward_for_a_stranger_is_an_error() -> None:
    scripts = {"a": lines("x"), "b": lines("y")}
    [episode] = await play(Secrets(stranger=True), Parallel(), ["a", "b"], scripts, SECRET_TASK)
    assert episode.error
    assert "'nobody', which is not in the team" in episode.error


def test_a_prompt_with_an_unknown_field_raises_an_error() -> None:
    environment: Environment = Matrix()
    with pytest.raises(ConfigError, match=r"uses \{b\}"):
        Parallel().check([Agent("a", prompt="{b}"), Agent("b")], environment)
