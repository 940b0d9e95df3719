"""Which parts of a recipe belong to the embedded model, and what happens to them with another model.

Recipes train the embedded model from nothing in minutes: a supervised warm-up of all its weights, learning rates of
1e-3, answers of ten tokens. A recipe's section `real` holds the values for a pretrained model; `--real` lays it over
the recipe. Even without it, another `model.path` leaves out the recipe's own warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kapelle.settings.overlays import replace_origin

REAL = "real"
"""The section of a recipe that is laid over the rest by `--real`."""
LEFT_OUT = "left out: the recipe's own is for the embedded model"
"""Origin of a warm-up that is left out for another model."""


def own_warmup_left_out(
    values: dict[str, Any], origin: dict[str, str], own: frozenset[str]
) -> tuple[str, ...]:
    """Remove, in place, a warm-up that only the recipe itself asks for, where the base is not the embedded model.

    `own` are the origins that count as the recipe itself. Returns notes for the user.
    """
    path, warmup = _path(values), values.get("warmup")
    if path == "embedded" or not isinstance(warmup, Mapping):
        return ()
    asked = sorted({source for key, source in origin.items() if _is_warmup(key) and source not in own})
    if asked or not own:
        source = ", ".join(asked) or "the run's settings"
        details = ", ".join(f"{key} {value}" for key, value in warmup.items())
        return (f"warm-up: of all weights of {path} ({details}), as asked for by {source}.",)
    values["warmup"] = None
    replace_origin(origin, "warmup", None, LEFT_OUT)
    note = f"warm-up: left out; the recipe's is for the embedded model and would move all weights of {path}"
    return (f"{note}. Set warmup.steps=N to have one all the same.",)


def _is_warmup(key: str) -> bool:
    return key == "warmup" or key.startswith("warmup.")


def no_real_values(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes for the user where a recipe with a section `real` runs another model without it."""
    path = _path(values)
    if path == "embedded":
        return ()
    note = f"model: these learning rates and lengths are for the embedded model, not for {path}"
    return (f"{note}; add --{REAL} for this recipe's values for a pretrained one.",)


def _path(values: Mapping[str, Any]) -> str:
    model = values.get("model")
    path = model.get("path") if isinstance(model, Mapping) else None
    return "embedded" if path is None else str(path)
