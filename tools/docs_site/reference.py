"""The reference, made from the code: every setting, the command line, the public names of Python.

Each function returns Markdown; `hooks.py` puts it into the site. Nothing of it is committed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from tools.docs_site.settings_table import PLUGGED, known_keys, meaning, models_in, purpose, table

import kapelle
from kapelle import environments, workflows
from kapelle.algorithm import algorithm_class
from kapelle.algorithms import BUILTIN as ALGORITHMS
from kapelle.cli.arguments import COMMANDS
from kapelle.cli.parser import parse
from kapelle.engines import rollout, train
from kapelle.engines.rollout.protocol import engine_class
from kapelle.engines.train.protocol import train_engine_class
from kapelle.environment import environment_class
from kapelle.settings.base import Settings
from kapelle.settings.schema import RunConfig
from kapelle.workflow import workflow_class

KINDS = {
    "algorithms": ("algorithm", ALGORITHMS, algorithm_class),
    "environments": ("environment", environments.BUILTIN, environment_class),
    "workflows": ("workflow", workflows.BUILTIN, workflow_class),
    "engines": ("engine", rollout.BUILTIN, engine_class),
    "train_engines": ("train_engine", train.BUILTIN, train_engine_class),
}
"""What has a `name` in a recipe: page → (section of a recipe, names, how a name finds its class)."""

TIMED = ("environment", "engine")
"""Sections whose settings have a `timeout` in addition."""


def pages() -> dict[str, str]:
    """Return the whole reference: path in the site's sources → Markdown."""
    made = {
        "reference/settings.md": run_page(),
        "reference/cli.md": cli_page(),
        "reference/api.md": api_page(),
    }
    made |= {f"reference/settings_{kind}.md": plugin_page(kind) for kind in KINDS}
    return made


def keys() -> set[str]:
    """Return every key that a recipe with built-in plug-ins can hold, written with dots."""
    roots = {section: [find(name) for name in names] for section, names, find in KINDS.values()}
    return known_keys(roots) | {f"{section}.timeout" for section in TIMED}


def run_page() -> str:
    """Return the page of a recipe's sections."""
    text = (
        "# Settings of a run\n\nEvery key that a recipe can hold, with its default. On the command line a key is written "
        "`section.key=value`. *Resume* says whether a resumed run may change it: *free* (no result depends on it), *from then "
        "on*, or not at all.\n\nThe sections `algorithm`, `environment`, `workflow`, `engine` and `train_engine` "
        "depend on their `name`: "
        + ", ".join(f"[{kind.replace('_', ' ')}](settings_{kind}.md)" for kind in KINDS)
        + ".\n\n"
    )
    parts = [text, _inner(RunConfig, "The top of a recipe", 2)]
    parts += [_inner(model, path, 2 + min(path.count("."), 1)) for path, model in _nested(RunConfig, "")]
    return "".join(parts)


def plugin_page(kind: str) -> str:
    """Return the page of one kind of plug-in."""
    section, names, find = KINDS[kind]
    parts = [
        f"# Settings of {kind.replace('_', ' ')}\n\nThe section `{section}` of a recipe, by its `name`.\n\n"
    ]
    for name in names:
        settings = find(name)
        parts.append(f"## {name}\n\n{purpose(settings)}\n\n{table(settings)}")
        parts += [_inner(model, path, 3) for path, model in _nested(settings, section)]
    return "".join(parts)


def cli_page() -> str:
    """Return the page of the command line, as `--help` prints it."""
    parts = ["# Command line\n\n", f"```text\n{parse([])}\n```\n\n"]
    for name, command in COMMANDS.items():
        shown = parse([name, "--help"])
        parts.append(
            f"## kapelle {name}\n\n{command.summary[0].upper()}{command.summary[1:]}.\n\n```text\n{shown}\n```\n\n"
        )
    return "".join(parts)


def api_page() -> str:
    """Return the page of what `import kapelle` offers, for mkdocstrings to fill."""
    named = {name: getattr(kapelle, name) for name in kapelle.__all__ if not name.startswith("_")}
    return (
        "# Python\n\nWhat `import kapelle` offers. Names are loaded when they are first used.\n\n"
        + "".join(
            f"## kapelle.{name}\n\n::: {found.__module__}.{found.__qualname__}\n\n"
            for name, found in sorted(named.items())
        )
    )


def _inner(model: type[Settings], path: str, level: int) -> str:
    return f"{'#' * level} {path}\n\n{purpose(model)}\n\n{table(model)}"


def _nested(
    model: type[Settings], path: str, seen: set[type[Settings]] | None = None
) -> Iterator[tuple[str, type[Settings]]]:
    """Yield (where it is written, settings) of everything that stands inside, each kind once, right after what holds it."""
    seen = {model} if seen is None else seen
    for key, field in model.model_fields.items():
        if model is RunConfig and key in PLUGGED:
            continue
        choices = list(models_in(field.annotation))
        for each, listed in choices:
            if each not in seen:
                seen.add(each)
                there = f"{path}.{key}".lstrip(".") + ("[…]" if listed else "")
                yield there if len(choices) == 1 else f"{there}, {_spaced(each)}", each
                yield from _nested(each, there, seen)


def _spaced(model: type[Settings]) -> str:
    """Return a class's name in words: `OwnModel` is `own model`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", model.__name__.removesuffix("Config")).lower()


def undocumented() -> list[str]:
    """Return the settings without a meaning, as `module.Class.key` of the class that declares each."""
    found = set()
    roots: list[type[Settings]] = [
        RunConfig,
        *(find(name) for _, names, find in KINDS.values() for name in names),
    ]
    for root in roots:
        for model in [root, *(inner for _, inner in _nested(root, ""))]:
            for key in model.model_fields:
                if key not in {"name", "tool", *PLUGGED} and not meaning(model, key):
                    owner = next(
                        each for each in reversed(model.__mro__) if key in inspect.get_annotations(each)
                    )
                    found.add(f"{owner.__module__}.{owner.__name__}.{key}")
    return sorted(found)
