"""Pools of sampling workers: models in several actors sample like models in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.cluster import Cluster, Learned
from tests.support.cluster import learned as run
from tests.support.tiny import tiny_model
from tests.training.test_ranks import furthest

from kapelle.cluster.placement import RayPlacement, check_pools, lay_out, placement_here
from kapelle.cluster.sampling import RaySampler
from kapelle.errors import ConfigError
from kapelle.models.weights import save_model
from kapelle.settings.schema import RayConfig
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import resolve

POOLS = {"big": {"agents": ["ada"]}, "small": {"agents": ["ben"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of another model."""
    folder = tmp_path_factory.mktemp("model") / "other"
    save_model(folder, tiny_model(seed=3))
    return str(folder)


def settings(model: str, ray: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Two agents that read each other, each with its own model."""
    agents = [
        {"name": "ada", "weights": "lora"},
        {"name": "ben", "weights": {"model": model, "train": "full"}},
    ]
    return {
        "model": {"embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}},
        "environment": {"name": "tests.support.plugins:Digest"},
        "workflow": {"name": "debate", "rounds": 2},
        "team": {"agents": agents, "sampling": {"max_tokens": 4}, "lora": {"rank": 2}},
        "algorithm": {"name": "grpo", "group_size": 2},
        "training": {"steps": 2, "tasks_per_step": 3},
        "optimizer": {
            "lr": 1e-2,
            "eps": 1e-4,
        },  # Adam divides rounding by rounding where a gradient is nearly zero
        "evaluation": {"problems": 3, "before_and_after": False},
        "ray": {"rollout_workers": 1, **(ray or {})},
        **changes,
    }


def learned(answer: dict[str, Any]) -> Learned:
    return run(answer, evaluates=True)


@pytest.mark.parametrize("pools", [POOLS])
def test_a_team_in_pools_samples_as_one_in_one_process(
    pools: dict[str, Any], model: str, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster({})
    together = learned(settings(model))
    ray = {"pools": pools}
    held: list[set[str]] = []
    begin = RaySampler._begin

    def noted(worker: RaySampler, answer: Any) -> None:
        begin(worker, answer)
        held.append(set(worker._hashes))

    monkeypatch.setattr(RaySampler, "_begin", noted)
    made = cluster(ray)
    apart = learned(settings(model, ray))
    assert apart.tokens == together.tokens, "the same tokens"
    assert furthest(apart.weights, together.weights) <= 1e-5
    assert made.started == 1 + len(pools)
    assert held == [{"base"}, {"own:ben"}][-len(pools) :], "each has a part of the team"


@pytest.mark.sample(2)
@pytest.mark.parametrize(("method", "when"), [("begin", 1), ("sample", 5)])
def test_a_sampling_worker_that_dies_is_replaced_and_nothing_changes(
    method: str, when: int, model: str, cluster: Callable[..., Cluster]
) -> None:
    ray = {"pools": POOLS}
    cluster(ray)
    undisturbed = learned(settings(model, ray))
    seen: list[str] = []

    def dies(number: int, request: str) -> bool:
        seen.append(request if number == 2 else "")
        return number == 2 and request == method and seen.count(method) == when

    made = cluster(ray, dies)
    disturbed = learned(settings(model, ray))
    assert made.started == 4
    assert disturbed.is_same(undisturbed)


def test_pools_are_placed_once_and_rollout_workers_share_their_workers() -> None:
    pools = {"big": {"agents": ["ben"], "workers": 2, "gpus": 2}, "small": {"agents": ["ada"]}}
    config = RayConfig.model_validate({"rollout_workers": 3, "pools": pools})
    held, places = lay_out(config, ranks=2, worlds=0)
    assert [each.gpus for each in held] == [0, 0, 2, 2, 0, 0, 0, 0]
    assert [each.samplers for place in places for each in place.rollout] == [
        (("big", 2), ("small", 4)),
        (("big", 2), ("small", 4)),
        (("big", 3), ("small", 4)),
    ]
    placed = RayPlacement("here", "of this run", "kapelle-1", places[0])
    assert placement_here(placed.variable()) == placed


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        (
            {"big": {"agents": ["bem"]}},
            r"`ray.pools.big.agents` contains 'bem', which is not an agent.*Did you mean 'ben'",
        ),
        ({"a": {"agents": ["ben"]}, "b": {"agents": ["ben"]}}, r"in the pool 'a'"),
        (
            {"big": {"agents": ["ada"]}},
            r"'cleo', which shares a model",
        ),
        ({"big": {"agents": ["dan"]}}, r"contains 'dan'"),
    ],
)
def test_impossible_pools_are_errors(pools: dict[str, Any], reason: str, model: str) -> None:
    answer = settings(model, {"pools": pools})
    served = {"endpoint": "http://127.0.0.1:9/v1", "model": "x"}
    answer["team"]["agents"] += [{"name": "cleo", "weights": "lora"}, {"name": "dan", "weights": served}]
    with pytest.raises(ConfigError, match=reason):
        check_pools([prepare(resolve(answer))])
