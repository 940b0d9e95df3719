"""Implements `kapelle recipes`, which lists the built-in recipes, prints a recipe, or copies a recipe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kapelle.cli.output import command, writing
from kapelle.errors import ConfigError, did_you_mean
from kapelle.runtime.console import say

ACTIONS = ("ls", "show", "cp")


def run(arguments: argparse.Namespace) -> int:
    """List the recipes, print a recipe, or copy a recipe."""
    action = arguments.action or "ls"
    if action not in ACTIONS:
        raise ConfigError(f"Unknown action '{action}' of `kapelle recipes`.{did_you_mean(action, ACTIONS)}")
    if action == "cp":
        text = _text("cp", arguments.name)
        path = Path(arguments.destination or f"{arguments.name}.yaml")
        if path.is_dir():
            path /= f"{arguments.name}.yaml"
        with writing(path, "destination"), path.open("x", encoding="utf-8") as file:
            file.write(text)
        say(f"{path} is written; change it as you like. Train it with: {command('train', str(path))}")
        return 0
    if action == "show":
        say(_text("show", arguments.name).rstrip())
        return 0
    if arguments.name is not None:
        raise ConfigError(
            f"`kapelle recipes ls` lists all recipes. Remove '{arguments.name}', or print it with `show`."
        )
    from kapelle.settings.overlays import parse_yaml
    from kapelle.setup.recipe import REAL, builtin_recipes

    descriptions = {}
    for name, text in builtin_recipes().items():
        recipe = parse_yaml(text)
        path = recipe.get(REAL, {}).get("model", {}).get("path")
        real = f" --{REAL}: its values for a pretrained model, by default {path}." if path else ""
        descriptions[name] = " ".join(str(recipe.get("description", "")).split()) + real
    if arguments.json:
        say(json.dumps(descriptions, indent=1))
        return 0
    width = max(map(len, descriptions))
    for name, description in descriptions.items():
        first, end, _ = description.partition(". ")
        say(f"{name:{width}}  {first}{end.strip()}")
    return 0


def _text(action: str, name: str | None) -> str:
    from kapelle.setup.recipe import builtin_recipes

    recipes = builtin_recipes()
    if name is None:
        raise ConfigError(f"`kapelle recipes {action}` needs a name. `kapelle recipes ls` lists them.")
    if name not in recipes:
        raise ConfigError(f"Unknown recipe '{name}'.{did_you_mean(name, recipes)}")
    return recipes[name]
