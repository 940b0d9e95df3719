"""Implements `kapelle doctor`, which finds problems of the machines before a run starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kapelle.cli.output import command, is_first, table
from kapelle.cli.quiet import hush
from kapelle.cli.stopping import EXIT_WRONG
from kapelle.errors import ConfigError
from kapelle.runtime.console import say
from kapelle.runtime.ranks import ALONE, launched_rank

if TYPE_CHECKING:
    from kapelle.cluster.doctor import MachineFault, RankFacts

PATIENCE = 15.0
"""Maximum time in seconds that a rank waits for a file that rank 0 has written to a shared folder."""


def run(arguments: argparse.Namespace) -> int:
    """Examine this machine, or the machines of all ranks. Returns 2 if a problem would make a run fail."""
    hush()
    if arguments.timeout <= 0:
        raise ConfigError(
            f"`--timeout {arguments.timeout:g}`: give a positive number of seconds to wait for all ranks, such as 60."
        )
    if arguments.processes is not None and arguments.launch is None:
        raise ConfigError(
            "`--processes` needs `--launch`, which starts the processes. Add `--launch torchrun` or `--launch ray`."
        )
    if (arguments.address is not None or arguments.gpus) and arguments.launch != "ray":
        raise ConfigError("`--address` and `--gpus` are for a Ray cluster. Add `--launch ray`.")
    words = ["doctor", "--run-dir", arguments.run_dir, "--timeout", f"{arguments.timeout:g}"]
    words += ["--json"] if arguments.json else []
    if arguments.launch == "torchrun":
        from kapelle.cli.train_launch import launch_torchrun

        return launch_torchrun(words, arguments.processes)
    if arguments.launch == "ray":
        from kapelle.cluster.launcher import check_installed, launch
        from kapelle.settings.schema import RayConfig, Resources

        check_installed()
        each = Resources(gpus=arguments.gpus)
        here = RayConfig(address=arguments.address, rollout_workers=0, spread=True, trainer=each)
        return launch(here, arguments.processes or 1, 0, words)

    from kapelle.cluster.doctor import diagnose, examine
    from kapelle.runtime.files import cache_folder

    ranks = ALONE
    if launched_rank() is not None:
        from kapelle.runtime.rank_group import ranks_here

        ranks = ranks_here(arguments.timeout)
    every = examine(ranks, [Path(arguments.run_dir), cache_folder()], min(PATIENCE, arguments.timeout))
    findings = diagnose(every)
    if is_first():
        show(every, findings, as_json=arguments.json)
    return EXIT_WRONG if any(each.wrong for each in findings) else 0


def show(every: Sequence[RankFacts], findings: Sequence[MachineFault], *, as_json: bool) -> None:
    """Print the problems, a row for each rank, and the entries that all ranks have in common."""
    if as_json:
        found = [{"wrong": each.wrong, "what": each.what, "fix": each.fix} for each in findings]
        say(json.dumps({"findings": found, "ranks": [each.to_json() for each in every]}, indent=1))
        return
    for each in findings:
        say(f"{'wrong' if each.wrong else 'doubtful':10}{each.what}. {each.fix}")
    if not findings:
        say("Nothing is wrong.")
    say()
    head = ("rank", "machine", "device", "free memory", "cores", "run directory")
    for line in table([head, *map(_row, every)]):
        say(line)
    say()
    first = every[0]
    versions = _common([{name: of for name, of in each.versions.items() if of is not None} for each in every])
    say(f"alike      {', '.join(f'{name} {version}' for name, version in versions.items())}")
    variables = _common([each.variables for each in every])
    if variables:
        say(f"variables  {' '.join(f'{name}={value}' for name, value in variables.items())}")
    for folder in first.folders:
        say(f"folder     {folder.path} ({folder.free / 1e9:.0f} GB free)")
    if len(every) == 1:
        several = command("doctor", "--launch", "torchrun", "--processes", "2")
        say(
            f"Only this process was checked. To check several, use {several}, or `torchrun … -m kapelle doctor` on every machine."
        )


def _common(every: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries that all mappings have in common."""
    return {name: value for name, value in every[0].items() if all(each.get(name) == value for each in every)}


def _row(each: RankFacts) -> tuple[str, ...]:
    gpu = each.gpu
    seen = each.folders[0].seen
    return (
        str(each.rank),
        each.host,
        "cpu" if gpu is None else f"{gpu.name}, {gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB free",
        f"{each.memory_free / 1e9:.1f} of {each.memory / 1e9:.1f} GB",
        f"{each.cores}, {each.threads} threads",
        each.folders[0].problem or ("not the same folder" if seen is None else f"seen after {seen:.2f} s"),
    )
