"""CORY: both agents receive the sum of rewards, and roles are exchanged with the whole state of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.episodes import episode, group, turn
from tests.support.resumed import resumed
from tests.support.tiny import (
    draw_samples,
    frozen_copy,
    lora_policies,
    same_bits,
    team_of,
    train_engine,
    with_behaviour,
)

from kapelle import Trainer
from kapelle.algorithms.cory import CORY, check_pair
from kapelle.algorithms.grpo import GRPO
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.errors import ConfigError
from kapelle.rows import Signals
from kapelle.team import Lora, Policy, Team

LOSS = SurrogateConfig().build()
SMALL: dict[str, Any] = {
    "model": {"embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}},
    "environment": {"name": "arithmetic", "digits": 1},
    "workflow": {"name": "cory"},
    "team": {"agents": [{"name": "pioneer"}, {"name": "observer"}], "sampling": {"max_tokens": 3}},
    "training": {"steps": 4, "tasks_per_step": 2},
    "optimizer": {"lr": 1e-2},
    "evaluation": {"before_and_after": False},
}


def cory(**settings: Any) -> CORY:
    return CORY.model_validate({"base": {"name": "grpo", "group_size": 2, "scale": "none"}, **settings})


def trained(*, references: bool = False) -> TorchTrainEngine:
    engine = train_engine(lora_policies("p", "o"), references=references)
    for seed in range(2):
        samples = with_behaviour(engine, draw_samples(["p", "o"], [(4, 3), (3, 2)], seed))
        engine.update(samples if seed else samples[:2], Objective(LOSS))
    return engine


class TestExchange:
    def test_weights_moments_and_counters_are_exchanged_exactly(self) -> None:
        engine = trained()
        before = {name: _copied(engine.learners[name].state()) for name in ("p", "o")}
        assert (before["p"]["steps"], before["o"]["steps"]) == (2, 1)
        engine.exchange("p", "o")
        after = {name: engine.learners[name].state() for name in ("p", "o")}
        for one, other in (("p", "o"), ("o", "p")):
            for part in ("weights", "optimizer", "steps"):
                assert same_bits(after[one][part], before[other][part])

    def test_exchanged_policies_continue_as_if_renamed(self) -> None:
        engine, plain = trained(), trained()
        engine.exchange("p", "o")
        drawn = draw_samples(["p"], [(4, 3)], 9)
        engine.update(with_behaviour(engine, drawn), Objective(LOSS))
        renamed = draw_samples(["o"], [(4, 3)], 9)
        plain.update(with_behaviour(plain, renamed), Objective(LOSS))
        assert same_bits(dict(engine.weights("p")), dict(plain.weights("o")))

    def test_a_version_never_names_two_sets_of_weights(self) -> None:
        engine = trained()
        named = {("p", engine.versions["p"]), ("o", engine.versions["o"])}
        engine.publish()
        engine.exchange("p", "o")
        published = engine.publish()
        assert set(published) == {"p", "o"}
        assert not named & {(name, entry.version) for name, entry in published.items()}


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    from copy import deepcopy

    return deepcopy(dict(state))


class TestRow:
    def test_both_receive_the_sum_of_rewards(self) -> None:
        pairs = [(1.0, 0.0), (0.0, 0.0)]
        groups = [
            group(
                *(
                    episode(turn("p", 0), turn("o", 1), rewards={"p": first, "o": second})
                    for first, second in pairs
                )
            )
        ]
        credit = cory().build().credit
        assert credit is not None
        given = credit(groups, Signals())
        assert [float(given[key].advantage_T[0]) for key in sorted(given)] == [0.5, 0.5, -0.5, -0.5]

    def test_without_a_swap_it_is_its_base_on_the_sum(self) -> None:
        groups = [
            group(*(episode(turn("p", 0), turn("o", 1), rewards={"p": r, "o": 2 * r}) for r in (1.0, 0.0)))
        ]
        base = GRPO(group_size=2, scale="none", team_reward="sum").build()
        row = cory(swap_every=0).build()
        assert row.after_update == base.after_update == ()
        assert row.credit is not None
        assert base.credit is not None
        one, other = row.credit(groups, Signals()), base.credit(groups, Signals())
        assert all(torch.equal(one[key].advantage_T, other[key].advantage_T) for key in one)

    def test_roles_are_exchanged_after_every_fifth_step(self) -> None:
        [hook] = cory(swap_every=5).build().after_update
        now, exchanged = 0, list[int]()
        engine: Any = SimpleNamespace(exchange=lambda *_: exchanged.append(now))
        for now in range(1, 13):
            hook(now, team_of("p", "o"), engine)
        assert exchanged == [5, 10]

    def test_rivals_win_by_the_better_answer(self) -> None:
        """Agon: the pioneer wins, the observer wins, and both are right."""
        pairs = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
        episodes = [episode(turn("p", 0), turn("o", 1), rewards={"p": p, "o": o}) for p, o in pairs]
        row = cory(reward="win").build()
        assert row.returns is not None
        assert [dict(row.returns(each)) for each in episodes] == [
            {"p": 1.0, "o": 0.0},
            {"p": 0.0, "o": 1.0},
            {"p": 0.0, "o": 0.0},
        ]
        assert row.credit is not None
        given = row.credit([group(*episodes)], Signals())
        # A win is ⅔ above the mean of the three attempts, and anything else ⅓ below.
        expected = [2 / 3, -1 / 3, -1 / 3, 2 / 3, -1 / 3, -1 / 3]
        assert [float(given[key].advantage_T[0]) for key in sorted(given)] == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("base", "said"),
        [
            ({"group_size": 2}, "needs a `name`"),
            ({"name": "grpo", "team_reward": "mean"}, r"base\.team_reward"),
            ({"name": "sft"}, "does not learn from rollouts"),
        ],
    )
    def test_invalid_bases_raise_an_error(self, base: dict[str, Any], said: str) -> None:
        with pytest.raises(ValidationError, match=said):
            CORY.model_validate({"base": base})

    def test_only_two_alike_can_exchange(self) -> None:
        with pytest.raises(ConfigError, match="3 agents"):
            check_pair(team_of("a", "b", "c"))
        pair = team_of("a", "b")
        check_pair(pair)
        unlike = {**pair.policies, "b": Policy("b", lora=Lora(rank=3))}
        with pytest.raises(ConfigError, match="`lora` settings differ"):
            check_pair(Team(pair.agents, unlike, pair.policy_of))


class TestRun:
    @pytest.mark.sample(2)
    @pytest.mark.slow
    @pytest.mark.parametrize("base", ["grpo", "ippo"])
    def test_a_resumed_run_has_the_same_phase_and_bitwise_identical_weights(
        self, base: str, tmp_path: Path
    ) -> None:
        settings = {
            **SMALL,
            "algorithm": {"name": "cory", "swap_every": 2, "base": {"name": base, "group_size": 2}},
        }
        with Trainer(**settings, run_dir=tmp_path / "whole") as whole:
            whole.train()
            expected = {name: frozen_copy(whole.engine.weights(name)) for name in whole.team.trained}
        with resumed(settings, tmp_path / "parts", after=3) as second:
            for name, weights in expected.items():
                assert same_bits(frozen_copy(second.engine.weights(name)), weights)
