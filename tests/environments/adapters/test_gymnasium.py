from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from gymnasium import Env, spaces

from kapelle.environment import environment_class
from kapelle.environments.adapters.gymnasium import Gymnasium, observation_text
from kapelle.errors import ConfigError


async def test_a_hand_of_blackjack_by_numbers() -> None:
    environment = Gymnasium(id="Blackjack-v1", rewards=(-1.5, 1.5))
    environment.check(["a"])
    task = environment.task("train", 0)
    world = environment.start(task, ["a"], seed=1)
    first = world.observe("a")
    total, shown, _ = map(int, first.splitlines()[0].split())
    assert 4 <= total <= 21
    assert 1 <= shown <= 10
    assert first.splitlines()[1] == "Legal actions: <0 | 1>"
    assert environment.start(task, ["a"], seed=1).observe("a") == first
    rewards = await world.step({"a": "0"})
    assert rewards["a"] in {-1.0, 0.0, 1.0, 1.5}
    assert world.movers() == ()
    assert not world.outcome().truncated
    assert world.outcome().info["total"] == rewards["a"]
    await world.close()


async def test_a_mask_limits_actions_and_illegal_ones_have_a_penalty() -> None:
    environment = Gymnasium(id="Taxi-v4", rewards=(-200, 20), penalty=-3, max_steps=2)
    world = environment.start(environment.task("train", 0), ["a"], seed=0)
    legal = world.observe("a").rpartition("<")[2].removesuffix(">").split(" | ")
    assert 1 < len(legal) < 6, "a taxi at a wall has fewer actions"
    illegal = next(str(number) for number in range(6) if str(number) not in legal)
    assert await world.step({"a": illegal}) == {"a": -4.0}, "the penalty and the reward of a step"
    assert await world.step({"a": "north!"}) == {"a": -4.0}
    assert world.movers() == ()
    assert world.outcome().truncated
    assert environment.reward_range == (-206.0, 20.0)
    environment = Gymnasium(id="Taxi-v4", arguments={"max_episode_steps": 1})
    world = environment.start(environment.task("train", 0), ["a"], seed=0)
    await world.step({"a": "0"})
    assert world.outcome().truncated, "by the environment's own limit"


class Letters(Env[str, str]):
    """Rewards a text that begins with `a`."""

    observation_space = spaces.Text(5)
    action_space = spaces.Text(3, min_length=2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return "Letters?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return "", float(action[0] == "a"), True, False, {}


@pytest.mark.parametrize(("text", "reward"), [("ab", 1.0), ("a", -2.0), ("a b", -2.0), ("abcd", -2.0)])
async def test_a_text_outside_its_space_is_replaced_by_one_inside(text: str, reward: float) -> None:
    environment = Gymnasium(id="tests.environments.adapters.test_gymnasium:Letters", penalty=-2.0)
    world = environment.start(environment.task("train", 0), ["a"], seed=0)
    assert await world.step({"a": text}) == {"a": reward}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "CartPle-v1"}, "cannot be created"),
        ({"id": "Pendulum-v1"}, "number or a string"),
        ({"id": "Blackjack-v1", "arguments": {"cards": 3}}, "cannot be created"),
    ],
)
def test_unknown_ids_and_other_action_spaces_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gymnasium.model_validate(settings).check(["a"])


def test_one_agent_and_the_package_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_class("gymnasium") is Gymnasium
    with pytest.raises(ConfigError, match="one agent"):
        Gymnasium(id="Blackjack-v1").check(["a", "b"])
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"pip install 'kapelle\[games\]'"):
        Gymnasium(id="Blackjack-v1").check(["a"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (np.array([1, 0, 2]), "1 0 2"),
        (np.array([[0.5, 1.0], [2.0, 0.25]]), "0.5 1\n2 0.25"),
        (np.int64(7), "7"),
        ((15, 10, 0), "15 10 0"),
        ({"observation": np.array([3]), "action_mask": np.array([1, 0])}, "3"),
        ({"you": 1, "they": (2, 3)}, "you: 1\nthey: 2 3"),
        (np.array([True, False]), "1 0"),
    ],
)
def test_observations_become_text(value: Any, text: str) -> None:
    assert observation_text(value) == text
