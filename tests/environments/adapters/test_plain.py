from __future__ import annotations

from typing import Any

import pytest
from tests.workflows.stage import lines, play

from kapelle.environment import environment_class
from kapelle.environments.adapters.plain import Plain
from kapelle.errors import ConfigError
from kapelle.workflows.play import PlayWorkflow


class Countdown:
    """Pays for patience; nothing in it knows of kapelle."""

    closed = 0

    def __init__(self, start: int = 3) -> None:
        self.start = start

    def reset(self) -> str:
        self.left = self.start
        return f"{self.left} left"

    def step(self, action: str) -> tuple[str | None, float]:
        self.left -= 1
        return (f"{self.left} left" if self.left else None), 0.25 * (action == "wait")

    def close(self) -> None:
        Countdown.closed += 1


class Echo:
    """Shows its seed and ends when a third value says so."""

    def reset(self, seed: int) -> str:
        return str(seed)

    def step(self, action: str) -> tuple[str, float, bool]:
        return action, 0.0, action == "bye"


class Broken:
    answer: Any = None

    def reset(self) -> str:
        return "go"

    def step(self, action: str) -> Any:
        return {"none": None, "rich": ("x", 7.0, True), "nan": ("x", float("nan")), "words": ("x", "much")}[
            action
        ]


HERE = "tests.environments.adapters.test_plain"


async def test_a_plain_class_is_played_to_its_end() -> None:
    environment = Plain(path=f"{HERE}:Countdown", arguments={"start": 2})
    closed = Countdown.closed
    task = environment.task("train", 0)
    environment.check(["a"])
    [episode] = await play(
        environment, PlayWorkflow(memory="conversation"), ["a"], {"a": lines("wait", "run")}, task
    )
    assert episode.error is None
    assert [turn.heard[0].content for turn in episode.turns] == ["2 left", "1 left"]
    assert [turn.reward for turn in episode.turns] == [0.25, 0.0]
    assert episode.total("a") == 0.25
    assert not episode.truncated
    assert Countdown.closed == closed + 1


async def test_a_seed_is_handed_on_and_a_limit_of_steps_cuts_off() -> None:
    environment = Plain(path=f"{HERE}:Echo", max_steps=2)
    task = environment.task("train", 0)
    [episode] = await play(environment, PlayWorkflow(), ["a"], {"a": lines("hello", "hello")}, task)
    assert len(episode.turns) == 2
    assert episode.truncated
    assert episode.turns[0].heard[0].content == str(episode.seed)
    [short] = await play(environment, PlayWorkflow(), ["a"], {"a": lambda request: "bye"}, task)
    assert len(short.turns) == 1
    assert not short.truncated


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("none", "returns `observation, reward`"),
        ("rich", r"outside the declared range \[0.0, 1.0\]"),
        ("nan", "paid nan"),
        ("words", "a text .* and a number"),
    ],
)
async def test_what_a_class_may_not_return_fails_the_episode_and_says_why(answer: str, message: str) -> None:
    environment = Plain(path=f"{HERE}:Broken")
    [episode] = await play(
        environment, PlayWorkflow(), ["a"], {"a": lines(answer)}, environment.task("train", 0)
    )
    assert episode.error is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(episode.error)


def test_what_is_no_world_for_one_is_refused() -> None:
    assert environment_class("plain") is Plain
    with pytest.raises(ConfigError, match="no method `reset`"):
        Plain(path="pathlib:Path").check(["a"])
    with pytest.raises(ConfigError, match="cannot be imported"):
        Plain(path="no.such:Thing").check(["a"])
    with pytest.raises(ConfigError, match="Unknown plain environment"):
        Plain(path="Countdown").check(["a"])
    with pytest.raises(ConfigError, match=r"Set `team.agents: 1`"):
        Plain(path=f"{HERE}:Echo").check(["a", "b"])
