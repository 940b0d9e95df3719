"""Implements `kapelle export`, which writes the trained policies of a run for other programs, with a model card.

See `training/exporting.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.errors import ConfigError
from kapelle.runs.model_card import check_push, push
from kapelle.runs.named_checkpoint import split_run
from kapelle.runs.reader import read_config
from kapelle.runtime.console import say
from kapelle.training.console import Lines, Watch

if TYPE_CHECKING:
    from kapelle.training.exporting import Form


def run(arguments: argparse.Namespace) -> int:
    """Write the files and list them. If --push is given, the files are also uploaded."""
    named, settings = split_words(arguments.words)
    if len(named) != 1 or settings:
        raise ConfigError("Give one run directory: `kapelle export RUN`.")
    form: Form = arguments.format or ("hf" if arguments.merge else "peft")
    if arguments.merge and form == "peft":
        raise ConfigError("--merge and --format peft cannot be combined. Remove one of them.")
    if arguments.public and arguments.push is None:
        raise ConfigError("--public needs --push. Add --push OWNER/NAME.")
    if arguments.push is not None:
        check_push(arguments.push, asking=not arguments.dry_run)
    folder, which = split_run(named[0])
    read_config(folder)  # raises when there is no run
    out = Path(arguments.out) if arguments.out else folder.with_name(f"{folder.resolve().name}-export")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already. Choose another folder with --out.")
    hush()
    from kapelle.training.exporting import export, total

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(mkdtemp(prefix=".export-", dir=out.parent))  # renamed to `out` once it is complete
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be created: {error.strerror}. Choose another folder with --out."
        ) from error
    try:
        found = export(
            folder,
            beside,
            form,
            Watch(Lines(sys.stderr)),
            which=which,
            agents=tuple(arguments.agent or ()),
            licence=arguments.license,
        )
        files = total(beside)
        if not arguments.dry_run:
            if out.is_dir():
                out.rmdir()
            beside.chmod(0o755)
            beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    sent = (
        push(out, arguments.push, public=arguments.public)
        if arguments.push and not arguments.dry_run
        else None
    )
    row = {
        "out": str(out),
        "written": not arguments.dry_run,
        "policies": [each.policy for each in found],
        "format": form,
        "files": dict(files),
        "push": arguments.push,
        "sent": sent,
    }
    if arguments.json:
        say(json.dumps(row))
        return 0
    for name, size in files:
        say(f"{size:>14,}  {name}")
    where = f"would be written to {out}" if arguments.dry_run else f"written to {out}"
    goes = f", and sent to {arguments.push}" if arguments.push and arguments.dry_run else ""
    say(f"{len(files)} files, {sum(size for _, size in files):,} bytes {where}{goes}")
    if sent is not None:
        say(f"sent to {sent}")
    return 0
