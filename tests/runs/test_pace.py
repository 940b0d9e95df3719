"""Which phase takes most of a step, and what to change, for numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kapelle.runs.pace import Pace, pace_of

SETTINGS: dict[str, dict[str, Any]] = {
    "engine": {"name": "local", "max_rows": 1024},
    "training": {"microbatch_tokens": "auto", "gradient_checkpointing": False, "asynchronous": False},
    "episode": {"environment_workers": 0},
}


def found(
    seconds: dict[str, float], settings: dict[str, dict[str, Any]] | None = None, **metrics: float
) -> Pace | None:
    """Return the pace of a slow first step and three equal steps."""
    row = {f"time/{name}": value for name, value in seconds.items()} | metrics
    columns = {name: [100 * value, value, value, value] for name, value in row.items()}
    return pace_of(columns, {**SETTINGS, **(settings or {})})


def training(**values: Any) -> dict[str, dict[str, Any]]:
    return {"training": {**SETTINGS["training"], **values}}


def test_shares_are_those_of_the_mean_step_without_the_first() -> None:
    pace = found({"generate": 3.0, "update": 0.5, "idle": 0.5}, samples=32)
    assert pace is not None
    assert (pace.steps, pace.seconds) == (3, 4.0)
    assert pace.shares == {"generate": 0.75, "update": 0.125, "idle": 0.125}
    assert pace.line().startswith("`generate` takes 75 % of a step (3 of 4 s): ")


def test_only_the_last_steps_count() -> None:
    times: dict[str, list[float | None]] = {
        "time/generate": [9.0, 9.0, 1.0, 1.0],
        "time/update": [0.0, 0.0, 3.0, None],
    }
    pace = pace_of(times, SETTINGS, steps=2)
    assert pace is not None
    assert pace.shares == {"generate": 0.25, "update": 0.75}


@pytest.mark.parametrize(
    ("seconds", "settings", "metrics", "setting"),
    [
        ({"generate": 8.0, "update": 1.0}, {}, {"samples": 32.0}, "training.tasks_per_step"),
        (
            {"generate": 8.0, "update": 1.0},
            {"engine": {"name": "vllm", "max_rows": 16}},
            {"samples": 512.0},
            "engine.max_rows",
        ),
        ({"generate": 6.0, "update": 4.0}, {}, {"samples": 512.0}, "training.asynchronous: true"),
        ({"generate": 6.0, "update": 1.0}, {}, {"samples": 512.0}, "engine.name: vllm"),
        (
            {"generate": 6.0, "update": 4.0},
            training(asynchronous=True),
            {"samples": 512.0},
            "training.max_staleness",
        ),
        (
            {"generate": 1.0, "update": 4.0},
            training(microbatch_tokens=4096),
            {"tokens/a": 5000.0},
            "training.microbatch_tokens",
        ),
        (
            {"generate": 0.5, "update": 4.0},
            training(gradient_checkpointing=True),
            {},
            "training.gradient_checkpointing: false",
        ),
        ({"generate": 2.0, "update": 4.0}, {}, {"samples": 32.0}, "training.asynchronous: true"),
        ({"generate": 0.5, "update": 4.0}, {}, {"samples": 32.0}, "--processes"),
        ({"score": 4.0, "update": 1.0}, {}, {}, "--processes"),
        ({"environment": 4.0, "update": 1.0}, {}, {}, "episode.environment_workers"),
        ({"grade": 4.0, "update": 1.0}, {}, {}, "episode.environment_workers"),
        (
            {"environment": 4.0, "update": 1.0},
            {"environment": {"name": "remote"}},
            {},
            "environment.address",
        ),
        ({"publish": 4.0, "update": 1.0}, {}, {}, "team.sharing: lora"),
        ({"idle": 4.0, "update": 1.0}, {}, {}, "cProfile"),
    ],
)
def test_the_change_follows_from_the_numbers(
    seconds: dict[str, float], settings: dict[str, dict[str, Any]], metrics: dict[str, float], setting: str
) -> None:
    pace = found(seconds, settings, **metrics)
    assert pace is not None
    assert f"`{setting}" in pace.line() or setting in ("--processes", "cProfile")
    assert setting in pace.line()


def test_nothing_is_said_if_nothing_dominates() -> None:
    pace = found({"generate": 4.0, "environment": 3.0, "update": 3.0}, samples=32.0)
    assert pace is not None
    assert pace.line() == ""


def test_a_short_run_or_one_without_times_has_no_pace() -> None:
    assert pace_of({"time/generate": [9.0, 1.0]}, SETTINGS) is None
    assert pace_of({"success": [0.1] * 9}, SETTINGS) is None
    assert pace_of({}, {}) is None


def test_settings_that_are_missing_are_no_error() -> None:
    pace = pace_of({"time/update": [1.0] * 4}, {"training": None})
    assert pace is not None
    assert "--processes" in pace.line()
