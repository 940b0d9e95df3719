"""A reward model as a term of the reward, in every algorithm that learns from rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.algorithms.test_every_algorithm import learned, run_of
from tests.support.episodes import episode, group, turn
from tests.support.tiny import learners_of, same_bits

from kapelle import Trainer
from kapelle.algorithm import Credit, CreditFunction
from kapelle.algorithms import BUILTIN as ALGORITHMS
from kapelle.algorithms.shared.rewards import turn_rewards, with_scores
from kapelle.algorithms.signals.verifier import verifier_samples
from kapelle.errors import ConfigError
from kapelle.rows import Signals, TurnKey
from kapelle.team import VERIFIER
from kapelle.types import Group

PAID_OTHERWISE = {
    "distill": "does not learn from such rewards",
    "self_distill": "does not learn from such rewards",
    "sft": "does not learn from such rewards",
    "verifier": "does not learn from such rewards",
    "maporl": "is rewarded only by a verifier's scores",
    **dict.fromkeys(("counterfactual", "ccpo", "sharp"), "learns from the rewards of continued episodes"),
}
"""Algorithms for which a term of the reward has no meaning, and what they say."""
LAMBDA = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, trained on answers of the frozen team."""
    place = tmp_path_factory.mktemp("reward")
    with Trainer(**run_of("verifier")) as judge:
        judge.train(1)
        judge.save_policies(place)
    return place / "verifier"


class Spy:
    """Credit that keeps the groups it was given."""

    def __init__(self, credit: CreditFunction) -> None:
        self.credit = credit
        self.completed_before: list[Sequence[Group]] = []

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        self.completed_before.append(groups)
        return self.credit(groups, signals)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.credit, name)


def spied(trainer: Trainer) -> Spy:
    loop = trainer.loop
    if loop.memory is not None:
        spy = Spy(loop.memory)
        loop.memory = spy
    else:
        assert loop.algorithm.credit is not None
        spy = Spy(loop.algorithm.credit)
        loop.algorithm = replace(loop.algorithm, credit=spy)
    return spy


@pytest.mark.sample(14)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in PAID_OTHERWISE])
def test_what_is_learned_from_is_the_environment_s_reward_and_lambda_times_the_score(
    name: str, folder: Path
) -> None:
    settings = run_of(name)
    with Trainer(**settings, reward_model={"path": str(folder), "weight": LAMBDA}) as trainer:
        spy = spied(trainer)
        step = next(trainer.steps(1))
        asked = verifier_samples(step.groups, trainer.engine.renderer(VERIFIER))
        score = dict(zip(asked, trainer.engine.score(list(asked.values())), strict=True))
        [paid] = spy.completed_before
        for key, given in score.items():
            before = step.groups[key.group].episodes[key.episode].turns[key.turn].reward
            after = paid[key.group].episodes[key.episode].turns[key.turn].reward
            assert after == pytest.approx(before + LAMBDA * float(given.sigmoid()), abs=1e-6)
            assert after > before
        with_model = learned(trainer)
        assert VERIFIER not in learners_of(trainer.engine)
        assert 0.0 < step.metrics[f"verifier_score/{trainer.team.names[0]}"] < 1.0
    with Trainer(**settings) as other:
        next(other.steps(1))
        assert not same_bits(with_model, learned(other)), "the term changes what is learned"


def test_the_term_is_shared_by_the_team_as_every_reward_is() -> None:
    # Environment: a 1 at the end, b nothing. Scores 0.8 and 0.4, λ = 0.5. Means: ½ at the end, and ½·0.6 of the round.
    played = episode(turn("a", 0), turn("b", 1), rewards={"a": 1.0, "b": 0.0})
    [paid] = with_scores([group(played)], {TurnKey(0, 0, 0): 0.8, TurnKey(0, 0, 1): 0.4}, 0.5)
    assert turn_rewards(paid.episodes[0], "mean") == pytest.approx({0: 0.8, 1: 0.8})
    assert turn_rewards(paid.episodes[0], "individual") == pytest.approx({0: 1.4, 1: 0.2})
    assert turn_rewards(paid.episodes[0], "sum") == pytest.approx({0: 1.6, 1: 1.6})


class TestRefused:
    @pytest.mark.parametrize("name", PAID_OTHERWISE)
    def test_where_no_reward_is_learned_from(self, name: str, folder: Path) -> None:
        with pytest.raises(ConfigError, match=f"reward_model.*`{name}` {PAID_OTHERWISE[name]}"):
            Trainer(**run_of(name), reward_model={"path": str(folder)})

    def test_a_tree_of_candidates(self, folder: Path) -> None:
        settings = run_of("at_grpo")
        settings["algorithm"] |= {"tree": True}
        with pytest.raises(ConfigError, match=r"`at_grpo` with a tree"):
            Trainer(**settings, reward_model={"path": str(folder)})
