"""What a step does beyond its tasks: other tasks for groups without variance, greedy baselines, exchanges of roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.support.tiny import frozen_copy, same_bits, sections
from torch import Tensor

from kapelle.algorithm import Credit
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.monte_carlo import ComparedWithEarlier
from kapelle.rows import Signals, TurnKey
from kapelle.runs.definitions import is_dead, own_returns
from kapelle.training.step_report import Step
from kapelle.training.trainer import Trainer
from kapelle.types import Group

DIGEST = {"name": "tests.support.plugins:Digest", "levels": 2}
"""Pays 0 or 1 for noise."""


def first_step(tasks: int, environment: Mapping[str, Any] = DIGEST, **algorithm: Any) -> Step:
    """The first step of a tiny run."""
    made = sections(
        environment=environment,
        workflow={"name": "parallel"},
        algorithm={"name": "grpo", "group_size": 2, "team_reward": "individual", **algorithm},
        training={"steps": 3, "tasks_per_step": tasks},
    )
    with Trainer(**made) as run:
        return next(run.steps(1))


def names(step: Step) -> list[str]:
    return [group.task.id for group in step.groups]


class TestRedraw:
    """Two levels of reward and two attempts: about a quarter of the groups teach nothing."""

    @pytest.fixture(scope="class")
    def without(self) -> Step:
        return first_step(16)

    @pytest.fixture(scope="class")
    def once(self) -> Step:
        return first_step(16, redraw=1)

    def test_groups_without_variance_are_other_tasks(self, without: Step, once: Step) -> None:
        dead = [is_dead(group, own_returns) for group in without.groups]
        assert 1 <= sum(dead) < 16
        assert [a != b for a, b in zip(names(without), names(once), strict=True)] == dead
        assert len(set(names(once))) == 16

    def test_what_varies_stays_as_it_was_played(self, without: Step, once: Step) -> None:
        kept = [(a, b) for a, b in zip(without.groups, once.groups, strict=True) if a.task == b.task]
        assert all(said(a) == said(b) for a, b in kept)

    def test_more_attempts_leave_fewer(self, without: Step, once: Step) -> None:
        often = first_step(16, redraw=6)
        shares = [step.metrics["dead_groups"] for step in (without, once, often)]
        assert shares[0] > shares[1] >= shares[2] == 0.0

    def test_a_task_that_comes_again_is_sampled_with_other_noise(self) -> None:
        found = first_step(64, {**DIGEST, "tasks": 1}, redraw=6)  # so many that a second redraw is needed
        seeds = [one.seed for group in found.groups for one in group.episodes]
        assert len(set(seeds)) == len(seeds)
        assert found.metrics["dead_groups"] == 0.0

    def test_they_end_where_nothing_can_vary(self) -> None:
        # No one adds up numbers by noise.
        hopeless = first_step(2, {"name": "arithmetic", "digits": 6}, redraw=3)
        assert hopeless.metrics["dead_groups"] == 1.0
        assert len(hopeless.groups) == 2


def said(group: Group) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(turn.completion_ids for turn in one.turns) for one in group.episodes]


def greedy_step(seed: int, number: int = 1) -> tuple[Sequence[Group], Signals, Step]:
    """What credit is given in a step of ReMax: one task, three attempts, one greedy episode."""
    made = sections(
        environment={"name": "tests.support.plugins:Digest", "tasks": 1},
        workflow={"name": "parallel"},
        algorithm={"name": "remax", "group_size": 3},
        training={"steps": number, "tasks_per_step": 1},
        seed=seed,
    )
    seen: list[tuple[Sequence[Group], Signals]] = []
    with Trainer(**made) as run:
        memory = run.loop.memory
        assert isinstance(memory, ComparedWithEarlier)
        judge = memory.judge

        def noted(
            groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
        ) -> Mapping[TurnKey, Credit]:
            seen.append((groups, signals))
            return judge(groups, signals, earlier)

        memory.judge = noted
        *_, step = run.steps(number)
    return (*seen[-1], step)


class TestGreedyBaseline:
    def test_the_task_is_played_once_more_and_not_trained_on(self) -> None:
        groups, signals, step = greedy_step(0)
        assert [signals.greedy[g].task for g in range(len(groups))] == [group.task for group in groups]
        assert step.metrics["samples"] == 3.0
        assert signals.greedy[0] not in groups[0].episodes

    def test_at_its_likeliest_a_team_says_the_same_whatever_the_seed(self) -> None:
        steps = [greedy_step(seed) for seed in (0, 1)]
        greedy = [said(Group(e.greedy[0].task, (e.greedy[0],))) for _, e, _ in steps]
        sampled = [said(groups[0]) for groups, _, _ in steps]
        assert greedy[0] == greedy[1]
        assert not set(sampled[0]) & set(sampled[1])

    def test_a_task_that_comes_again_has_another_seed(self) -> None:
        seeds = {greedy_step(0, number)[1].greedy[0].seed for number in (1, 2)}
        assert len(seeds) == 2


def test_an_annealed_loss_begins_with_its_first_coefficient() -> None:
    def weights(**loss: Any) -> list[Mapping[str, Tensor]]:
        algorithm = {"name": "grpo", "group_size": 2, "team_reward": "individual", "loss": loss}
        made = sections(
            environment=DIGEST,
            workflow={"name": "parallel"},
            algorithm=algorithm,
            training={"steps": 2, "tasks_per_step": 4},
        )
        with Trainer(**made) as run:
            next(run.steps(1))
            return [frozen_copy(run.engine.weights(name)) for name in run.team.trained]

    annealed = weights(entropy_coefficient=0.5, entropy_end=0.0)
    for constant, same in ((0.5, True), (0.25, False)):
        pairs = zip(annealed, weights(entropy_coefficient=constant), strict=True)
        assert all(same_bits(*pair) for pair in pairs) is same


def roles_after(steps: int, swap_every: int) -> dict[str, dict[str, Tensor]]:
    """The weights of pioneer and observer after some steps of CORY."""
    base = {"name": "grpo", "group_size": 3, "scale": "none"}
    made = sections(
        workflow={"name": "cory"},
        algorithm={"name": "cory", "swap_every": swap_every, "base": base},
        team={
            "agents": [{"name": "pioneer"}, {"name": "observer"}],
            "lora": {"rank": 2, "alpha": 4.0},
            "sampling": {"max_tokens": 4},
        },
        training={"steps": 3, "tasks_per_step": 2},
    )
    with Trainer(**made) as run:
        list(run.steps(steps))
        return {name: frozen_copy(run.engine.weights(name)) for name in run.team.trained}


class TestRoles:
    def test_they_change_places_when_it_is_time_and_not_before(self) -> None:
        alone = [roles_after(steps, 0) for steps in (1, 2)]
        assert same_bits(roles_after(1, 2), alone[0])
        exchanged = roles_after(2, 2)
        assert not same_bits(alone[1]["pioneer"], alone[1]["observer"])
        assert same_bits(exchanged["pioneer"], alone[1]["observer"])
        assert same_bits(exchanged["observer"], alone[1]["pioneer"])
