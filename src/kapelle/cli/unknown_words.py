"""Words on the command line that mean nothing: what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from kapelle.errors import ConfigError, did_you_mean

_TYPES = {"int": "whole number", "count": "whole number", "float": "number"}


def plain(message: str) -> str:
    """Return what argparse says of a wrong value, in words: `argument --seeds: 'x' is no whole number`."""
    return re.sub(
        r"invalid (int|count|float) value: (.*)",
        lambda found: f"{found[2]} is no {_TYPES[found[1]]}",
        message,
    )


def unknown_command(word: str, known: Collection[str]) -> ConfigError:
    """Return the error for the name of no command; a recipe is one that is trained."""
    hint = "" if word.endswith((".yaml", ".yml")) else did_you_mean(word, known)
    if not hint.startswith(" Did you mean"):
        from importlib.resources import files

        hint = " `kapelle --help` lists them."
        built_in = files("kapelle") / "recipes" / f"{word}.yaml"
        if word.endswith((".yaml", ".yml")) or built_in.is_file():
            hint = f" Did you mean `kapelle train {word}`?"
    return ConfigError(f"Unknown command '{word}'.{hint}")


def unknown_word(
    command: str, word: str, argv: Sequence[str], options: Collection[str], *, settings: bool
) -> ConfigError:
    """Return the error for a word that a command does not know; where it takes `settings`, they are written without dashes."""
    name, _, value = word.partition("=")
    hint = did_you_mean(name, options) if name.startswith("-") else ""
    if settings and name.startswith("--") and name.replace("_", "-") not in options:
        after = argv[argv.index(word) + 1 :]
        shown = value or (after[0] if after and not after[0].startswith("-") else "VALUE")
        hint = _as_setting(name[2:].replace("-", "_"), shown) or hint
    if name in ("--recipe", "--config"):
        hint = f" A recipe is named without it: `kapelle {command} RECIPE`."
    return ConfigError(f"`kapelle {command}` does not know '{word}'.{hint}")


def _as_setting(key: str, value: str) -> str:
    from kapelle.settings.messages import settings_named
    from kapelle.settings.schema import RunConfig

    dotted = key if "." in key and key.partition(".")[0] in RunConfig.model_fields else ""
    named = [dotted] if dotted else settings_named(key)
    return f" Settings are written without dashes: {named[0]}={value}" if named else ""
