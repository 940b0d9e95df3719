"""Implements `kapelle demo`, which trains a tiny team on this machine and shows the progress."""

from __future__ import annotations

import argparse

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

    return train(source, "kapelle demo", as_json=arguments.json, plain=arguments.no_rich)
