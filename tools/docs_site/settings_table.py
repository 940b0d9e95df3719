"""One section's settings as a table: key, type, default, meaning, whether a resume may change it."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kapelle.settings.base import FREE, FROM_HERE_ON, Settings
from kapelle.settings.schema import (
    AgentConfig,
    LoraConfig,
    OptimizerConfig,
    RateConfig,
    RunConfig,
    SamplingConfig,
)
from kapelle.team import Agent, Lora
from kapelle.types import Sampling

PLUGGED = {
    "environment": "*required*",
    "workflow": "*required*",
    "algorithm": "*required*",
    "engine": "`local`",
    "train_engine": "`torch`",
}
"""Sections of a recipe that depend on their `name` → the name that they have without one."""
PLAIN = {str: "text", int: "integer", float: "number", bool: "`true` or `false`", type(None): "null"}
TWINS: Mapping[type, Sequence[type]] = {
    SamplingConfig: (Sampling,),
    LoraConfig: (Lora,),
    AgentConfig: (Agent,),
    RateConfig: (OptimizerConfig,),
}
"""Settings that become something else, which says what its fields mean: each is documented once."""
MOST_DOTS = 4
"""Depth at which keys of environments inside environments end."""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def table(model: type[Settings]) -> str:
    """Return a section's settings, a row for each."""
    rows = []
    for key, field in model.model_fields.items():
        if key == "name" and model is not RunConfig:
            continue
        plugged = PLUGGED.get(key) if model is RunConfig else None
        kind = "section, by its `name`" if plugged else _type(field.annotation) + _bounds(field)
        told = f"Settings of what `{key}.name` finds." if plugged else _cell(meaning(model, key))
        rows.append(f"| `{key}` | {kind} | {plugged or _default(field)} | {told} | {_resume(field)} |\n")
    if not rows:
        return "It has no settings.\n\n"
    return "| key | type | default | meaning | resume |\n|---|---|---|---|---|\n" + "".join(rows) + "\n"


def purpose(model: type[Settings]) -> str:
    """Return what a section is for, as its class says it."""
    return inspect.getdoc(model) or ""


def models_in(annotation: object, *, listed: bool = False) -> Iterator[tuple[type[Settings], bool]]:
    """Yield the sections that a type can hold, each with whether it stands in a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, Settings) and annotation.model_fields:
        yield annotation, listed
    inside = listed or typing.get_origin(annotation) in {tuple, list, dict}
    for part in typing.get_args(annotation):
        yield from models_in(part, listed=inside)


def meaning(model: type[Settings], key: str) -> str:
    """Return what stands under a field where it is declared, in the class or in one that it extends.

    A section that says nothing of its own means what its class says.
    """
    for each in [*model.__mro__, *TWINS.get(model, ())]:
        text = _docstrings(each).get(key)
        if text:
            return text
    for each in model.__mro__:
        if alias := _aliases(each).get(key):
            return alias
    inside = [each for each, _ in models_in(model.model_fields[key].annotation)]
    return purpose(inside[0]).partition("\n\n")[0] if len(inside) == 1 else ""


@cache
def _aliases(model: type) -> dict[str, str]:
    """Return field → docstring of the named type of its values, such as `TeamReward`, of what one class itself declares."""
    module = inspect.getmodule(model)
    if module is None or not module.__name__.startswith("kapelle."):
        return {}
    names = {key: kind for key, kind in inspect.get_annotations(model).items() if isinstance(kind, str)}
    tree = ast.parse(inspect.getsource(module))
    homes = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return {
        key: text for key, kind in names.items() if (text := _of_type(homes.get(kind, module.__name__), kind))
    }


@cache
def _of_type(module: str, name: str) -> str:
    """Return the docstring under the assignment of a named type in a module; empty without one."""
    if not module.startswith("kapelle.") or not name.isidentifier():
        return ""
    for statement, following in pairwise(ast.parse(inspect.getsource(sys.modules[module])).body):
        named = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return inspect.cleandoc(str(following.value.value))
    return ""


@cache
def _docstrings(model: type) -> dict[str, str]:
    """Return field → docstring of what one class itself declares."""
    try:
        source = textwrap.dedent(inspect.getsource(model))
    except (OSError, TypeError):
        return {}
    body = [part for each in ast.parse(source).body if isinstance(each, ast.ClassDef) for part in each.body]
    found = {}
    for statement, following in pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            found[statement.target.id] = inspect.cleandoc(following.value.value)
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(annotation: object) -> str:
    """Return a type as a user writes its values."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(parts[0]) + "".join(_bounds(part) for part in parts[1:] if isinstance(part, FieldInfo))
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(dict.fromkeys(map(_type, parts)))
    if origin in {tuple, list}:
        return "list of " + " or ".join(dict.fromkeys(_type(part) for part in parts if part is not ...))
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return "section"
    return PLAIN.get(annotation, "mapping") if isinstance(annotation, type) else "mapping"


def _bounds(field: FieldInfo) -> str:
    told = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(rule, name)
    ]
    return f", {', '.join(told)}" if told else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "*required*"
    if isinstance(value, Settings):
        return "see below"
    if isinstance(value, tuple) and value:
        return f"`[{', '.join(map(str, value))}]`"
    if value is None or isinstance(value, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`".replace(" ", "")
    return f"`{value}`" if value or value == 0 else "none"


def _resume(field: FieldInfo) -> str:
    if FREE in field.metadata:
        return "free"
    return "from then on" if FROM_HERE_ON in field.metadata else ""


def known_keys(roots: Mapping[str, Sequence[type[Settings]]]) -> set[str]:
    """Return every key that a recipe can hold, written with dots: `algorithm.loss.clip_low`, `team.agents.prompt`.

    `roots` are the classes that a plugged section may have, by section.
    """
    found: set[str] = set()
    waiting: list[tuple[str, type[Settings]]] = [("", RunConfig)]
    seen: set[tuple[str, type[Settings]]] = set()
    while waiting:
        path, model = waiting.pop()
        if (path, model) in seen or path.count(".") > MOST_DOTS:
            continue
        seen.add((path, model))
        for key, field in model.model_fields.items():
            here = f"{path}.{key}".lstrip(".")
            found.add(here)
            inside = roots.get(here) or [each for each, _ in models_in(field.annotation)]
            waiting += [(here, each) for each in inside]
    return found
