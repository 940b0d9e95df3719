"""`kapelle launch`: write the batch script or the manifest that starts a training on a cluster."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from kapelle.cli.output import say, writing
from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.errors import ConfigError

NAME = r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?"
"""Names that both schedulers take, with room for what they append."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True, slots=True)
class Job:
    """What a scheduler is asked for."""

    name: str
    files: tuple[str, ...]
    """The recipe, by name or as a file, and files laid over it."""
    settings: tuple[str, ...]
    """`key.path=value`."""
    real: bool
    run_dir: str
    nodes: int
    processes: int
    """On each node."""
    gpus: int
    """On each node."""
    cpus: int | None
    """For each process; None leaves it to the scheduler."""
    memory_gb: int | None
    """On each node; None leaves it to the scheduler."""
    seconds: int | None
    """After which it is ended; None for the scheduler's own limit."""
    image: str | None
    volume: str | None

    @property
    def train(self) -> tuple[str, ...]:
        """The words of `kapelle train`."""
        real = ("--real",) if self.real else ()
        return (*self.files, *real, *self.settings, "--run-dir", self.run_dir, "--no-rich")


def run(arguments: argparse.Namespace) -> int:
    """Check the recipe as a dry run does, then write what starts it."""
    hush()
    from kapelle.cli.launch_kubernetes import manifest
    from kapelle.cli.launch_slurm import script

    if arguments.slurm == arguments.kubernetes:
        raise ConfigError("Name one scheduler: `kapelle launch --slurm RECIPE` or `--kubernetes RECIPE`.")
    name = _check_recipe(arguments)
    job = _job(arguments, name)
    text = script(job) if arguments.slurm else manifest(job)
    if arguments.output is None:
        say(text.rstrip())
        return 0
    path = Path(arguments.output)
    with writing(path, "--output"), path.open("x", encoding="utf-8") as file:
        file.write(text)
    submit = f"sbatch {path}" if arguments.slurm else f"kubectl apply -f {path}"
    say(f"{path} is yours to read and change. Submit it with: {submit}")
    return 0


def _job(arguments: argparse.Namespace, recipe: str) -> Job:
    files, settings = split_words(arguments.words)
    name = (
        arguments.name or re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")[:50].strip("-") or "kapelle"
    )
    if not re.fullmatch(NAME, name):
        raise ConfigError(f"--name '{name}' is not of lower-case letters, digits and hyphens, 50 at most.")
    base = "/runs" if arguments.kubernetes else "runs"
    return Job(
        name=name,
        files=files,
        settings=settings,
        real=arguments.real,
        run_dir=arguments.run_dir or f"{base}/{name}",
        nodes=arguments.nodes,
        processes=arguments.processes,
        gpus=arguments.processes if arguments.gpus is None else arguments.gpus,
        cpus=arguments.cpus,
        memory_gb=arguments.memory,
        seconds=None if arguments.time is None else seconds_of(arguments.time),
        image=arguments.image,
        volume=arguments.volume,
    )


def seconds_of(text: str) -> int:
    """Return the seconds of a time as SLURM writes it: `MIN`, `MIN:SEC`, `H:MIN:SEC`, `D-H`, `D-H:MIN`, `D-H:MIN:SEC`."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--time '{text}' is no time. Write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 12:00:00."
        )
    days, first, second, third = (int(part) if part else 0 for part in found.groups())
    if found["days"] is not None:
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    elif found["third"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    if seconds < 1:
        raise ConfigError(f"--time '{text}' leaves no time. Give one minute at least.")
    return seconds


def _check_recipe(arguments: argparse.Namespace) -> str:
    """Raise the first error that the training would meet before it starts; return the name of the recipe."""
    from kapelle.cli.source import read_source
    from kapelle.cli.staged import find_stages
    from kapelle.setup.preparation import prepare
    from kapelle.setup.programs import without_programs
    from kapelle.training.start_weights import check_weights

    staged = find_stages(arguments.words, None, resume=False, real=arguments.real)
    if staged is None:
        config = read_source(arguments.words, None, resume=False, real=arguments.real).config
        if not arguments.unchecked:
            check_weights(prepare(without_programs(config)[0]))
        return config.name
    for _, config in () if arguments.unchecked else staged.checked():
        check_weights(prepare(without_programs(config)[0]), staged=True)
    return staged.stages[0].recipe.config.name
