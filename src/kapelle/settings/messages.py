"""Messages for wrong settings: the key, who set it, and the closest one that would have been right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pydantic

from kapelle.errors import did_you_mean
from kapelle.runtime.redaction import without_secrets
from kapelle.settings.base import Settings


def explain(
    model: type[Settings],
    values: Mapping[str, Any],
    error: pydantic.ValidationError,
    origin: Mapping[str, str],
    at: str = "",
) -> str:
    """Return one sentence on the most likely fault; a setting of several possible kinds has faults as each of them.

    The kind that fits best is the one whose faults lie deepest in `values`, then the one with the fewest faults.
    Among its faults, an unknown key comes first.
    """
    found = error.errors(include_url=False)
    beside = Counter(problem["loc"][:-1] for problem in found)
    ranked = [
        (_keys(p["loc"], values, missing=p["type"] == "missing"), -beside[p["loc"][:-1]], p) for p in found
    ]
    keys, _, problem = max(ranked, key=lambda one: (len(one[0]), one[1], one[2]["type"] == "extra_forbidden"))
    path = ".".join([at, *keys] if at else keys)
    source = next((name for key, name in origin.items() if key == path or key.startswith(f"{path}.")), "")
    where = f" (set in {source})" if source else ""
    if problem["type"] == "extra_forbidden":
        return f"Unknown key '{path}'{where}.{did_you_mean(keys[-1], _known_keys(model, keys[:-1]))}"
    if problem["type"] == "missing":
        return f"'{path}' is missing. Add it to the recipe."
    value = without_secrets(repr(problem["input"]))
    return f"'{path}' cannot be {value}{where}: {problem['msg'].removeprefix('Value error, ')}."


def _keys(location: Sequence[int | str], values: object, *, missing: bool) -> list[str]:
    """Return the keys of a location; its other parts name the kind that pydantic tried."""
    keys: list[str] = []
    for part in location[:-1] if missing else location:
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list | tuple) and str(part).isdigit():
            values = values[int(part)]
        else:
            continue
        keys.append(str(part))
    return [*keys, str(location[-1])] if missing else keys


def _known_keys(model: type[Settings], path: Sequence[str]) -> list[str]:
    models = [model]
    for part in path:
        fields = [one.model_fields[part] for one in models if part in one.model_fields]
        models = [inner for field in fields for inner in models_in(field.annotation)] or models
    return list(dict.fromkeys(key for one in models for key in one.model_fields))


def models_in(annotation: Any) -> list[type[Settings]]:
    """Return the classes of settings that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for inner in get_args(annotation) for found in models_in(inner)]
