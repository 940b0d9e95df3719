"""Which workers each rank is told of."""

from __future__ import annotations

from kapelle.cluster.placement import Bundles, RayPlacement, RolloutPlace, lay_out, placement_here
from kapelle.settings.schema import RayConfig


def test_workers_are_dealt_in_turn_each_with_its_worlds() -> None:
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


def test_ranks_that_play_have_the_worlds() -> None:
    held, places = lay_out(RayConfig(rollout_workers=0), ranks=2, worlds=2)
    assert places == [Bundles(worlds=(2, 3)), Bundles(worlds=(4, 5))]
    assert len(held) == 6


def test_a_rank_is_told_by_a_variable() -> None:
    placed = RayPlacement(
        "10.0.0.1:6379", "of this run", "kapelle-1", Bundles((RolloutPlace(2, (3, 4)),), (7,))
    )
    assert placement_here(placed.variable()) == placed
    assert placement_here({"RANK": "0"}) is None
