"""The adapter with a fake of the package: the same calls, on a simple game."""

from __future__ import annotations

import random
import sys
from types import ModuleType
from typing import Any

import pytest
from tests.workflows.stage import lines, play

from kapelle.environment import environment_class
from kapelle.environments.adapters.textarena import TextArena
from kapelle.errors import ConfigError
from kapelle.workflows.play import PlayWorkflow

RAISING = {
    "index": IndexError("list index out of range"),
    "syntax": SyntaxError("invalid syntax"),
    "assert": AssertionError("a move"),
}


class Guess:
    """Players guess a number from 0 to 9 in turn; the first correct guess wins. It draws as TextArena's games do."""

    def reset(self, num_players: int, seed: int) -> None:
        assert num_players == 2, "Guess is for two."
        random.seed(seed)
        self.number, self.player, self.completed_before = (
            random.randrange(10),
            0,
            [["Guess 0 to 9."], ["Guess 0 to 9."]],
        )
        self.winner: int | None = None
        self.reward: float | str = 1

    def get_observation(self) -> tuple[int, str]:
        return self.player, "\n".join(self.completed_before[self.player])

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        if action.isdigit():
            int(action)  # as games do: too many digits are a ValueError
        if action in RAISING:
            raise RAISING[action]
        if action == "exchanged":
            self.winner = self.player
            self.reward = "Invalid action format"
            return True, {}
        for seen in self.completed_before:
            seen.append(f"[Player {self.player}] {action}, the die shows {random.randrange(1000)}")
        if action == str(self.number):
            self.winner = self.player
        self.player = 1 - self.player
        return self.winner is not None, {}

    def close(self) -> tuple[dict[int, Any], dict[int, dict[str, Any]]]:
        assert self.winner is not None
        return {self.winner: self.reward, 1 - self.winner: -1}, {k: {"reason": "guessed"} for k in range(2)}


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("textarena")

    def make(env_id: str) -> Guess:
        if env_id != "Guess-v0":
            raise ValueError(f"Environment {env_id} not found in registry.")
        return Guess()

    vars(module)["make"] = make
    monkeypatch.setitem(sys.modules, "textarena", module)


async def test_players_move_in_turn_and_the_winner_gets_the_reward() -> None:
    environment = TextArena(id="Guess-v0")
    world = environment.start(environment.task("train", 0), ["a", "b"], seed=5)
    moves = 0
    while world.movers():
        assert world.movers() == (("a", "b")[moves % 2],)
        seen = world.observe(world.movers()[0])
        assert len(seen.splitlines()) == moves + 1, "all moves so far"
        await world.step({world.movers()[0]: str(moves)})
        moves += 1
    winner, loser = (("a", "b"), ("b", "a"))[(moves - 1) % 2]
    assert world.outcome().rewards == {winner: 1.0, loser: -1.0}
    assert world.outcome().info["reasons"] == {"a": "guessed", "b": "guessed"}
    assert not world.outcome().truncated


async def test_games_draw_from_their_seed_and_restore_the_shared_generator() -> None:
    environment = TextArena(id="Guess-v0")
    task = environment.task("train", 0)
    random.seed(1)
    before = random.getstate()
    scripts = {"a": lines("1"), "b": lines("2")}
    workflow = PlayWorkflow(max_rounds=2, memory="conversation")
    [one] = await play(environment, workflow, ["a", "b"], scripts, task, seed=1)
    assert random.getstate() == before
    random.seed(2)
    [two] = await play(environment, workflow, ["a", "b"], scripts, task, seed=1)
    assert "the die shows" in one.turns[1].new_messages[-1].content
    assert one == two


@pytest.mark.parametrize("text", ["9" * 5000, "index", "syntax", "assert"])
async def test_a_move_that_makes_the_game_raise_loses(text: str) -> None:
    environment = TextArena(id="Guess-v0")
    scripts = {"a": lines("none"), "b": lines(text)}
    [episode] = await play(
        environment, PlayWorkflow(), ["a", "b"], scripts, environment.task("train", 0), seed=0
    )
    assert (episode.error, episode.rewards) == (None, {"a": 0.0, "b": -1.0})
    assert "the game raised" in episode.info["reasons"]["b"]
    assert not episode.truncated


async def test_a_reward_that_is_no_number_is_an_invalid_move() -> None:
    """`set_invalid_move(progress, reason)`, with its arguments exchanged, as in Countdown-v0 of 0.7.4."""
    environment = TextArena(id="Guess-v0")
    scripts = {"a": lines("none"), "b": lines("exchanged")}
    [episode] = await play(
        environment, PlayWorkflow(), ["a", "b"], scripts, environment.task("train", 0), seed=0
    )
    assert (episode.error, episode.rewards) == (None, {"a": 0.0, "b": -1.0})


async def test_an_unfinished_game_has_no_rewards() -> None:
    environment = TextArena(id="Guess-v0", max_moves=1)
    world = environment.start(environment.task("train", 0), ["a", "b"], seed=0)
    await world.step({"a": "none"})
    assert world.movers() == ()
    assert (world.outcome().rewards, world.outcome().truncated) == ({"a": 0.0, "b": 0.0}, True)


def test_unknown_games_and_wrong_teams_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_class("textarena") is TextArena
    with pytest.raises(ConfigError, match="Guess is for two"):
        TextArena(id="Guess-v0").check(["a", "b", "c"])
    with pytest.raises(ConfigError, match="not found in registry"):
        TextArena(id="Gues-v0").check(["a", "b"])
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match="pip install textarena"):
        TextArena(id="Guess-v0").check(["a", "b"])


async def test_a_move_follows_thinking_and_own_rules_precede_those_of_the_game() -> None:
    environment = TextArena(id="Guess-v0", thinking=True, rules="Guess the number.")
    world = environment.start(environment.task("train", 0), ["a", "b"], seed=5)
    first = world.movers()[0]
    assert world.observe(first).startswith("Guess the number.\nYou may think first")
    await world.step({first: "<think>0, 1 or 2?</think>17"})
    second = world.movers()[0]
    assert f"[Player {first == 'b':d}] 17, the die" in world.observe(second)
    assert "0, 1 or 2?" not in world.observe(second)
