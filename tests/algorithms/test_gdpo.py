"""GDPO: every reward is normalised on its own, by hand and against GRPO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.episodes import TASK, episode, group, turn
from tests.support.tiny import tiny_model

import kapelle
from kapelle.algorithms.gdpo import GDPO
from kapelle.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from kapelle.algorithms.shared.groups import Earlier
from kapelle.errors import AlgorithmError
from kapelle.rows import Signals
from kapelle.training.step_report import Step
from kapelle.types import Episode, Group


def solo(**found: float | None) -> Episode:
    """One agent's episode with the results of reward functions, whose sum it is paid."""
    paid = sum(value or 0.0 for value in found.values())
    return episode(
        turn("a", 0), rewards={"a": paid}, info={f"reward/{name}": value for name, value in found.items()}
    )


def advantages(weights: Mapping[str, float], groups: Sequence[Group], **settings: Any) -> list[float]:
    credit = GDPO(weights=dict(weights), **settings).credit(groups, Signals())
    return [float(credit[key].advantage_T[0]) for key in sorted(credit) if credit[key].weight]


S2 = 1 / math.sqrt(2)


def test_two_rewards_by_hand() -> None:
    # In groups of two a reward that differs is ±1/√2. Right and short, 1 and 1 against 0 and 0: ±2/√2; right alone: ±1/√2.
    groups = [
        group(solo(right=1.0, short=1.0), solo(right=0.0, short=0.0)),
        group(solo(right=1.0, short=0.5), solo(right=0.0, short=0.5)),
    ]
    # √2, −√2, 1/√2, −1/√2: mean 0, unbiased variance (2 + 2 + ½ + ½)/3 = 5/3. GRPO makes no difference between these groups.
    found = advantages({"right": 1.0, "short": 1.0}, groups)
    assert found == pytest.approx([x / math.sqrt(5 / 3) for x in (2 * S2, -2 * S2, S2, -S2)], rel=1e-5)


def test_the_weight_decides_and_not_the_scale_of_a_reward() -> None:
    groups = [
        group(solo(right=1.0, short=0.0), solo(right=0.0, short=-900.0)),
        group(solo(right=1.0, short=-900.0), solo(right=0.0, short=0.0)),
    ]
    # ±(1 + ¼)/√2 and ±(1 − ¼)/√2: variance 2·(25/16 + 9/16)/2/3 = 17/24.
    found = advantages({"right": 1.0, "short": 0.25}, groups)
    assert found == pytest.approx([x * S2 / math.sqrt(17 / 24) for x in (1.25, -1.25, 0.75, -0.75)], rel=1e-5)


def test_one_reward_in_one_group_is_reinforce_plus_plus_with_a_group_baseline() -> None:
    groups = [group(*[solo(right=value) for value in (0.0, 1.0, 3.0, 0.5)])]
    own = advantages({"right": 7.0}, groups)
    other = ReinforcePlusPlus(group_size=4, baseline="group").group_credit(groups, Signals())
    assert own == pytest.approx([float(other[key].advantage_T[0]) for key in sorted(other)], rel=1e-5)


def test_a_reward_that_does_not_apply_leaves_its_own_group_only() -> None:
    groups = [
        group(
            solo(right=1.0, short=None),
            solo(right=0.0, short=1.0),
            solo(right=0.0, short=0.0),
            solo(short=None),
        )
    ]
    # right: 1, 0, 0, std 1/√3: 2/√3, −1/√3, −1/√3; short: 1 and 0: ±1/√2. The last one has neither.
    values = [2 / math.sqrt(3), S2 - 1 / math.sqrt(3), -S2 - 1 / math.sqrt(3)]
    variance = sum(value**2 for value in values) / 2
    assert advantages({"right": 1.0, "short": 1.0}, groups) == pytest.approx(
        [value / math.sqrt(variance) for value in values], rel=1e-5
    )


def pair(right: float, brief: float, valid: float = 0.0) -> Episode:
    """a speaks twice, b once; `brief` is a's own reward."""
    info = {"reward/right": right, "reward/brief/a": brief, "valid": valid}
    turns = (turn("a", 0), turn("b", 1, policy="q"), turn("a", 2))
    return episode(*turns, rewards={"a": right + brief, "b": right}, info=info)


def test_a_reward_of_an_agent_is_its_own_and_policies_are_normalised_apart() -> None:
    groups = [group(pair(1.0, 0.0), pair(0.0, 1.0))]
    weights = {"right": 1.0, "brief/a": 3.0}
    # a: ±(1 − 3)/√2, whitened to ∓1/√2 over its two trajectories; b: ±1/√2 from `right` alone.
    found = advantages(weights, groups, team_reward="individual")
    assert found == pytest.approx([-S2, S2, -S2, S2, -S2, S2], rel=1e-5)
    # Shared, b's advantage follows a's reward as well.
    assert advantages(weights, groups) == pytest.approx([-S2] * 3 + [S2] * 3, rel=1e-5)


def test_any_number_that_the_environment_reports_can_be_a_reward() -> None:
    groups = [group(pair(1.0, 0.0, valid=2.0), pair(0.0, 1.0, valid=5.0))]
    assert advantages({"valid": 1.0}, groups) == pytest.approx([-S2] * 3 + [S2] * 3, rel=1e-5)


def test_a_lone_episode_is_compared_with_the_earlier_results_of_each_reward() -> None:
    failed = Episode(TASK, 0, ("a",), error="EpisodeError: gone")
    algorithm, earlier = GDPO(weights={"right": 1.0, "short": 1.0}), Earlier()
    algorithm.credit([group(solo(right=1.0, short=40.0), solo(right=0.0, short=20.0))], Signals(), earlier)
    results = [(1.0, 30.0), (0.5, 40.0), (0.5, 30.0)]
    lone = [group(solo(right=right, short=short), failed) for right, short in results]
    # The means are ½ and 30. The first two are above one of them by as much as a spread, and the last one is above neither.
    credit = algorithm.credit(lone, Signals(), earlier)
    third = 1 / math.sqrt(3)
    assert [float(each.advantage_T[0]) for each in credit.values()] == pytest.approx(
        [third, third, -2 * third], rel=1e-4
    )


def test_an_unknown_reward_and_settings_that_would_do_nothing_raise_errors() -> None:
    with pytest.raises(AlgorithmError, match=r"no episode of the step reports `rihgt`.*They report `right`"):
        advantages({"rihgt": 1.0}, [group(solo(right=1.0), solo(right=0.0))])
    with pytest.raises(ValidationError, match="write a penalty as a reward function"):
        GDPO.model_validate({"weights": {"right": 1.0}, "penalties": {"no_stop": 1.0}})
    with pytest.raises(ValidationError, match="weights"):
        GDPO.model_validate({})


@pytest.mark.slow
def test_it_learns_two_rewards_of_unlike_scales() -> None:
    """A letter pays a ten-thousandth of what an even number pays."""

    def letter(completion: str) -> float:
        return float(completion.isascii() and completion.isalpha()) / 100

    def even(completion: str) -> float:
        return 100.0 * (sum(completion.encode()) % 2 == 0)

    with kapelle.train(
        tiny_model(),
        [{"question": str(k)} for k in range(8)],
        [letter, even],
        agents=["solver"],
        algorithm=GDPO(weights={"letter": 1.0, "even": 1.0}, group_size=8),
        steps=1,
        tasks_per_step=8,
        team={"sampling": {"max_tokens": 1}},
        optimizer={"lr": 1e-2},
        run_dir=None,
    ) as run:
        steps = list(run.trainer.steps(15))

    def mean(name: str, part: list[Step]) -> float:
        return fmean(step.metrics[f"reward_function/{name}"] for step in part)

    assert mean("letter", steps[-3:]) > 1.8 * mean("letter", steps[:3])
    assert mean("even", steps[-3:]) > 1.4 * mean("even", steps[:3])
