import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from kapelle.environment import FAILED
from kapelle.runs.definitions import (
    MOST_REPORTED,
    reported_counts,
    rollout_metrics,
)
from kapelle.types import Cast, Episode, FinishReason, Group, Json, Task, Turn

TASK = Task("a", "12+30")


def turn(
    agent: str, tokens: int, finish: FinishReason = "stop", reward: float = 0.0, *, trained: bool = True
) -> Turn:
    return Turn(
        agent=agent,
        policy=f"{agent}-lora",
        version=0,
        weights_hash="h",
        index=0,
        completed_before=0,
        prompt_ids=(1,),
        completion_ids=(5,) * tokens,
        logprobs=(-0.5,) * tokens,
        finish_reason=finish,
        text="x",
        reward=reward,
        trained=trained,
    )


def episode(reward: float, *turns: Turn, task: Task = TASK, success: float | None = None) -> Episode:
    return Episode(task, 0, ("reasoner", "actor"), turns, {"actor": reward}, success)


def test_the_row_of_a_step_by_hand() -> None:
    task_b = Task("b", "1+1")
    groups = [
        Group(
            TASK,
            (
                episode(1.0, turn("reasoner", 4), turn("actor", 2), success=1.0),
                episode(
                    0.0, turn("reasoner", 6, "length", reward=0.5), turn("actor", 4, "error"), success=0.0
                ),
            ),
        ),
        Group(
            task_b,
            (
                episode(
                    0.5, turn("reasoner", 2), turn("actor", 3), turn("actor", 3), task=task_b, success=0.5
                ),
                replace(episode(9.0, turn("actor", 7), task=task_b, success=1.0), error="EpisodeError: x"),
            ),
        ),
    ]
    assert rollout_metrics(groups) == {
        "samples": 4.0,
        "failed_episodes": 0.25,
        "scored": 3.0,
        "success": 0.5,
        "truncated": 0.0,
        # The second group has one valid episode left: nothing varies.
        "dead_groups": 0.5,
        # The environment never scores the reasoner at the end: it has a return and no reward.
        "return/reasoner": pytest.approx(0.5 / 3),
        "length/reasoner": 4.0,
        "turns/reasoner": 1.0,
        "finish_length/reasoner": pytest.approx(1 / 3),
        "reward/actor": 0.5,
        "reward_max/actor": 0.75,
        "return/actor": 0.5,
        "length/actor": 3.0,
        "turns/actor": pytest.approx(4 / 3),
        "finish_length/actor": 0.0,
        "tokens/reasoner-lora": 12.0,
        "tokens/actor-lora": 19.0,
    }


def test_means_of_no_values_are_absent() -> None:
    assert rollout_metrics([]) == {"samples": 0.0}
    failed = replace(episode(0.0), error="EpisodeError: x", rewards={})
    assert rollout_metrics([Group(TASK, (failed,))]) == {"samples": 1.0, "failed_episodes": 1.0}
    game = Episode(TASK, 0, ("row", "column"), (), {"row": 1.0})
    row = rollout_metrics([Group(TASK, (game,))])
    assert "success" not in row
    assert "reward/column" not in row
    assert row["turns/column"] == 0.0
    assert "length/column" not in row
    assert "dead_groups" not in row, "groups of one are meant for a critic"


def test_rewards_and_returns_are_means_over_the_episodes_in_which_the_agent_acted_itself() -> None:
    team = ("router", "coder", "writer")
    answered = [
        Episode(TASK, 0, team, (turn("router", 1), turn("coder", 1)), {"coder": 1.0}),
        Episode(TASK, 0, team, (turn("router", 1), turn("coder", 1)), {"coder": 0.0}),
        *[Episode(TASK, 0, team, (turn("router", 1), turn("writer", 1)), {"writer": 1.0})] * 10,
    ]
    row = rollout_metrics([Group(TASK, tuple(answered))])
    assert (row["reward/coder"], row["return/coder"]) == (0.5, 0.5)
    assert (row["return/writer"], row["return/router"]) == (1.0, 0.0)
    assert row["turns/coder"] == pytest.approx(2 / 12)

    def game(taken: str, paid: float) -> Group:
        task = replace(TASK, cast={taken: Cast("slot-1", "past@3")} if taken else {})
        both = (turn("first", 1), turn("second", 1))
        return Group(task, (Episode(task, 0, ("first", "second"), both, {"first": paid, "second": -paid}),))

    row = rollout_metrics([game("", 0.5), game("second", 1.0), game("first", 1.0)])
    assert (row["reward/first"], row["return/first"]) == (0.75, 0.75)
    assert (row["reward/second"], row["return/second"]) == (-0.75, -0.75)


def test_tokens_of_a_shared_turn_are_counted_once() -> None:
    shared = turn("actor", 5)
    first, second = episode(1.0, shared, turn("actor", 2)), episode(0.0, replace(shared, copied=True))
    assert rollout_metrics([Group(TASK, (first, second))])["tokens/actor-lora"] == 7.0


def test_a_group_is_dead_if_no_trained_return_varies() -> None:
    def share(*episodes: Episode) -> float:
        return rollout_metrics([Group(TASK, episodes)])["dead_groups"]

    speak = turn("actor", 1)
    assert share(episode(1.0, speak), episode(1.0, speak)) == 1.0
    assert share(episode(1.0, speak), episode(0.0, speak)) == 0.0
    # Rewards of turns count as well as terminal ones.
    paid = turn("actor", 1, reward=1.0)
    assert share(episode(1.0, speak), episode(0.0, paid)) == 1.0
    # Only the return of the untrained opponent varies.
    frozen = turn("reasoner", 1, reward=1.0, trained=False)
    assert share(episode(1.0, speak, frozen), episode(1.0, speak)) == 1.0
    # In an evaluation no agent is trained, and every agent counts.
    mute = turn("actor", 1, trained=False)
    assert share(episode(1.0, mute), episode(0.0, mute)) == 0.0


def test_each_reward_function_has_mean_deviation_and_shares_of_none_and_failures() -> None:
    paid: list[tuple[Json, str | None]] = [(1.0, None), (0.0, None), (None, None), (FAILED, "it raised")]
    episodes = tuple(
        Episode(TASK, k, ("ada",), info={"reward/exact": value, "reward/exact/ada": 2}, error=error)
        for k, (value, error) in enumerate(paid)
    )
    row = rollout_metrics([Group(TASK, episodes)])
    assert {name: value for name, value in row.items() if name.startswith("reward_function")} == {
        "reward_function/exact": 0.5,
        "reward_function_std/exact": 0.5,
        "reward_function_none/exact": pytest.approx(
            1 / 3
        ),  # of those that it was asked about and that did not fail
        "reward_function_failed/exact": 0.25,
        "reward_function/exact/ada": 2.0,
        "reward_function_std/exact/ada": 0.0,
    }


def test_reported_means_have_counts_of_episodes() -> None:
    infos: list[tuple[dict[str, Json], str | None]] = [
        ({"reward/exact": 1.0, "steps": 3, "tricks": {"ada": 2}}, None),
        ({"reward/exact": None, "steps": 5}, None),
        ({"reward/exact": FAILED, "steps": 9}, "it raised"),
    ]
    episodes = tuple(
        Episode(TASK, k, ("ada",), info=info, error=error) for k, (info, error) in enumerate(infos)
    )
    counts = reported_counts([Group(TASK, episodes)])
    assert counts == {"info/steps": 2, "info/tricks/ada": 1, "reward_function/exact": 1}
    assert counts.keys() <= rollout_metrics([Group(TASK, episodes)]).keys()


class TestWhatEnvironmentsReport:
    """Numbers in `Outcome.info` are metrics by themselves."""

    def of(self, *infos: Mapping[str, Json]) -> dict[str, float]:
        episodes = tuple(Episode(TASK, k, ("ada", "ben"), info=info) for k, info in enumerate(infos))
        row = rollout_metrics([Group(TASK, episodes)])
        return {name: value for name, value in row.items() if name.startswith("info/")}

    def test_a_number_is_averaged_over_the_episodes_that_report_it(self) -> None:
        assert self.of({"steps": 3}, {"steps": 5}, {"other": "text"}) == {"info/steps": 4.0}

    def test_a_number_for_each_agent_is_one_metric_each(self) -> None:
        assert self.of({"tricks": {"ada": 2, "ben": 1}}, {"tricks": {"ada": 4}}) == {
            "info/tricks/ada": 3.0,
            "info/tricks/ben": 1.0,
        }
        assert self.of({"tricks": {"somebody": 2}}) == {}

    def test_only_finite_numbers_are_reported(self) -> None:
        odd: dict[str, Json] = {"nan": math.nan, "inf": math.inf, "flag": True, "text": "3", "list": [1]}
        assert self.of(odd, {"a/b": 1}, {"x" * 65: 1}) == {}
        assert self.of({"x": math.nan}, {"x": 2.0}) == {"info/x": 2.0}

    def test_the_number_of_reported_names_is_limited(self) -> None:
        assert len(self.of(*({f"task_{k:03}": 1.0} for k in range(100)))) == MOST_REPORTED

    def test_failed_episodes_report_nothing(self) -> None:
        failed = Episode(TASK, 0, ("ada",), info={"x": 1.0}, error="boom")
        assert "info/x" not in rollout_metrics([Group(TASK, (failed,))])
