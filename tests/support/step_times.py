"""What the times of a step add up to."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kapelle.runs.timeline import ACTIVITIES


def check_times(metrics: Mapping[str, float]) -> None:
    """Assert that the times of all phases and the rest add up to the time of the step."""
    parts = [metrics[f"time/{name}"] for name in (*ACTIVITIES, "idle")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(metrics["time/step"], abs=1e-6)
