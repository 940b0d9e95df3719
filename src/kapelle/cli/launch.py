"""Implements `kapelle launch`, which writes the batch script or the manifest that starts a training run on a cluster."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from kapelle.cli.output import writing
from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.errors import ConfigError
from kapelle.runtime.console import say
from kapelle.runtime.interrupts import STOP_WITHIN

NAME = r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?"
"""A regular expression for names that both schedulers accept, with room for the suffixes that they append."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """The resources and arguments of a job on a cluster."""

    name: str
    files: tuple[str, ...]
    """The recipe (a name or a file) and the overlays."""
    settings: tuple[str, ...]
    """The settings, each as `key.path=value`."""
    real: bool
    run_dir: str
    nodes: int
    processes: int
    """The number of processes on each node."""
    gpus: int
    """The number of GPUs on each node."""
    cpus: int | None
    """The number of CPU cores for each process. If None, the scheduler chooses the number."""
    memory_gb: int | None
    """The amount of memory on each node, in gigabytes. If None, the scheduler chooses the amount."""
    seconds: int | None
    """The time limit in seconds. If None, the limit of the scheduler applies."""
    image: str | None
    volume: str | None

    @property
    def train(self) -> tuple[str, ...]:
        """The arguments of `kapelle train`."""
        real = ("--real",) if self.real else ()
        return (*self.files, *real, *self.settings, "--run-dir", self.run_dir, "--no-rich")


def run(arguments: argparse.Namespace) -> int:
    """Check the recipe as in a dry run, and then write the script or the manifest."""
    hush()

    if arguments.slurm == arguments.kubernetes:
        raise ConfigError("Choose one scheduler: `kapelle launch --slurm RECIPE` or `--kubernetes RECIPE`.")
    job = _job(arguments, _check_recipe(arguments))
    text = script(job) if arguments.slurm else manifest(job)
    if arguments.output is None:
        say(text.rstrip())
        return 0
    path = Path(arguments.output)
    with writing(path, "--output"), path.open("x", encoding="utf-8") as file:
        file.write(text)
    submit = f"sbatch {path}" if arguments.slurm else f"kubectl apply -f {path}"
    say(f"Review {path} and change it if necessary. Submit it with: {submit}")
    return 0


def _text(name: str) -> str:
    return (resources.files("kapelle.cli") / "programs" / f"{name}.txt").read_text("utf-8")


def _job(arguments: argparse.Namespace, recipe: str) -> LaunchedJob:
    files, settings = split_words(arguments.words)
    name = (
        arguments.name or re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")[:50].strip("-") or "kapelle"
    )
    if not re.fullmatch(NAME, name):
        raise ConfigError(f"--name '{name}': use at most 50 lower-case letters, digits and hyphens.")
    base = "/runs" if arguments.kubernetes else "runs"
    return LaunchedJob(
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
    """Parse a time in the format of SLURM and return it in seconds.

    The supported formats are `MIN`, `MIN:SEC`, `H:MIN:SEC`, `D-H`, `D-H:MIN` and `D-H:MIN:SEC`.
    """
    found = _TIME.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--time '{text}' is not a time. Write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 12:00:00."
        )
    days, first, second, third = (int(part) if part else 0 for part in found.groups())
    if found["days"] is not None:
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    elif found["third"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    if seconds < 1:
        raise ConfigError(f"--time '{text}' is less than a minute. Give at least one minute.")
    return seconds


def _check_recipe(arguments: argparse.Namespace) -> str:
    """Return the name of the recipe. Raises the first error that the training run would raise before it starts."""
    from kapelle.cli.source import find_stages, read_source
    from kapelle.setup.preparation import prepare, without_programs
    from kapelle.training.stages import check_weights

    staged = find_stages(arguments.words, None, resume=False, real=arguments.real)
    if staged is None:
        config = read_source(arguments.words, None, resume=False, real=arguments.real).config
        if not arguments.unchecked:
            check_weights(prepare(without_programs(config)[0]))
        return config.name
    for _, config in () if arguments.unchecked else staged.checked():
        check_weights(prepare(without_programs(config)[0]), staged=True)
    return staged.stages[0].recipe.config.name


# -------- A manifest for Kubernetes: an indexed job whose pods connect to the first one, without an operator

PORT = 29500
RECIPES = "/recipe"
"""The folder for the files of the recipe in a container."""
MOST_BYTES = 1 << 20
"""The maximum number of bytes in a ConfigMap."""
STOPPING_S = 120
"""The number of seconds that a pod has to save its state when it is stopped."""


def manifest(job: LaunchedJob) -> str:
    """Return the manifest of a job.

    Raises ConfigError if the image is missing or the files of the recipe are too large for the manifest.
    """
    if job.image is None:
        raise ConfigError("Pods need an image with kapelle. Add --image REGISTRY/NAME:TAG.")
    found, words = _recipe_files(job)
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 3 * job.nodes,
        **({} if job.seconds is None else {"activeDeadlineSeconds": job.seconds}),
        "template": {"spec": _pod(job, words, mounts=bool(found))},
    }
    things: list[dict[str, Any]] = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": spec}]
    labels = {"app.kubernetes.io/name": "kapelle", "app.kubernetes.io/instance": job.name}
    if job.nodes > 1:
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        }
        things.insert(0, {"apiVersion": "v1", "kind": "Service", "metadata": {}, "spec": service})
    if found:
        things.insert(0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}, "data": found})
    for thing in things:
        thing["metadata"] = {"name": job.name, "labels": labels}
    lost = "#\n# Without --volume CLAIM, the run is stored only in its pod and is lost with the pod.\n"
    return _text("kubernetes") + ("" if job.volume else lost) + _dumped(things)


def _dumped(things: Sequence[Mapping[str, Any]]) -> str:
    """Return documents as YAML, in which multi-line strings are written as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    dumped: str = yaml.dump_all(things, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return dumped


def _recipe_files(job: LaunchedJob) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the contents of the recipe's files by name, and the arguments of `kapelle train` that refer to these files in a container."""
    texts: dict[str, str] = {}
    words = list(job.train)
    for number, file in enumerate(job.files):
        path = Path(file)
        if path.is_file():
            name = f"{number}-{''.join(c if c.isalnum() and c.isascii() else '-' for c in path.stem)}.yaml"
            texts[name] = path.read_text("utf-8")
            words[number] = f"{RECIPES}/{name}"
    if sum(len(text.encode()) for text in texts.values()) > MOST_BYTES:
        raise ConfigError(
            "The recipe's files are larger than a ConfigMap may be (1 MiB). Put them into the image and give their paths there."
        )
    return texts, tuple(words)


def _pod(job: LaunchedJob, words: tuple[str, ...], *, mounts: bool) -> dict[str, Any]:
    runs = {"emptyDir": {}} if job.volume is None else {"persistentVolumeClaim": {"claimName": job.volume}}
    volumes: list[dict[str, Any]] = [
        {"name": "runs", **runs},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    places: list[dict[str, Any]] = [
        {"name": "runs", "mountPath": "/runs"},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - the containers' own
    ]
    if mounts:
        volumes.append({"name": "recipe", "configMap": {"name": job.name}})
        places.append({"name": "recipe", "mountPath": RECIPES, "readOnly": True})
    start = "kapelle train"
    if job.nodes * job.processes > 1:
        head = f"{job.name}-0.{job.name}" if job.nodes > 1 else "localhost"
        start = (
            f"torchrun --nnodes {job.nodes} --nproc-per-node {job.processes} --rdzv-id {job.name} "
            f"--rdzv-backend c10d --rdzv-endpoint {head}:{PORT} -m kapelle train"
        )
    shell = (
        f"if [ -e {shlex.quote(job.run_dir + '/config.yaml')} ]; then set -- --resume; fi\n"
        f'exec {start} {shlex.join(words)} "$@"\n'
    )
    container = {
        "name": "kapelle",
        "image": job.image,
        # Kubernetes replaces $(NAME), and reads $$ as one $.
        "command": ["/bin/sh", "-c", shell.replace("$", "$$") if "$(" in shell or "$$" in shell else shell],
        **_resources(job),
        "volumeMounts": places,
    }
    return {
        **({"subdomain": job.name} if job.nodes > 1 else {}),
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": STOPPING_S,
        "containers": [container],
        "volumes": volumes,
    }


def _resources(job: LaunchedJob) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    if job.cpus is not None:
        wanted["cpu"] = job.cpus * job.processes
    if job.memory_gb is not None:
        wanted["memory"] = f"{job.memory_gb}G"
    limits = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    resources = {name: each for name, each in (("requests", wanted), ("limits", limits)) if each}
    return {"resources": resources} if resources else {}


# -------- A batch script for SLURM, to be submitted by `sbatch`

WARNING_S = 120
"""The number of seconds before the time limit at which the run receives SIGTERM."""
SAVING_S = 30
"""The number of seconds after SIGTERM that are reserved for saving the checkpoint once the step is finished."""


def script(job: LaunchedJob) -> str:
    """Return the batch script of a job."""
    many = job.nodes * job.processes > 1
    before = ""
    if job.seconds is not None and job.seconds > 2 * WARNING_S:
        before = f"export {STOP_WITHIN}={WARNING_S - SAVING_S}\n"
    if many:
        before += _text("slurm_nodes")
    words = list(job.train)
    place = words.index("--run-dir")
    quoted = [shlex.quote(word) for word in words]
    quoted[place + 1] = '"$run_dir"'
    return Template(_text("slurm")).substitute(
        options="\n".join(f"#SBATCH {option}" for option in _options(job)),
        run_dir=shlex.quote(job.run_dir),
        before=before,
        start=" \\\n    ".join(_start(job, many=many)),
        words=" ".join(quoted),
    )


def _options(job: LaunchedJob) -> list[str]:
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1"]
    if job.gpus:
        options.append(f"--gpus-per-node={job.gpus}")
    if job.cpus is not None:  # one task of the scheduler starts all processes of a node
        options.append(f"--cpus-per-task={job.cpus * job.processes}")
    if job.memory_gb is not None:
        options.append(f"--mem={job.memory_gb}G")
    if job.seconds is not None:
        minutes, seconds = divmod(job.seconds, 60)
        hours, minutes = divmod(minutes, 60)
        options.append(f"--time={hours:02}:{minutes:02}:{seconds:02}")
        if job.seconds > 2 * WARNING_S:
            options.append(f"--signal=TERM@{WARNING_S}")
    return [*options, "--output=%x-%j.log", "--open-mode=append"]


def _start(job: LaunchedJob, *, many: bool) -> list[str]:
    parts = ["srun --kill-on-bad-exit=1"]
    if job.image is not None:
        gpu = " --nv" if job.gpus else ""
        parts.append(f'apptainer exec{gpu} --bind "$PWD" {shlex.quote(job.image)}')
    if many:
        parts += [
            f'torchrun --nnodes {job.nodes} --nproc-per-node {job.processes} --rdzv-id "$SLURM_JOB_ID"',
            '--rdzv-backend c10d --rdzv-endpoint "$head:$port"',
            "-m kapelle train",
        ]
    else:
        parts.append("kapelle train")
    return parts
