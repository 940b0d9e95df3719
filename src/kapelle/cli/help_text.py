"""The texts of `kapelle --help` and the usage lines of its commands, in lines that fit a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping

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
