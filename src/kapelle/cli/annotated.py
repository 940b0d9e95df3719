"""Resolved settings as YAML, with a comment on where each value that is not a default came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from kapelle.cli.output import printable


def annotated_yaml(values: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    """Return `values` as YAML; leaves whose origin is not `default` carry it as a comment.

    `origin` is keyed by dotted path, like `Recipe.origin`. Read as YAML, the text gives `values` again.
    """
    return "\n".join(_mapping(values, origin, "", 0))


def _mapping(values: Mapping[str, Any], origin: Mapping[str, str], at: str, depth: int) -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        path = f"{at}.{key}" if at else str(key)
        head = f"{'  ' * depth}{_scalar(str(key))}:"
        if isinstance(value, Mapping) and value:
            lines += [head, *_mapping(value, origin, path, depth + 1)]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines.append(head)
            for index, item in enumerate(value):
                inner = _mapping(item, origin, f"{path}.{index}", depth + 2)
                first = inner[0].lstrip()
                lines += [f"{'  ' * (depth + 1)}- {first}", *inner[1:]]
        else:
            lines.append(f"{head} {_scalar(value)}{_comment(origin.get(path, 'default'))}")
    return lines


def _comment(source: str) -> str:
    return "" if source == "default" else f"   # {printable(' '.join(source.split()))}"


def _scalar(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    # Double quotes keep on one line what YAML's own choice would spread over several lines.
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text = yaml.safe_dump(
        [value], default_flow_style=True, default_style=style, allow_unicode=True, width=10**9
    )
    return text.strip().removeprefix("[").removesuffix("]")
