from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pettingzoo")

from tests.workflows.stage import lines, play

from kapelle.environment import environment_class
from kapelle.environments.adapters.pettingzoo import PettingZoo, ZooState
from kapelle.errors import ConfigError, EpisodeError
from kapelle.workflows.play import PlayWorkflow

PATH = "tests.environments.adapters.zoo_games"


def start(seed: int = 0, **settings: Any) -> ZooState:
    environment = PettingZoo.model_validate({"path": PATH, "rules": "none", **settings})
    environment.check(["a", "b"])
    return environment.start(environment.task("train", 0), ["a", "b"], seed)


async def test_agents_move_in_turn_and_get_rewards_after_their_first_move() -> None:
    world = start()
    assert world.movers() == ("a",)
    assert world.observe("a") == "3\nLegal actions: <1 | 2>"
    assert (world.legal("a"), world.legal("b")) == (["1", "2"], [])
    assert world.observe("b") == "3", "only the mover reads the actions"
    assert await world.step({"a": "1"}) == {"a": 0.0}
    assert await world.step({"b": " 1 "}) == {"a": 0.0, "b": 0.0}
    assert world.observe("a") == "1\nLegal actions: <1>"
    assert await world.step({"a": "1"}) == {"a": 1.0, "b": -1.0}
    assert world.movers() == ()
    outcome = world.outcome()
    assert outcome.rewards == {"a": 0.0, "b": 0.0}
    assert not outcome.truncated
    await world.close()


async def test_a_loser_without_a_move_gets_its_reward_at_the_end() -> None:
    world = start(arguments={"sticks": 2})
    assert await world.step({"a": "2"}) == {"a": 1.0}
    assert world.outcome().rewards == {"a": 0.0, "b": -1.0}


@pytest.mark.parametrize("text", ["3", "one", "", "2.0"])
async def test_a_random_action_replaces_an_illegal_one_with_a_penalty(text: str) -> None:
    environment = PettingZoo(path=PATH, penalty=-0.5, max_rounds=10, rules="none")
    assert environment.reward_range == (-6.0, 1.0)
    remaining = set()
    for seed in range(20):
        world = environment.start(environment.task("train", 0), ["a", "b"], seed)
        assert await world.step({"a": text}) == {"a": -0.5}
        assert world.outcome().info["invalid"] == {"a": 1, "b": 0}
        remaining.add(world.observe("b")[0])
    assert remaining == {"1", "2"}


async def test_agents_move_at_once_in_a_parallel_game() -> None:
    environment = PettingZoo(path=PATH, turns="parallel", rules="none")
    scripts = {"a": lines("1", "0"), "b": lines("1", "1")}
    workflow = PlayWorkflow(memory="conversation")
    [episode] = await play(environment, workflow, ["a", "b"], scripts, environment.task("train", 0))
    assert episode.error is None
    assert [turn.completed_before for turn in episode.turns] == [0, 0, 2, 2]
    assert episode.turns[2].new_messages[0].content == "1 2\n1 1\nLegal actions: <0 | 1>"
    assert [episode.total(agent) for agent in ("a", "b")] == [0.5, 0.5]


async def test_a_limit_of_rounds_truncates() -> None:
    world = start(max_rounds=1)
    await world.step({"a": "1"})
    assert world.movers() == ()
    assert world.outcome().truncated
    with pytest.raises(EpisodeError, match="not of"):
        await world.step({"b": "1"})


@pytest.mark.parametrize(
    ("turns", "moves"), [("aec", [{"a": "1"}, {"b": "1"}]), ("parallel", [{"a": "1", "b": "1"}])]
)
async def test_a_limit_of_the_environment_truncates(turns: str, moves: list[dict[str, str]]) -> None:
    for limit, cut in ((len(moves), True), (100, False)):
        world = start(turns=turns, arguments={"limit": limit})
        while world.movers():
            await world.step(moves[0] if len(moves) == 1 else dict.fromkeys(world.movers(), "1"))
        assert world.outcome().truncated == cut


def test_wrong_teams_and_paths_are_rejected() -> None:
    assert environment_class("pettingzoo") is PettingZoo
    with pytest.raises(ConfigError, match="2 players"):
        PettingZoo(path=PATH).check(["a"])
    with pytest.raises(ConfigError, match="imported"):
        PettingZoo(path="no.such.module").check(["a", "b"])
    with pytest.raises(ConfigError, match="has no `env`"):
        PettingZoo(path="tests.support.tiny").check(["a", "b"])
