"""A world that calls `breakpoint()` once, and writes down where the cluster is for whoever debugs it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tests.support.plugins import Digest, DigestWorld

from kapelle.cluster.actors import ADDRESS
from kapelle.types import Task


class StopsHere(Digest):
    """`Digest`, whose first episode stops in the process that plays it until a debugger changes a number."""

    name: Literal["tests.support.stops_here:StopsHere"] = "tests.support.stops_here:StopsHere"  # type: ignore[assignment]

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DigestWorld:
        place = Path(os.environ["KAPELLE_TEST_ADDRESS"])
        if not place.exists():
            import ray

            told = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
            address = os.environ.get(ADDRESS) or str(ray.get_runtime_context().gcs_address)
            place.with_suffix(".part").write_text(json.dumps({"RAY_ADDRESS": address, **told}))
            place.with_suffix(".part").rename(place)
            found = [6 * 7]
            breakpoint()  # noqa: T100
            assert found == [43], "the debugger has changed it"
        return super().start(task, agents, seed)
