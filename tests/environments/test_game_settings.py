"""Rules before an observation, and moves after thinking."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from tests.workflows.stage import team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.adapters.pettingzoo import PettingZoo
from kapelle.environments.base import INVITATION, spoken
from kapelle.environments.matrix import Matrix
from kapelle.environments.openspiel.environment import GameState, OpenSpiel
from kapelle.environments.openspiel.games import rules_of, spiel
from kapelle.environments.openspiel.text import read_listed
from kapelle.errors import ConfigError
from kapelle.rollout.evaluation.exploitability import language_table
from kapelle.rollout.setup import RolloutSetup as Stage
from kapelle.workflows.play import PlayWorkflow


def game(name: str = "kuhn_poker", **settings: Any) -> OpenSpiel:
    return OpenSpiel.model_validate({"game": name, **settings})


def start(environment: OpenSpiel, *agents: str, seed: int = 0) -> GameState:
    return environment.start(environment.task("train", 0), agents or ("a", "b"), seed)


class TestRules:
    def test_a_game_without_rules_is_described(self) -> None:
        assert rules_of(game("breakthrough").loaded)[0] == (
            "Breakthrough is a game for 2 players. What one player wins the others lose. Results go from -1 to 1."
        )
        observation = start(
            game("breakthrough", rules="Move forward; who reaches the last row wins.")
        ).observe("a")
        assert observation.startswith(
            "Move forward; who reaches the last row wins.\nYou are player 1 of 2 in Breakthrough."
        )

    def test_rules_follow_the_parameters(self) -> None:
        assert "one card of 4, numbered 0 to 3" in rules_of(game("kuhn_poker(players=3)").loaded)[0]
        assert "last object loses" in rules_of(game("nim").loaded)[0]
        assert "last object wins" in rules_of(game("nim(is_misere=False)").loaded)[0]
        small = rules_of(game("hanabi_very_small").loaded)[0]
        assert "each of 1 colour," in small
        assert "holds 2 cards" in small
        assert "one of 3 hint tokens" in small
        assert "one of 1 lives" in small
        assert "holds 4 cards" in rules_of(game("hanabi_full", parameters={"players": 5}).loaded)[0]
        assert "Cooperate and Defect: 0, 10" in rules_of(game("matrix_pd").loaded)[0]

    def test_the_table_of_tiny_hanabi_agrees_with_returns(self) -> None:
        loaded = game("tiny_hanabi").loaded
        table = rules_of(loaded)[0].split("columns the second's: ")[1].rstrip(".").split("; ")
        for one in range(2):
            for other in range(2):
                line = table[one * 2 + other]
                assert line.startswith(f"cards {one} and {other} pay ")
                rows = line.split(" pay ")[1].split(" / ")
                for first in range(3):
                    for second in range(3):
                        state = loaded.new_initial_state()
                        for action in (one, other, first, second):
                            state.apply_action(action)
                        assert state.returns()[0] == float(rows[first].split()[second])

    def test_rules_agree_with_returns(self) -> None:
        def ended(name: str, *moves: str, chance: tuple[int, ...] = ()) -> list[float]:
            state, dealt = spiel().load_game(name).new_initial_state(), iter(chance)
            for move in moves:
                while state.is_chance_node():
                    state.apply_action(next(dealt))
                if state.is_simultaneous_node():
                    state.apply_actions([int(action) for action in move.split()])
                    continue
                names = {state.action_to_string(state.current_player(), a): a for a in state.legal_actions()}
                state.apply_action(names[move])
            returns: list[float] = state.returns()
            assert state.is_terminal()
            return returns

        assert ended("kuhn_poker", "Pass", "Bet", "Pass", chance=(2, 0)) == [-1, 1], "Pass folds"
        assert ended("kuhn_poker", "Bet", "Bet", chance=(2, 0)) == [2, -2], "the highest card wins"
        pair = ("Call", "Call", "Call", "Call")
        assert ended("leduc_poker", *pair, chance=(0, 3, 1)) == [1, -1], "0 and 1 have the same rank"
        assert ended("leduc_poker", *pair, chance=(2, 3, 5)) == [0, 0], "equal ranks share"
        assert ended("liars_dice", "2-1", "Liar", chance=(0, 5)) == [1, -1], "a six counts as every face"
        assert ended("liars_dice", "2-1", "Liar", chance=(0, 4)) == [-1, 1]
        assert ended("nim(pile_sizes=1;1)", "pile:1, take:1;", "pile:2, take:1;") == [1, -1]
        goofspiel = "goofspiel(num_cards=3,points_order=descending,returns_type=total_points)"
        assert ended(goofspiel, "0 0", "2 1") == [2, 1], "equal bids win nothing"

    def test_matrix_games_state_their_payoffs(self) -> None:
        environment = Matrix(game="prisoners_dilemma", rounds=2)
        observation = environment.start(environment.task("train", 0), ["a", "b"], 0).observe("b")
        assert observation.endswith("CC 3, 3; CD 0, 5; DC 5, 0; DD 1, 1.\n2/2 CD")
        long = {f"{a:c}{b:c}": 1.0 for a in range(65, 74) for b in range(65, 74)}
        many = Matrix(game="custom", payoffs=long)
        assert "What a joint move" not in many.start(many.task("train", 0), ["a", "b"], 0).observe("a")

    def test_pettingzoo_describes_a_game_without_rules(self) -> None:
        pytest.importorskip("pettingzoo")
        environment = PettingZoo(path="tests.environments.adapters.zoo_games")
        world = environment.start(environment.task("train", 0), ["a", "b"], 0)
        assert world.observe("a").split("\n") == [
            "sticks, a game for 2 players. Take one of the legal actions, by its number.",
            "3",
            "Legal actions: <1 | 2>",
        ]
        own = PettingZoo(path="tests.environments.adapters.zoo_games", rules="Who takes the last stick wins.")
        assert own.start(own.task("train", 0), ["a", "b"], 0).observe("a").startswith("Who takes the last")


class TestThinking:
    @pytest.mark.parametrize(
        ("text", "move"),
        [
            ("Bet", "Bet"),
            ("<think>They hold the king, so Pass.</think>Bet", "Bet"),
            ("They hold the king.</think>Bet", "Bet"),  # the template opened it
            ("<think>a</think>Pass<think>b</think>Bet", "Bet"),
            ("<think>I write <think> again</think>Bet", "Bet"),
            ("<THINK>Pass</Think>Bet", "Bet"),
            ("<think>Bet", None),
            ("Bet<think>", None),
            ("<think>x</think>Bet<think>y", None),
            ("<think>Bet</think>", None),
            ("</think>", None),
            ("<think>x</think>Bet, or Pass", None),
            ("", None),
        ],
    )
    async def test_a_move_is_read_after_the_last_thought(self, text: str, move: str | None) -> None:
        world = start(game(thinking=True))
        assert (await world.step({"a": text}) == {}) == (move is not None)
        outcome = world.outcome()
        assert outcome.info["invalid"] == {"a": int(move is None), "b": 0}
        if move is not None:
            assert outcome.info["moves"] == [f"1: {move}"]

    def test_the_observation_invites_to_think(self) -> None:
        world = start(game(thinking=True, wording="short"))
        assert world.observe("a").split("\n")[0] == INVITATION
        assert read_listed(world.observe("a")) == ["Pass", "Bet"]
        quiet = start(game(thinking=True, list_moves=False))
        assert read_listed(quiet.observe("a")) == []

    async def test_matrix_and_pettingzoo_read_moves_after_thinking(self) -> None:
        matrix = Matrix(game="xor", thinking=True)
        world = matrix.start(matrix.task("train", 0), ["a", "b"], 0)
        await world.step({"a": "<think>A</think> B", "b": "<think>A"})
        assert world.outcome().info["rounds"] == ["B-"]
        pytest.importorskip("pettingzoo")
        zoo = PettingZoo(path="tests.environments.adapters.zoo_games", thinking=True)
        for text, invalid in (("<think>2</think>1", 0), ("<think>1", 1), ("1<think>", 1)):
            sticks = zoo.start(zoo.task("train", 0), ["a", "b"], 0)
            await sticks.step({"a": text})
            assert sticks.outcome().info["invalid"] == {"a": invalid, "b": 0}

    def test_no_text_inside_a_thought_is_a_move(self) -> None:
        draw = random.Random(0)
        pieces = ["<think>", "</think>", "IN", " ", "\n", "<", "think>", "</"]
        for _ in range(2000):
            text = "".join(draw.choices(pieces, k=draw.randrange(12)))
            move = spoken(text)
            assert (move is None) == ("<think>" in text.rpartition("</think>")[2])
            if move is not None:
                assert text.endswith(move)
                assert "<think>" not in move
                assert "</think>" not in move

    def test_thinking_has_no_exact_values(self) -> None:

        stage = Stage(team_of("a", "b"), game(thinking=True), PlayWorkflow(), ScriptedEngine({}))
        with pytest.raises(ConfigError, match="thinking"):
            language_table(stage, lambda samples: [])
