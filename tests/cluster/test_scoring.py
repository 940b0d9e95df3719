"""Scoring workers return the same scores as the ranks, also after deaths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.algorithms.test_every_algorithm import run_of
from tests.support.cluster import Cluster, learned
from tests.support.tiny import frozen_copy, same_bits

from kapelle import Trainer
from kapelle.cluster.scoring import RayScorer, dump_samples, load_samples
from kapelle.errors import ConfigError
from kapelle.rows import Sample
from kapelle.types import Constraint, Image, Routing


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a verifier that was trained briefly."""
    place = tmp_path_factory.mktemp("judge")
    with Trainer(**run_of("verifier")) as trainer:
        trainer.train(1)
        trainer.save_policies(place)
    return str(place / "verifier")


def workers(count: int, players: int = 0) -> dict[str, int]:
    return {"rollout_workers": players, "scoring_workers": count}


def paid(judge: str, **changes: Any) -> dict[str, Any]:
    ray = {"rollout_workers": 0, "scoring_workers": 1}
    return {**run_of("grpo"), "reward_model": {"path": judge, "weight": 0.5}, "ray": ray, **changes}


def test_a_worker_scores_bitwise_the_same(judge: str, cluster: Callable[..., Cluster]) -> None:
    alone = learned(paid(judge))
    made = cluster(workers(1))
    assert learned(paid(judge)).is_same(alone)
    assert [method for _, method in made.asked].count("score") == 3, "two steps, and the start"
    assert (made.started, made.ended, made.left) == (1, [0], True)


@pytest.mark.parametrize("algorithm", [{"name": "qmix", "group_size": 2, "embedder": "embedded"}])
def test_teachers_and_embedding_models_are_scored_there_too(
    algorithm: dict[str, Any], cluster: Callable[..., Cluster]
) -> None:
    run = run_of(algorithm["name"])
    settings = {**run, "algorithm": {**run["algorithm"], **algorithm}}
    alone = learned(settings)
    made = cluster(workers(1))
    settings["ray"] = {"rollout_workers": 0, "scoring_workers": 1}
    assert learned(settings).is_same(alone)
    assert {"score", "embed"} & {method for _, method in made.asked[3:]}


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["begin", "score"])
def test_a_worker_that_dies_is_replaced_and_nothing_changes(
    method: str, judge: str, cluster: Callable[..., Cluster]
) -> None:
    cluster(workers(1))
    undisturbed = learned(paid(judge))
    seen: list[str] = []

    def dies(number: int, request: str) -> bool:
        seen.append(request)
        return request == method and number == 0 and seen.count(method) > (method == "score")

    made = cluster(workers(1), dies)
    assert learned(paid(judge)).is_same(undisturbed)
    assert made.started == 2


def test_a_run_resumes_with_and_without_scoring_workers(
    judge: str, cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = learned(paid(judge), steps=3)
    with Trainer(**paid(judge), run_dir=tmp_path / "run") as trainer:
        trainer.train(1)
    cluster(workers(1))
    with Trainer(**paid(judge), run_dir=tmp_path / "run", resume=True) as trainer:
        trainer.train(1)
    monkeypatch.delenv("KAPELLE_RAY")
    with Trainer(**paid(judge), run_dir=tmp_path / "run", resume=True) as trainer:
        trainer.train(1)
        weights = {name: frozen_copy(trainer.engine.weights(name)) for name in trainer.team.trained}
    assert same_bits(weights, whole.weights)


def test_other_weights_on_disk_are_an_error(
    judge: str, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(workers(1))
    monkeypatch.setattr(RayScorer, "_begin", lambda *_: {"base": "another"})
    with pytest.raises(ConfigError, match="loaded different weights from 'embedded'"):
        learned(paid(judge))


def test_samples_survive_their_transport() -> None:
    image = Image("0" * 32, "image/png", b"\x89PNG")
    reply = [
        Sample("a", (5, 6, 7), (1, 3), temperature=0.5, bundle=4, images=(image, image)),
        Sample(
            "b",
            (9,),
            (1,),
            routing=Routing(2, 1, b"\x00\x01\xff\x00"),
            constraint=Constraint.choices(["yes", "no"]),
            begin=1,
        ),
    ]
    found = load_samples(dump_samples(reply))
    assert found == reply
    assert found[0].images[0].data == image.data
    columns = {"advantage": torch.ones(2)}
    assert load_samples(dump_samples([Sample("a", (5, 6), (1, 2), columns)])) == [Sample("a", (5, 6), (1, 2))]
