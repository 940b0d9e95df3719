"""AT-GRPO: sets by agent and turn, and trees whose sets hold one prompt by construction."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import episode, frozen_copy, group, same_bits, turn

from kapelle import Trainer
from kapelle.algorithm import Credit, Estimates, TurnKey, turns_of
from kapelle.algorithms.at_grpo import ATGRPO
from kapelle.engines.rollout import Request
from kapelle.engines.scripted import ScriptedEngine
from kapelle.environments.arithmetic import Arithmetic
from kapelle.episode_json import dump_episode, load_episode
from kapelle.errors import ConfigError
from kapelle.rollout import Play, rollout
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, Group
from kapelle.workflows.debate import Debate

SMALL: dict[str, Any] = {
    "model": {"embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}},
    "environment": {"name": "arithmetic", "digits": 1},
    "workflow": {"name": "debate", "rounds": 2},
    "team": {"agents": 2, "sampling": {"max_tokens": 2}},
    "algorithm": {"name": "at_grpo", "tree": True, "group_size": 3},
    "training": {"steps": 2, "tasks_per_step": 2},
    "evaluation": {"before_and_after": False},
}


def advantages(credit: Mapping[TurnKey, Credit]) -> list[float]:
    return [float(credit[key].advantage_T[0]) for key in sorted(credit)]


class TestSets:
    def test_turns_of_the_same_number_are_compared(self) -> None:
        # a's returns-to-go: 1 + 2 and 2; 0 + 4 and 4. b's: 3 and 1.
        def one(first: float, last: float, b: float) -> Episode:
            turns = (turn("a", 0, reward=first), turn("b", 1), turn("a", 2))
            return episode(*turns, rewards={"a": last, "b": b})

        credit = ATGRPO(scale="none", team_reward="individual").build().credit
        assert credit is not None
        given = credit([group(one(1.0, 2.0, 3.0), one(0.0, 4.0, 1.0))], Estimates())
        assert advantages(given) == pytest.approx([-0.5, 1.0, -1.0, 0.5, -1.0, 1.0])


def played(branches: int) -> Group:
    """A debate of two on 1-digit sums whose agents are right only in their last candidate of three."""
    environment = Arithmetic(digits=1)
    task = environment.task("train", 0)
    gold = environment.script("a", task, [], 0)
    calls: dict[str, int] = {}

    def speak(request: Request) -> str:
        calls[request.agent] = calls.get(request.agent, 0) + 1
        return gold if branches > 1 and calls[request.agent] % branches == 0 else "no"

    names = ("a", "b")
    team = Team(tuple(Agent(n) for n in names), {"p": Policy("p")}, dict.fromkeys(names, "p"))
    play = Play(team, environment, Debate(rounds=2), ScriptedEngine({"p": speak}), branches=branches)
    return asyncio.run(rollout(play, [task], 1, 0))[0]


class TestTree:
    def test_the_best_candidate_goes_on_and_all_share_its_prompt(self) -> None:
        (one,) = played(3).episodes
        assert one.error is None
        assert [t.score for t in one.turns] == [1.0] * 4
        assert one.success == 1.0
        assert len(one.branches) == 8
        for branch in one.branches:
            assert branch.parent is not None
            chosen = one.turns[branch.parent]
            assert (branch.agent, branch.prompt_ids, branch.score) == (chosen.agent, chosen.prompt_ids, 0.0)
        assert [b.index for b in one.branches] == list(range(4, 12))

    def test_each_set_is_one_prompts_candidates(self) -> None:
        settings = ATGRPO(tree=True, group_size=3, scale="none")
        tree = played(3)
        given = settings.tree_credit([tree], Estimates())
        # 1, 0, 0 in every set: ⅔ for the one that went on, −⅓ for the others.
        assert advantages(given) == pytest.approx([2 / 3] * 4 + [-1 / 3] * 8)
        assert {key for key, _ in turns_of([tree])} == set(given)

    def test_one_candidate_is_an_episode_as_ever(self) -> None:
        (one,) = played(1).episodes
        assert one.branches == ()
        assert {t.score for t in one.turns} == {None}

    def test_branches_are_recorded(self) -> None:
        import json

        (one,) = played(3).episodes
        assert load_episode(json.loads(dump_episode(one))) == replace(one)

    def test_a_world_that_cannot_score_is_refused_before_a_model_loads(self) -> None:
        settings = {
            **SMALL,
            "environment": {"name": "matrix", "game": "xor"},
            "workflow": {"name": "parallel"},
        }
        with pytest.raises(ConfigError, match=r"'matrix' cannot say that.*algorithm\.tree: false"):
            Trainer(**settings)

    def test_a_resumed_run_goes_on_bit_for_bit(self, tmp_path: Path) -> None:
        with Trainer(**SMALL, run_dir=tmp_path / "whole") as whole:
            steps = list(whole.steps())
            expected = {name: frozen_copy(whole.engine.weights(name)) for name in whole.team.trained}
        (first, *_) = steps[0].groups
        assert len(first.episodes[0].branches) == 2 * 2 * 2
        assert steps[0].metrics["parity/max"] <= 1e-4
        with Trainer(**SMALL, run_dir=tmp_path / "parts") as part:
            part.train(1)
        with Trainer(**SMALL, run_dir=tmp_path / "parts", resume=True) as rest:
            rest.train()
            for name, weights in expected.items():
                assert same_bits(frozen_copy(rest.engine.weights(name)), weights)
