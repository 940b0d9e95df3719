"""A run in this process with actors of `tests.support.cluster`, placed by its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.support.cluster import Cluster, Dies

from kapelle.cluster import actors, ray_workers, sampling
from kapelle.cluster.placement import RayPlacement, lay_out
from kapelle.settings.schema import RayConfig

Placed = Callable[..., Cluster]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Placed:
    """Place a run with these settings of `ray` on its own cluster; actors for which `dies` is true die."""

    def make(ray: Mapping[str, Any], dies: Dies = lambda *_: False) -> Cluster:
        made = Cluster(dies)
        monkeypatch.setattr(ray_workers, "ActorConnection", made)
        monkeypatch.setattr(actors, "first_answered", lambda asked, _: asked[0] if asked else None)
        monkeypatch.setattr(sampling, "AGAIN", 0.0)
        [bundles] = lay_out(RayConfig.model_validate(ray), ranks=1, worlds=0)[1]
        for name, value in RayPlacement("here", "of it", "group", bundles).variable().items():
            monkeypatch.setenv(name, value)
        return made

    return make
