"""`kapelle demo`: a tiny team learns on this machine while you watch."""

from __future__ import annotations

import argparse

from kapelle.cli.output import command
from kapelle.cli.quiet import hush


def run(arguments: argparse.Namespace) -> int:
    """Train the recipe `demo` and print the result."""
    hush()
    from kapelle.cli.parser import split_words
    from kapelle.cli.running import announce, train
    from kapelle.cli.source import read_source
    from kapelle.errors import ConfigError

    files, _ = split_words(arguments.words)
    if files:
        raise ConfigError(
            f"`kapelle demo` takes only settings such as training.steps=20, not '{files[0]}'. Train a recipe with `kapelle train`."
        )
    source = read_source(["demo", *arguments.words], arguments.run_dir, resume=False, real=False)
    announce("kapelle demo", as_json=arguments.json)

    return train(source, "kapelle demo", next_commands, as_json=arguments.json, plain=arguments.no_rich)


def next_commands(run_dir: str) -> list[tuple[str, str]]:
    """Return what to try after the demo: commands that work as they are, and what they do."""
    return [
        (command("view", run_dir), "curves, conversations and each token's credit, in a browser"),
        (
            command("eval", run_dir),
            "the team against one agent alone and a vote, with the same number of tokens",
        ),
        (command("train", "demo", "algorithm.name=mappo"), "the same team, trained with a central critic"),
        (command("recipes", "cp", "demo", "my_team.yaml"), "a recipe of your own to change"),
    ]
