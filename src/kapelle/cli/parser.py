"""Reads the words after `kapelle`: help texts, the command with its arguments, and hints for words that it does not know.

Standard library only, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from kapelle.cli.arguments import COMMANDS, Command
from kapelle.errors import ConfigError, did_you_mean

# -------- The texts of `kapelle --help` and the usage lines of its commands, in lines that fit a terminal

EXIT_CODES = (
    "Exit codes: 0 success, 2 wrong input, or nothing could be measured, 3 the plan does not fit, 129 the terminal was closed, "
    "130 Ctrl-C, 143 SIGTERM."
)
NARROWEST = 60
"""Least columns of a text, in narrower terminals too."""


def width() -> int:
    """Return the most columns of a line: those of the terminal, or 80 without a terminal."""
    return max(NARROWEST, shutil.get_terminal_size().columns - 2)


def overview(summaries: Mapping[str, str]) -> str:
    """Return the text of `kapelle --help`, from each command's summary."""
    wide, columns = max(map(len, summaries)), width()
    lines = [
        line
        for name, summary in summaries.items()
        for line in textwrap.wrap(
            summary,
            columns,
            initial_indent=f"  {name:{wide}}  ",
            subsequent_indent=" " * (wide + 4),
            break_on_hyphens=False,
        )
    ]
    return "\n".join(
        [
            "kapelle: multi-agent reinforcement learning of language models",
            "",
            "usage: kapelle COMMAND [arguments]",
            "",
            *lines,
            "",
            *textwrap.wrap(
                "`kapelle COMMAND --help` lists a command's arguments; `kapelle --version` prints the version.",
                columns,
            ),
            *textwrap.wrap(EXIT_CODES, columns),
        ]
    )


def usage_text(command: str, arguments: str) -> str:
    """Return a command's usage, with line breaks only between its arguments: an option stays with its value, and square brackets whole."""
    pieces: list[str] = []
    depth = 0
    for word in arguments.split():
        valued = pieces and pieces[-1].lstrip("(").startswith("--") and " " not in pieces[-1]
        if depth or (valued and word[0].isupper()):
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
        depth += word.count("[") - word.count("]")
    columns, indent = width() - len("usage: "), " " * len(f"usage: {command} ")
    lines = [command]
    for piece in pieces:
        if len(lines[-1]) + 1 + len(piece) > columns and lines[-1].strip():
            lines.append(indent[:-1])
        lines[-1] += f" {piece}"
    return "\n".join(lines)


# -------- Unknown words on the command line, with a hint at what was probably meant


def unknown_word(
    command: str, word: str, argv: Sequence[str], options: Collection[str], *, settings: bool
) -> ConfigError:
    """Return the error for a word that a command does not know; if the command takes `settings`, it may be one written with dashes."""
    name, _, value = word.partition("=")
    hint = did_you_mean(name, options) if name.startswith("-") else ""
    if settings and name.startswith("--") and name.replace("_", "-") not in options:
        after = argv[argv.index(word) + 1 :]
        shown = value or (after[0] if after and not after[0].startswith("-") else "VALUE")
        key = name[2:].replace("-", "_")
        from kapelle.settings.aliases import TABLE
        from kapelle.settings.messages import settings_named
        from kapelle.settings.schema import RunConfig

        dotted = key if "." in key and key.partition(".")[0] in RunConfig.model_fields else ""
        theirs = [alias.name for alias in TABLE if alias.name == key]
        named = [dotted] if dotted else settings_named(key) or theirs
        hint = (f" Settings are written without dashes: {named[0]}={shown}" if named else "") or hint
    if name in ("--recipe", "--config"):
        hint = f" A recipe is named without it: `kapelle {command} RECIPE`."
    return ConfigError(f"`kapelle {command}` does not know '{word}'.{hint}")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises our own errors: one line, with a pointer to the help."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        kinds = {"int": "a whole number", "float": "a number"}
        plain = re.sub(
            r"invalid (int|float) value: (.*)", lambda found: f"{found[2]} is not {kinds[found[1]]}", message
        )
        raise ConfigError(f"{plain}. See `{self.prog} --help`.")


def parse(argv: Sequence[str]) -> tuple[Command, argparse.Namespace] | str:
    """Return the command and its arguments, or the text that answers `--help` and `--version`.

    Raises ConfigError for unknown words, with the closest known ones.
    """
    if not argv or argv[0] in {"-h", "--help", "help"}:
        return overview({each: command.summary for each, command in COMMANDS.items()})
    if argv[0] in {"-V", "--version"}:
        from kapelle import __version__

        return f"kapelle {__version__}"
    command = COMMANDS.get(argv[0])
    if command is None:
        word, hint = argv[0], "" if argv[0].endswith((".yaml", ".yml")) else did_you_mean(argv[0], COMMANDS)
        if not hint.startswith(" Did you mean"):
            from importlib.resources import files

            hint = " `kapelle --help` lists them."
            built_in = files("kapelle") / "settings" / "recipes" / f"{word}.yaml"
            if word.endswith((".yaml", ".yml")) or built_in.is_file():
                hint = f" Did you mean `kapelle train {word}`?"
        raise ConfigError(f"Unknown command '{word}'.{hint}")
    name = f"kapelle {argv[0]}"
    usage = usage_text(name, command.usage)
    parser = Parser(name, usage, command.summary, allow_abbrev=False, add_help=False)
    for names, how in command.arguments:
        parser.add_argument(*names, **how)
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    if {"-h", "--help"} & set(argv[1:]):
        return parser.format_help().rstrip()
    arguments, unknown = parser.parse_known_intermixed_args(argv[1:])
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]  # noqa: SLF001
        settings = "key.path=value" in command.usage
        raise unknown_word(argv[0], unknown[0], argv, options, settings=settings)
    return command, arguments


_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


def split_words(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words that name files or recipes, and those that are `key.path=value` settings, as Hydra's `+key.path=value` is."""
    words = [re.sub(r"^\+{1,2}(?=[A-Za-z_][\w.]*=)", "", word) for word in words]
    settings = tuple(word for word in words if _SETTING.match(word))
    return tuple(word for word in words if word not in settings), settings
