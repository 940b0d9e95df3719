"""Trees in games, where agents move at once and cards are hidden, and in every workflow."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import Any, cast

import pytest
from tests.support.plugins import Digest
from tests.support.trees import at_grpo, candidates, many, moments, stage

from kapelle.algorithm import Algorithm, Data
from kapelle.algorithms.magrpo import MAGRPO
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.matrix import Matrix
from kapelle.rollout.episodes import roll_out_episode, rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.types import Episode
from kapelle.workflow import workflow_class
from kapelle.workflows.parallel import Parallel
from kapelle.workflows.play import PlayWorkflow

TABLE = {
    "AA": (4.0, 1.0), "AB": (0.0, 2.0), "AC": (1.0, 7.0),
    "BA": (3.0, 5.0), "BB": (2.0, 6.0), "BC": (9.0, 3.0),
}  # fmt: skip


def moves(request: Request) -> str:
    return random.Random(request.seed).choice("AB" if request.agent == "a" else "ABC")


def game(algorithm: Algorithm, rounds: int = 1, **over: Any) -> RolloutSetup:
    engine = ScriptedEngine({"a": moves, "b": moves})
    environment = Matrix(game="custom", payoffs=TABLE, rounds=rounds, memory=None)
    return stage(
        algorithm,
        engine,
        names=("a", "b"),
        environment=environment,
        workflow=over.pop("workflow", Parallel()),
        **over,
    )


def both(episode: Episode, first: int = 0) -> tuple[dict[str, list[str]], dict[str, list[float]]]:
    """Texts and worths of the candidates of turns `first` and `first` + 1, in the order of sampling."""
    texts, worths = {}, {}
    for index in (first, first + 1):
        chosen, *others = moments(episode)[index]
        texts[chosen.agent] = [turn.text for turn in (chosen, *others)]
        worths[chosen.agent] = [cast("float", turn.continuation_return) for turn in (chosen, *others)]
    return texts, worths


class TestSimultaneous:
    """Matrix games of one round: every worth is known from the table."""

    async def test_alone_beside_the_others_first_candidate(self) -> None:
        for one in await many(game(at_grpo(4, team_reward="individual")), 30):
            (episode,) = one.episodes
            chosen = {turn.agent: turn for turn in episode.turns}
            # The first candidate is what the agent says without a tree.
            plain = await roll_out_episode(replace(game(at_grpo()), data=Data()), one.task, episode.seed)
            said = {turn.agent: turn.text for turn in plain.turns}
            for agent, seat in (("a", 0), ("b", 1)):
                for turn in candidates(episode, agent):
                    assert (
                        turn.continuation_return == TABLE["".join({**said, agent: turn.text}.values())][seat]
                    )
                assert chosen[agent].continuation_return == max(
                    t.continuation_return or 0.0 for t in candidates(episode, agent)
                )

    async def test_aligned_takes_the_candidates_of_one_number_together(self) -> None:
        algorithm = MAGRPO(tree=True, group_size=4, team_reward="sum", scale="none").build()
        for one in await many(game(algorithm), 30):
            texts, worths = both(one.episodes[0])
            together = [sum(TABLE[a + b]) for a, b in zip(texts["a"], texts["b"], strict=True)]
            assert worths == {"a": together, "b": together}

    async def test_cross_is_the_mean_over_all_combinations(self) -> None:
        algorithm = MAGRPO(tree=True, group_size=3, joint="cross", team_reward="mean", scale="none").build()
        for one in await many(game(algorithm), 30):
            texts, worths = both(one.episodes[0])
            paid = [[fmean(TABLE[a + b]) for b in texts["b"]] for a in texts["a"]]
            assert worths["a"] == pytest.approx([fmean(row) for row in paid])
            assert worths["b"] == pytest.approx([fmean(column) for column in zip(*paid, strict=True)])


class TestOpenSpiel:
    async def test_a_game_with_hidden_cards_is_played_on_with_the_same_deal(self) -> None:
        pytest.importorskip("pyspiel")
        from kapelle.environments.openspiel.environment import OpenSpiel

        def bets(request: Request) -> str:
            return random.Random(request.seed).choice(["Pass", "Bet"])

        setup = stage(
            at_grpo(4, team_reward="individual", continuations=2),
            ScriptedEngine({"a": bets, "b": bets}),
            names=("a", "b"),
            environment=OpenSpiel(),
            workflow=PlayWorkflow(),
        )
        for one in await many(setup, 20):
            (episode,) = one.episodes
            assert episode.error is None
            assert len(episode.branches) == 3 * len(episode.turns)
            for turn in candidates(episode, "a"):
                assert turn.continuation_return in {-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0}
            # The last move's worth is what it pays.
            last = episode.turns[-1]
            assert last.continuation_return == episode.total(last.agent)


WORKFLOWS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "solo": (("a",), {}),
    "parallel": (("a", "b"), {}),
    "chain": (("a", "b", "c"), {}),
    "debate": (("a", "b", "c"), {"rounds": 3, "consensus": 1.0, "settled_after": 2, "score_rounds": True}),
    "vote": (("a", "b", "c"), {}),
    "summary": (("a", "b", "c"), {"layers": 2}),
    "reflect": (("a", "b"), {"attempts": 3, "accept": "yes"}),
    "cory": (("a", "b"), {}),
    "router": (("a", "b", "c"), {"handovers": 3}),
    "dag": (
        ("a", "b"),
        {
            "nodes": [
                {"id": "x", "agent": "a"},
                {"id": "y", "agent": "b"},
                {"id": "z", "agent": "a", "dependencies": ["x", "y"]},
            ]
        },
    ),
}


class TestEveryWorkflow:
    @pytest.mark.parametrize("name", WORKFLOWS)
    async def test_it_is_led_to_every_moment_again(self, name: str) -> None:
        names, settings = WORKFLOWS[name]

        def babbles(request: Request) -> str:
            return random.Random(request.seed).choice(["yes", "no", "@b", "@c well"])

        setup = stage(
            at_grpo(3, continuations=2),
            ScriptedEngine(dict.fromkeys(names, babbles)),
            names=names,
            environment=Digest(),
            workflow=workflow_class(name)(**settings),
        )
        for one in await many(setup, 12):
            (episode,) = one.episodes
            assert episode.error is None
            assert all(turn.continuation_return is not None for turn in (*episode.turns, *episode.branches))
            assert len(episode.branches) == 2 * len(episode.turns)

    async def test_answers_after_wrong_ones_are_repeated(self) -> None:
        from kapelle.environments.arithmetic import Arithmetic
        from kapelle.workflows.dag import Dag

        sums = Arithmetic(digits=1)
        task = sums.task("train", 0)
        gold = sums.script("a", task, [], 0)

        def guesses(request: Request) -> str:
            return random.Random(request.seed).choice([gold, "no", "no", "1"])

        graph = Dag.model_validate({"nodes": [{"id": "x", "agent": "a"}], "max_assistant_turns": 3})
        setup = stage(
            at_grpo(3), ScriptedEngine({"a": guesses}), names=("a",), environment=sums, workflow=graph
        )
        (one,) = await rollout(setup, [task], 12, 0)
        assert {episode.error for episode in one.episodes} == {None}
        assert max(len(episode.turns) for episode in one.episodes) > 1
        # Of the first answers the right ones end it; a wrong one is worth what the later ones bring.
        first = [turn for episode in one.episodes for turn in moments(episode)[0]]
        assert {turn.continuation_return for turn in first if turn.text == gold} == {1.0}
        assert {turn.continuation_return for turn in first if turn.text != gold} == {0.0, 1.0}
