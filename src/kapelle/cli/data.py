"""Implements `kapelle data prepare`, which writes the files of a data set for use in `environment.path`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kapelle.cli.output import command
from kapelle.cli.quiet import hush
from kapelle.runtime.console import say


def run(arguments: argparse.Namespace) -> int:
    """Write the files of the data set and print a summary of their contents."""
    hush()
    from kapelle.environments.data.preparation import prepare

    prepared = prepare(
        arguments.name,
        Path(arguments.out),
        source=arguments.source,
        train=_names(arguments.train),
        test=_names(arguments.test),
        form=arguments.form,
        test_share=arguments.test_share,
        max_unusable=arguments.max_unusable,
    )
    manifest = prepared.manifest
    if arguments.json:
        say(json.dumps({**manifest, "folder": str(prepared.folder)}))
        return 0
    for split, written in manifest["splits"].items():
        say(f"{split:6}{written['rows']:>8,} rows  {prepared.folder / written['file']}")
    for place, left in manifest["excluded"].items():
        if left["count"]:
            say(
                f"{place}: {left['count']} of {left['of']} rows are unusable and excluded: {' | '.join(left['first'])}"
            )
    if manifest["train_rows_that_are_tested"]:
        say(
            f"{manifest['train_rows_that_are_tested']} train rows are excluded, because they are also test rows"
        )
    say(f"licence of the data: {manifest['licence']}")
    say(f"train on it with: {command('train', 'RECIPE', *prepared.use)}")
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
