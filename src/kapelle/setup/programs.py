"""Programs and servers that settings name and a run would start or ask: left out where a recipe is only looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kapelle.environments.tools.mcp import Mcp
from kapelle.settings.base import Settings

S = TypeVar("S")


def without_programs(settings: S) -> tuple[S, list[str]]:
    """Return settings without the MCP servers among their tools, and what stands for each: its command or its address."""
    left_out: list[str] = []
    changed: S = _without(settings, left_out)
    return changed, left_out


def _without(value: Any, left_out: list[str]) -> Any:
    """Return a value of settings without servers; the same object if it has none."""
    if isinstance(value, Settings):
        own = {name: getattr(value, name) for name in type(value).model_fields}
        found = {name: _without(each, left_out) for name, each in own.items()}
        changed = {name: each for name, each in found.items() if each is not own[name]}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, Mapping):
        inner = {key: _without(each, left_out) for key, each in value.items()}
        return inner if any(inner[key] is not value[key] for key in inner) else value
    if isinstance(value, tuple):
        left_out += [each.server for each in value if isinstance(each, Mcp)]
        kept = tuple(_without(each, left_out) for each in value if not isinstance(each, Mcp))
        same = len(kept) == len(value) and all(one is other for one, other in zip(kept, value, strict=True))
        return value if same else kept
    return value
