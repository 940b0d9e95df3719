"""Parses the command line of `kapelle`: help texts, the command with its arguments, and hints for unknown arguments.

This module uses only the standard library, so that `--help` responds at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from kapelle.cli.arguments import COMMANDS, Command
from kapelle.errors import ConfigError, did_you_mean

HELP = {"-h", "--help"}
ABOUT = "kapelle: multi-agent reinforcement learning of language models"
EXIT_CODES = (
    "`kapelle COMMAND --help` lists a command's arguments; `kapelle --version` prints the version. "
    "Exit codes: 0 success, 2 wrong input, or nothing could be measured, 3 the plan does not fit, 129 the terminal was closed, "
    "130 Ctrl-C, 143 SIGTERM."
)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError with a one-line message that refers to the help."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


def overview() -> str:
    """Return the output of `kapelle --help`."""
    parser = Parser("kapelle", "kapelle COMMAND [arguments]", ABOUT, EXIT_CODES, add_help=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND …")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary)
    return parser.format_help().rstrip()


def parse(argv: Sequence[str]) -> tuple[str, argparse.Namespace] | str:
    """Return the name of the command and its arguments, or the text to print for `--help` and `--version`.

    Raises ConfigError for unknown arguments, with the closest known argument.
    """
    if not argv or argv[0] in {*HELP, "help"}:
        return overview()
    name = argv[0]
    if name in {"-V", "--version"}:
        from kapelle import __version__

        return f"kapelle {__version__}"
    if name not in COMMANDS:
        raise ConfigError(
            f"Unknown command '{name}'.{did_you_mean(name, COMMANDS)} `kapelle --help` lists all commands. Train a recipe "
            "with `kapelle train RECIPE`."
        )
    parser = parser_of(name, COMMANDS[name])
    if HELP & set(argv[1:]):
        return parser.format_help().rstrip()
    arguments, unknown = parser.parse_known_intermixed_args(argv[1:])
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]  # noqa: SLF001
        raise ConfigError(
            f"Unknown argument '{unknown[0]}' of `kapelle {name}`.{_meant(unknown[0], options, 'words' in arguments)}"
        )
    return name, arguments


def parser_of(name: str, command: Command) -> Parser:
    """Create the parser of a command."""
    positional = [how["metavar"] for names, how in command.arguments if not names[0].startswith("-")]
    usage = " ".join([f"kapelle {name}", *positional, "[options]"])
    parser = Parser(f"kapelle {name}", usage, command.summary, allow_abbrev=False, add_help=False)
    for names, how in command.arguments:
        parser.add_argument(*names, **how)
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    return parser


def _meant(word: str, options: Sequence[str], settings: bool) -> str:
    """Return a hint that mentions a similar option or, if the command takes settings, a setting that was written with dashes."""
    name = word.partition("=")[0]
    if settings and name.startswith("--") and name.replace("_", "-") not in options:
        from kapelle.settings.messages import settings_named

        named = settings_named(name[2:].replace("-", "_"))
        if named:
            return f" Settings are written without dashes: {named[0]}=VALUE"
    return did_you_mean(name, options)


_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


def split_words(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split arguments into names of files or recipes and settings of the form `key.path=value` (or `+key.path=value`, as in Hydra)."""
    words = [re.sub(r"^\+{1,2}(?=[A-Za-z_][\w.]*=)", "", word) for word in words]
    settings = tuple(word for word in words if _SETTING.match(word))
    return tuple(word for word in words if word not in settings), settings
