"""AT-GRPO: sets by agent and turn, and trees whose sets have one prompt by construction."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.episodes import episode, group, turn
from tests.support.resumed import resumed
from tests.support.tiny import frozen_copy, same_bits

from kapelle import Trainer
from kapelle.algorithm import Credit, Data
from kapelle.algorithms.at_grpo import ATGRPO
from kapelle.algorithms.shared.tree import best
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.arithmetic import Arithmetic
from kapelle.errors import ConfigError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import Signals, TurnKey
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
        given = credit([group(one(1.0, 2.0, 3.0), one(0.0, 4.0, 1.0))], Signals())
        assert advantages(given) == pytest.approx([-0.5, 1.0, -1.0, 0.5, -1.0, 1.0])


def played(candidates: int) -> Group:
    """A debate of two on 1-digit sums whose agents are right half of the time."""
    environment = Arithmetic(digits=1)
    task = environment.task("train", 0)
    gold = environment.script("a", task, [], 0)

    def speak(request: Request) -> str:
        return gold if request.seed % 2 == 0 else "no"

    names = ("a", "b")
    team = Team(tuple(Agent(n) for n in names), {"p": Policy("p")}, dict.fromkeys(names, "p"))
    data = ATGRPO(tree=True, group_size=candidates).build().data if candidates > 1 else Data()
    setup = RolloutSetup(team, environment, Debate(rounds=2), ScriptedEngine({"p": speak}), data=data)
    return asyncio.run(rollout(setup, [task], 1, 0))[0]


class TestTree:
    def test_all_candidates_share_the_prompt_of_the_one_that_goes_on(self) -> None:
        (one,) = played(3).episodes
        assert one.error is None
        assert len(one.branches) == 8
        for branch in one.branches:
            assert branch.parent is not None
            chosen = one.turns[branch.parent]
            assert (branch.agent, branch.prompt_ids) == (chosen.agent, chosen.prompt_ids)
            assert branch.continuation_return is not None
            assert chosen.continuation_return is not None
            assert branch.continuation_return <= chosen.continuation_return
        assert [b.index for b in one.branches] == list(range(4, 12))

    def test_only_the_last_round_of_a_debate_is_rewarded_at_once(self) -> None:
        (one,) = played(6).episodes
        gold = Arithmetic(digits=1).script("a", one.task, [], 0)
        last = [turn for turn in (*one.turns, *one.branches) if {turn.index, turn.parent} & {2, 3}]
        # An agent is paid the mean of both answers; its candidates differ by half a point.
        for agent in ("a", "b"):
            worth = {turn.text: turn.continuation_return for turn in last if turn.agent == agent}
            assert {gold, "no"} == set(worth)
            assert (worth[gold] or 0.0) - (worth["no"] or 0.0) == 0.5

    @pytest.mark.parametrize(
        ("environment", "what"),
        [
            (
                {
                    "name": "tools",
                    "questions": {"name": "arithmetic"},
                    "tools": [{"tool": "search", "url": "https://example.org/{query}"}],
                },
                r"tool `search` \(https://example\.org/\{query\}\)",
            ),
            (
                {
                    "name": "debate_topics",
                    "judge": {"endpoint": "https://example.org/v1", "model": "judge"},
                },
                r"`judge` \(judge\)",
            ),
        ],
    )
    def test_environments_that_do_not_repeat_raise_an_error_before_a_model_loads(
        self, environment: dict[str, Any], what: str
    ) -> None:
        workflow = {"name": "tool_use" if environment["name"] == "tools" else "play"}
        settings = {**SMALL, "environment": environment, "workflow": workflow, "model": "no-such/model"}
        with pytest.raises(ConfigError, match=rf"{what}\. Set `algorithm.tree: false`"):
            Trainer(**settings)

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"continuations": 2, "tree": False}, "continuations"),
            ({"umad": {"confidence": 0.1}}, "`umad` compares whole episodes"),
            ({"order": {"name": "sequential"}}, "set `order: joint`"),
        ],
    )
    def test_settings_incompatible_with_a_tree_raise_an_error(
        self, settings: dict[str, Any], why: str
    ) -> None:
        with pytest.raises(ValidationError, match=why):
            ATGRPO(**{"tree": True, **settings})

    @pytest.mark.sample(2)
    @pytest.mark.slow
    @pytest.mark.parametrize("world", ["questions", "game"])
    def test_a_resumed_run_is_bitwise_identical(self, world: str, tmp_path: Path) -> None:
        game = {
            "environment": {"name": "matrix", "game": "climbing", "rounds": 2, "rules": "none"},
            "workflow": {"name": "parallel"},
            "algorithm": {**SMALL["algorithm"], "continuations": 2},
        }
        settings = {**SMALL, **(game if world == "game" else {})}
        with Trainer(**settings, run_dir=tmp_path / "whole") as whole:
            steps = list(whole.steps())
            expected = {name: frozen_copy(whole.engine.weights(name)) for name in whole.team.trained}
        (first, *_) = steps[0].groups
        assert len(first.episodes[0].branches) == 2 * 2 * 2
        assert first.episodes[0].error is None
        assert steps[0].metrics["parity/max"] <= 1e-4
        continued = sum(sum(e.continued.values()) for group in steps[0].groups for e in group.episodes)
        assert continued > 0
        counted = [v for k, v in steps[0].metrics.items() if k.startswith("tokens_continued/")]
        assert sum(counted) == continued
        with resumed(settings, tmp_path / "parts", after=1) as rest:
            for name, weights in expected.items():
                assert same_bits(frozen_copy(rest.engine.weights(name)), weights)


def test_of_equal_candidates_the_first_goes_on() -> None:
    """It is the one that the agent would have sampled without a tree."""
    assert best([0.5, 1.0, 1.0]) == 1
    assert best([0.0, 0.0]) == 0
