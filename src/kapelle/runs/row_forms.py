"""What a row of `metrics.jsonl` or `evaluations.jsonl` must hold for its readers; anything else counts as damage.

Rows carry no hash: a changed digit is not noticed. A changed name is, and so is a value of the wrong type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kapelle.types import Json


def metrics_fault(row: Mapping[str, Json]) -> str | None:
    """Return what is wrong with the metrics of a step, in words; None when nothing is wrong."""
    odd = next((name for name, value in row.items() if not _is_number(value)), None)
    return _step_fault(row) or (None if odd is None else f"{odd!r} is not a number")


def evaluation_fault(row: Mapping[str, Json]) -> str | None:
    """Return what is wrong with an evaluation's row, in words; None when nothing is wrong."""
    fault = _step_fault(row)
    if fault is not None:
        return fault
    for name, (expected, fits) in EVALUATION.items():
        if name in row and not fits(row[name]):
            return f"{name!r} is not {expected}"
        if name not in row and name in NEEDED:
            return f"it has no {name!r}"
    return None


def _step_fault(row: Mapping[str, Json]) -> str | None:
    if "step" not in row:
        return "it has no 'step'"
    return None if _is_count(row["step"]) else "'step' is not a whole number of steps"


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_numbers(value: Json) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_interval(value: Json) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)))


def _is_judgement(value: Json) -> bool:
    if not isinstance(value, dict) or not {"auc_within", "interval_within"} <= value.keys():
        return False
    area, interval = value["auc_within"], value["interval_within"]
    return _is_interval(interval) and (_is_number(area) or (area is None and interval is None))


_COUNT = ("a whole number", _is_count)
EVALUATION: Mapping[str, tuple[str, Callable[[Json], bool]]] = {
    "problems": _COUNT,
    "success": ("a number or null", lambda value: value is None or _is_number(value)),
    "interval": ("two numbers or null", _is_interval),
    "reward": ("a mapping of agents to numbers", _are_numbers),
    "tokens": ("a number", _is_number),
    "scored": ("a whole number or null", lambda value: value is None or _is_count(value)),
    "failed": _COUNT,
    "reason": ("text", lambda value: isinstance(value, str)),
    "fewer": ("text", lambda value: isinstance(value, str)),
    "parts": (
        "a mapping",
        lambda value: isinstance(value, dict) and all(isinstance(p, dict) for p in value.values()),
    ),
    "verifier": ("how well a verifier judges, or null", lambda value: value is None or _is_judgement(value)),
    "games": ("true or false", lambda value: isinstance(value, bool)),
    "part_reward": (
        "a mapping of parts to mappings of agents to numbers",
        lambda value: isinstance(value, dict) and all(map(_are_numbers, value.values())),
    ),
}
"""For each value its expected type, in words, and a test of it."""
NEEDED = ("problems", "success", "interval", "reward")
"""Values in rows of every version."""
