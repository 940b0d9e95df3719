"""What can be typed after `kapelle`: every command with its arguments.

Standard library only, so that `--help` answers at once; what a command does is imported when it is called.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kapelle.cli.arguments import (
    EXPORT_USAGE,
    NEW,
    ONE_OBJECT,
    add_flag,
    count,
    declare_chat,
    declare_data,
    declare_export,
    declare_launch,
    declare_processes,
    declare_runs,
    declare_serve,
    declare_view,
    gigabytes,
)
from kapelle.errors import ConfigError, did_you_mean

# -------- The texts of `kapelle --help` and the usage lines of its commands, in lines that fit a terminal

EXIT_CODES = (
    "Exit codes: 0 done, 2 something is wrong with what was asked or nothing could be measured, 3 a plan does not fit, "
    "129 the terminal was closed, 130 Ctrl-C, 143 SIGTERM."
)
NARROWEST = 60
"""Columns that a text takes, however narrow the terminal is."""


def width() -> int:
    """Return the columns that a line may have: those of the terminal, 80 where there is none."""
    return max(NARROWEST, shutil.get_terminal_size().columns - 2)


def overview(summaries: Mapping[str, str]) -> str:
    """Return the text of `kapelle --help`, from what each command does."""
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
                "`kapelle COMMAND --help` shows what a command takes; `kapelle --version` shows the version.",
                columns,
            ),
            *textwrap.wrap(EXIT_CODES, columns),
        ]
    )


def usage_text(command: str, arguments: str) -> str:
    """Return a command's usage, broken between its arguments: never inside square brackets, which hold one each."""
    columns, indent = width() - len("usage: "), " " * len(f"usage: {command} ")
    lines = [command]
    for piece in _pieces(arguments):
        if len(lines[-1]) + 1 + len(piece) > columns and lines[-1].strip():
            lines.append(indent[:-1])
        lines[-1] += f" {piece}"
    return "\n".join(lines)


def _pieces(arguments: str) -> list[str]:
    """Return the words of a usage, those within square brackets together, and an option with its value."""
    pieces: list[str] = []
    depth = 0
    for word in arguments.split():
        valued = pieces and pieces[-1].lstrip("(").startswith("--") and " " not in pieces[-1]
        if depth or (valued and word[0].isupper()):
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
        depth += word.count("[") - word.count("]")
    return pieces


# -------- Words on the command line that mean nothing: what was probably meant

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
        key = name[2:].replace("-", "_")
        from kapelle.settings.messages import settings_named
        from kapelle.settings.schema import RunConfig

        dotted = key if "." in key and key.partition(".")[0] in RunConfig.model_fields else ""
        named = [dotted] if dotted else settings_named(key)
        hint = (f" Settings are written without dashes: {named[0]}={shown}" if named else "") or hint
    if name in ("--recipe", "--config"):
        hint = f" A recipe is named without it: `kapelle {command} RECIPE`."
    return ConfigError(f"`kapelle {command}` does not know '{word}'.{hint}")


RECIPE_HELP = "a built-in recipe (`kapelle recipes ls`) or a YAML file"
SETTINGS_HELP = "key.path=value, for example training.steps=100; values are YAML"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises our own errors: one line, with a pointer to the help."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{plain(message)}. See `{self.prog} --help`.")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the command line."""

    usage: str
    """What follows its name."""
    summary: str
    module: str
    """Module with `run(arguments) -> int`, its exit code."""
    declare: Callable[[argparse.ArgumentParser], None]
    """Adds the command's arguments to its parser."""


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
        raise unknown_command(argv[0], COMMANDS)
    name = f"kapelle {argv[0]}"
    usage = usage_text(name, command.usage)
    parser = Parser(name, usage, command.summary, allow_abbrev=False, add_help=False)
    command.declare(parser)
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
    """Return the words that name files or recipes, and those that are `key.path=value` settings."""
    settings = tuple(word for word in words if _SETTING.match(word))
    return tuple(word for word in words if word not in settings), settings


def _demo(parser: argparse.ArgumentParser) -> None:
    _add_words(parser, "key.path=value", SETTINGS_HELP)
    _add_run_dir(parser)
    _add_output(parser)


def _train(parser: argparse.ArgumentParser) -> None:
    _add_words(parser, "RECIPE …", f"{RECIPE_HELP}; YAML files laid over it; then settings, {SETTINGS_HELP}")
    _add_real(parser)
    _add_run_dir(parser)
    add_flag(
        parser, "--resume", "continue the run in --run-dir; `kapelle train --resume RUN` needs no recipe"
    )
    add_flag(
        parser,
        "--dry-run",
        "show who acts with which weights and every setting with its origin; loads no model, writes nothing",
    )
    _add_output(parser)
    declare_processes(parser)


def _plan(parser: argparse.ArgumentParser) -> None:
    _add_words(parser, "RECIPE …", f"{RECIPE_HELP}; YAML files laid over it; then settings, {SETTINGS_HELP}")
    _add_real(parser)
    parser.add_argument(
        "--gpu-memory",
        type=gigabytes,
        metavar="GB",
        help="memory of each GPU in GB; says what fits, and what to change where it does not (exit code 3)",
    )
    parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="time a few blocks with random weights on this machine's device, and say how long a step will take",
    )
    add_flag(parser, "--json", ONE_OBJECT)


def _eval(parser: argparse.ArgumentParser) -> None:
    _add_player(parser)
    add_flag(
        parser, "--no-baselines", "leave out one agent alone and majority vote with the same number of tokens"
    )
    add_flag(parser, "--json", ONE_OBJECT)


def _compare(parser: argparse.ArgumentParser) -> None:
    _add_words(parser, "RECIPE …", f"{RECIPE_HELP}; overlays; settings, {SETTINGS_HELP}")
    _add_real(parser)
    parser.add_argument(
        "--algorithms",
        required=True,
        metavar="A,B",
        help="the algorithms to compare, by name; LABEL=NAME gives a row a name of its own",
    )
    parser.add_argument(
        "--set",
        action="append",
        metavar="A:key=value",
        help="a setting for one row alone, or a YAML file of `A: {algorithm: {…}}`; may be given several times",
    )
    parser.add_argument("--seeds", type=count, default=5, metavar="N", help="runs of each (5)")
    parser.add_argument("--jobs", type=count, metavar="N", help="runs at a time, one thread each (the cores)")
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="where everything is kept (runs/…); runs that are done there are not repeated",
    )
    add_flag(parser, "--json", f"{ONE_OBJECT}; progress goes to stderr")


def _collect(parser: argparse.ArgumentParser) -> None:
    _add_player(parser)
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=("sft", "verifier"),
        default="sft",
        help="sft: good episodes, turn by turn; verifier: graded answers, right and wrong (sft)",
    )
    parser.add_argument("--out", metavar="FILE", help="JSON lines to write, compressed for .jsonl.zst")
    parser.add_argument(
        "--min-reward", type=float, metavar="X", help="sft: keep episodes with at least this reward"
    )
    add_flag(
        parser,
        "--no-balance",
        "verifier: keep all different answers, even where a question has more right than wrong ones or fewer",
    )
    parser.add_argument(
        "--show", metavar="FILE", help="play nothing; show what a file of graded answers holds"
    )
    parser.add_argument("--tasks", type=count, default=200, metavar="N", help="train tasks to play (200)")
    parser.add_argument("--samples", type=count, default=4, metavar="K", help="episodes per task (4)")
    add_flag(parser, "--json", ONE_OBJECT)


def _play(parser: argparse.ArgumentParser) -> None:
    what = "an environment, a recipe, a game of OpenSpiel such as kuhn_poker, or a run directory"
    _add_words(parser, "ENV|RUN …", f"{what}; {SETTINGS_HELP}")
    parser.add_argument("--seat", type=count, default=1, metavar="N", help="the seat that is yours (1)")
    parser.add_argument(
        "--against",
        metavar="WHO",
        help="who plays the others: random (the environment's script), mcts, cfr, nash or a run directory (random; "
        "a run plays itself)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="deals another game (0)")
    add_flag(
        parser,
        "--exact",
        "play nothing; print exact values of the run's checkpoints: NashConv, expected returns",
    )


def _recipes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", metavar="ls|show|cp", help="list them, print one, or copy one to a file"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one to print or copy")
    parser.add_argument("destination", nargs="?", metavar="DEST", help="file or folder (./NAME.yaml)")
    add_flag(parser, "--json", f"{ONE_OBJECT} (ls)")


def _validate(parser: argparse.ArgumentParser) -> None:
    _add_words(parser, "RECIPE …", f"{RECIPE_HELP}; overlays; settings, {SETTINGS_HELP}")
    parser.add_argument(
        "--environment",
        metavar="NAME",
        help="check an environment alone (built in, or module:Class); settings are environment.key=value",
    )
    parser.add_argument("--agents", metavar="A,B", help="of an environment alone: its team, in seat order")
    _add_real(parser)
    add_flag(
        parser, "--start", "start or ask the MCP servers that the recipe names, and check their tools too"
    )
    add_flag(parser, "--graph", "print the workflow as a Mermaid flowchart; a workflow file alone will do")


def _info(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--json", ONE_OBJECT)


def _add_words(parser: argparse.ArgumentParser, metavar: str, what: str) -> None:
    parser.add_argument("words", nargs="*", metavar=metavar, help=what)


def _add_real(parser: argparse.ArgumentParser) -> None:
    add_flag(
        parser,
        "--real",
        "use the recipe's values for a pretrained model (its section `real`: model, rates, lengths, data)",
    )


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is kept (runs/NAME-TIME)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--json", f"{ONE_OBJECT}; progress goes to stderr")
    add_flag(parser, "--no-rich", "plain lines, also in a terminal")


def _add_player(parser: argparse.ArgumentParser) -> None:
    _add_words(
        parser,
        "RUN …",
        f"a run directory; {SETTINGS_HELP} (of `environment`, `episode` and `evaluation`, for a run)",
    )
    parser.add_argument(
        "--model", metavar="PATH", help="instead of a run: a model folder, hub name or `embedded`"
    )
    parser.add_argument(
        "--environment",
        metavar="NAME",
        help="what the model plays: an environment (alone), or a recipe (its team and workflow)",
    )
    _add_real(parser)


def _launch(parser: argparse.ArgumentParser) -> None:
    _add_words(parser, "RECIPE …", f"{RECIPE_HELP}; overlays; settings, {SETTINGS_HELP}")
    _add_real(parser)
    declare_launch(parser)


COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        "[key.path=value …] [--run-dir DIR] [--json] [--no-rich]",
        "train a tiny two-agent team on this machine and watch it learn",
        "demo",
        _demo,
    ),
    "new": Command(*NEW),
    "train": Command(
        "RECIPE [--real] [overlay.yaml …] [key.path=value …] [--run-dir DIR] [--resume] [--dry-run] [--json] [--no-rich] "
        "[--launch torchrun|ray [--processes N]]",
        "train a team as described by a recipe",
        "train",
        _train,
    ),
    "launch": Command(
        "(--slurm | --kubernetes) RECIPE [--real] [overlay.yaml …] [key.path=value …] [--nodes N] [--processes P] [--gpus N] "
        "[--cpus N] [--memory GB] [--time TIME] [--image IMAGE] [--volume CLAIM] [--name NAME] [--run-dir DIR] "
        "[--output FILE] [--unchecked]",
        "write the batch script or manifest that trains a recipe on a cluster",
        "launch",
        _launch,
    ),
    "plan": Command(
        "RECIPE [--real] [overlay.yaml …] [key.path=value …] [--gpu-memory GB] [--probe] [--json]",
        "say how much memory a run will need and what fits, before anything is loaded",
        "plan",
        _plan,
    ),
    "eval": Command(
        "(RUN | --model PATH --environment NAME [--real]) [key.path=value …] [--no-baselines] [--json]",
        "measure a run or a model on unseen problems",
        "eval",
        _eval,
    ),
    "compare": Command(
        "RECIPE [--real] [overlay.yaml …] [key.path=value …] --algorithms A,B [--seeds N] [--set A:key=value …] [--run-dir DIR] "
        "[--jobs N] [--json]",
        "train several algorithms on one recipe, with several seeds each, and compare them",
        "compare",
        _compare,
    ),
    "collect": Command(
        "((RUN | --model PATH --environment NAME [--real]) [key.path=value …] --out FILE "
        "(--min-reward X | --for verifier [--no-balance]) [--tasks N] [--samples K] | --show FILE) [--json]",
        "play train tasks and keep the good episodes for SFT, or graded answers for a verifier",
        "collect",
        _collect,
    ),
    "export": Command(EXPORT_USAGE, "write trained weights for other programs", "export", declare_export),
    "play": Command(
        "(ENV | RUN) [key.path=value …] [--seat N] [--against WHO] [--seed S] [--exact]",
        "play a game in the terminal against a script, a solver or a trained team",
        "play",
        _play,
    ),
    "chat": Command(
        "RUN [--agent NAME]",
        "talk with a run's team in the terminal and hear each agent",
        "chat",
        declare_chat,
    ),
    "serve": Command(
        "((policy | reward) RUN [--record FOLDER] [--idle S] [--name NAME] [--calls N] [--batch N] [--grpc-port PORT] | "
        "environments --environments NAMES [name.key=value …] [--workers N] [--sessions N] [--idle S] [--drain S] | environments --replace NAMES --at HOST:PORT "
        "[--certificate FILE]) [--host HOST] [--port PORT] [--tls-cert FILE --tls-key FILE] [--allow-host NAME …] [--timeout S]",
        "offer a run's team to programs, as a server of OpenAI's chat completions, its verifier, as a server of scores, or "
        "environments to runs anywhere",
        "serve",
        declare_serve,
    ),
    "view": Command(
        "[RUNS …] [--host HOST] [--port PORT] [--tls-cert FILE --tls-key FILE] [--allow-host NAME …]",
        "look at runs in a browser: curves, conversations and credit",
        "view",
        declare_view,
    ),
    "runs": Command(
        "(ls [FOLDER] | show RUN | rollback RUN --to STEP [--dry-run]) [--json]",
        "list runs, show the result of one, or go back to an earlier checkpoint",
        "runs",
        declare_runs,
    ),
    "recipes": Command(
        "(ls | show NAME | cp NAME [DEST]) [--json]",
        "list the built-in recipes, print one, or copy one to change it",
        "recipes",
        _recipes,
    ),
    "validate": Command(
        "(RECIPE [--real] [overlay.yaml …] | [--environment] NAME [--agents A,B]) [key.path=value …] [--graph]",
        "check a recipe and everything it names, or an environment alone, without loading a model",
        "validate",
        _validate,
    ),
    "data": Command(
        "prepare NAME --out FOLDER [--source WHERE] [--train A,B] [--test A,B] [--form jsonl|parquet] [--test-share X] "
        "[--max-unusable X] [--json]",
        "write a data set's train and test files, to prepare them once and separately",
        "data",
        declare_data,
    ),
    "info": Command("[--json]", "show what is installed and what this machine has", "info", _info),
}
