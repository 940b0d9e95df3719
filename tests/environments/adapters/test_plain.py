from __future__ import annotations

import re
from typing import Any

import pytest
from tests.workflows.stage import lines, play

from kapelle.environment import environment_class
from kapelle.environments.adapters.plain import Plain
from kapelle.errors import ConfigError
from kapelle.workflows.play import PlayWorkflow


class Countdown:
    """Rewards the action `wait`; knows nothing of kapelle."""

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


async def test_a_plain_class_runs_to_its_end() -> None:
    environment = Plain(path=f"{HERE}:Countdown", arguments={"start": 2})
    closed = Countdown.closed
    task = environment.task("train", 0)
    environment.check(["a"])
    [episode] = await play(
        environment, PlayWorkflow(memory="conversation"), ["a"], {"a": lines("wait", "run")}, task
    )
    assert episode.error is None
    assert [turn.new_messages[0].content for turn in episode.turns] == ["2 left", "1 left"]
    assert [turn.reward for turn in episode.turns] == [0.25, 0.0]
    assert episode.total("a") == 0.25
    assert not episode.truncated
    assert Countdown.closed == closed + 1


async def test_reset_gets_the_seed_and_max_steps_truncates() -> None:
    environment = Plain(path=f"{HERE}:Echo", max_steps=2)
    task = environment.task("train", 0)
    [episode] = await play(environment, PlayWorkflow(), ["a"], {"a": lines("hello", "hello")}, task)
    assert len(episode.turns) == 2
    assert episode.truncated
    assert episode.turns[0].new_messages[0].content == str(episode.seed)
    [short] = await play(environment, PlayWorkflow(), ["a"], {"a": lambda request: "bye"}, task)
    assert len(short.turns) == 1
    assert not short.truncated


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("none", "observation"),
        ("rich", r"outside the declared range \[0.0, 1.0\]"),
        ("nan", "nan"),
        ("words", "much"),
    ],
)
async def test_an_invalid_result_fails_the_episode(answer: str, message: str) -> None:
    environment = Plain(path=f"{HERE}:Broken")
    [episode] = await play(
        environment, PlayWorkflow(), ["a"], {"a": lines(answer)}, environment.task("train", 0)
    )
    assert re.search(message, episode.error or "")


def test_an_invalid_class_is_rejected() -> None:
    assert environment_class("plain") is Plain
    with pytest.raises(ConfigError, match="reset"):
        Plain(path="pathlib:Path").check(["a"])
    with pytest.raises(ConfigError, match="imported"):
        Plain(path="no.such:Thing").check(["a"])
    with pytest.raises(ConfigError, match="Countdown"):
        Plain(path="Countdown").check(["a"])
    with pytest.raises(ConfigError, match=r"team\.agents"):
        Plain(path=f"{HERE}:Echo").check(["a", "b"])
