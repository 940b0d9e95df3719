"""The arguments of `kapelle runs`, and what other commands declare in the same way."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

EVERYONE = "*"
"""As in `settings.keeping`, which is not imported here: `--help` answers at once."""
ONE_OBJECT = "print one JSON object"


def declare_runs(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "action", nargs="?", metavar="ls|show|rollback", help="list runs, show one, or go back in one"
    )
    parser.add_argument(
        "place", nargs="?", metavar="RUN", help="a run directory; for ls a folder of them (runs)"
    )
    parser.add_argument(
        "--to", type=int, metavar="STEP", help="rollback: the step of the checkpoint to go back to"
    )
    add_flag(parser, "--dry-run", "rollback: show what would be moved, and move nothing")
    add_flag(parser, "--json", ONE_OBJECT)


def add_flag(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    """Add an argument that is there or not, and takes no value."""
    parser.add_argument(name, action="store_true", help=meaning)


def count(text: str) -> int:
    """Return a whole number from 1; for `type` of an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def declare_processes(parser: argparse.ArgumentParser) -> None:
    """Declare how training is started: in how many processes, and from which weights."""
    parser.add_argument(
        "--launch",
        choices=["torchrun", "ray"],
        help="torchrun: several processes on this machine, by torch's launcher; ray: on a cluster, or a Ray of its own "
        "(section `ray` of the recipe); docs/clusters.md, docs/ray.md",
    )
    parser.add_argument(
        "--processes", type=count, metavar="N", help="how many; by default one for each GPU, with ray one"
    )
    parser.add_argument(
        "--start-from",
        action="append",
        metavar="[AGENT=]WEIGHTS",
        help="weights that training starts from, of all agents or of one: a run (RUN, RUN@best, RUN@STEP), a PEFT folder or a "
        "model; may be given several times",
    )


def start_words(given: Sequence[str] | None) -> list[str]:
    """Return `--start-from` as the setting that it stands for; nothing where it is not given."""
    import json

    named: dict[str, str] = {}
    for word in given or ():
        agent, mark, folder = word.partition("=")
        named |= {agent: folder} if mark and "/" not in agent else {EVERYONE: word}
    return [f"start_from={json.dumps(named)}"] if named else []


def gigabytes(text: str) -> float:
    """Return a positive number of gigabytes; for `type` of an argument."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"'{text}' is no amount of memory")
    return number
