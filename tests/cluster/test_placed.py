"""The workers that each rank receives."""

from __future__ import annotations

import pytest
from tests.support.tiny import sections

from kapelle.cluster.placement import (
    Bundles,
    RayPlacement,
    RolloutPlace,
    check_pools,
    check_workers,
    lay_out,
    placement_here,
)
from kapelle.errors import ConfigError
from kapelle.settings.schema import RayConfig
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import resolve

LEFT: dict[str, object] = {"max_staleness": 1, "asynchronous": True}


def test_workers_are_assigned_in_turn_with_their_environments() -> None:
    config = RayConfig.model_validate(
        {"rollout_workers": 3, "rollout": {"gpus": 1}, "environment": {"cpus": 2}}
    )
    held, places = lay_out(config, ranks=2, worlds=1)
    assert places == [
        Bundles((RolloutPlace(2, (3,)), RolloutPlace(4, (5,)))),
        Bundles((RolloutPlace(6, (7,)),)),
    ]
    assert [each.gpus for each in held] == [0, 0, 1, 0, 1, 0, 1, 0]
    assert [each.cpus for each in held] == [1, 1, 1, 2, 1, 2, 1, 2]


def test_ranks_that_collect_have_the_environment_workers() -> None:
    held, places = lay_out(RayConfig(rollout_workers=0), ranks=2, worlds=2)
    assert places == [Bundles(worlds=(2, 3)), Bundles(worlds=(4, 5))]
    assert len(held) == 6


def test_scoring_workers_are_assigned_in_turn() -> None:
    config = RayConfig.model_validate({"scoring_workers": 3, "scoring": {"gpus": 2}})
    held, places = lay_out(config, ranks=2, worlds=0)
    assert [each.gpus for each in held] == [0, 0, 0, 2, 2, 2]
    assert [each.scoring for each in places] == [(3, 5), (4,)]
    placed = RayPlacement("here", "of this run", "kapelle-1", places[0])
    assert placement_here(placed.variable()) == placed
    fewer = RayConfig(scoring_workers=1, rollout_workers=0)
    assert [each.scoring for each in lay_out(fewer, ranks=2, worlds=0)[1]] == [(2,), ()]


def test_scoring_workers_without_work_are_an_error() -> None:
    idle = prepare(resolve(sections(ray={"scoring_workers": 2})))
    with pytest.raises(ConfigError, match="no model that only scores"):
        check_pools([idle])
    check_pools([prepare(resolve(sections()))])
    works = resolve(
        sections(algorithm={"name": "distill", "teacher": "embedded"}, ray={"scoring_workers": 2})
    )
    check_pools([idle, prepare(works)])


def test_workers_that_may_join_have_no_bundle() -> None:
    config = RayConfig(rollout_workers=3, least_rollout_workers=2)
    held, places = lay_out(config, ranks=2, worlds=1)
    assert places == [
        Bundles((RolloutPlace(2, (3,)), RolloutPlace(None, (None,)))),
        Bundles((RolloutPlace(4, (5,)),)),
    ]
    assert len(held) == 6
    placed = RayPlacement("here", "of this run", "kapelle-1", places[0])
    assert placement_here(placed.variable()) == placed


@pytest.mark.parametrize(
    ("ray", "training", "ranks", "reason"),
    [
        ({"rollout_workers": 2, "least_rollout_workers": 3}, {}, 1, r"2 or less"),
        (
            {"rollout_workers": 3, "least_rollout_workers": 1},
            {},
            2,
            r"each of 2 processes",
        ),
        ({"rollout_workers": 3, "least_rollout_workers": 1}, LEFT, 1, "all of 3"),
        (
            {"rollout_workers": 1},
            LEFT,
            2,
            "each of 2 processes",
        ),
    ],
)
def test_unusable_workers_are_errors(
    ray: dict[str, object], training: dict[str, object], ranks: int, reason: str
) -> None:
    config = resolve(sections(ray=ray, training={"steps": 1, "tasks_per_step": 4, **training}))
    with pytest.raises(ConfigError, match=reason):
        check_workers(config, ranks)
    ahead = {"steps": 1, "tasks_per_step": 4, **LEFT}
    check_workers(resolve(sections(ray={"rollout_workers": 2}, training=ahead)), 2)
