"""The arguments of the commands that need more than a line: `kapelle new`, `runs`, `data`, `export`, `launch`, `serve`, `view`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

KINDS = ("environment", "workflow", "algorithm", "project")


def declare_new(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("kind", metavar="KIND", help=f"what to begin: {', '.join(KINDS)}")
    parser.add_argument(
        "name", metavar="NAME", help="its name, such as word_count: a new folder of that name is made here"
    )


NEW = (
    "environment|workflow|algorithm|project NAME",
    "write a working start of a piece of your own, with a test and a recipe",
    "new",
    declare_new,
)
"""Usage, summary, module and arguments of the command."""


# -------- The arguments of `kapelle runs`, and what other commands declare in the same way

EVERYONE = "*"
"""As in `settings.schema`, which is not imported here: `--help` answers at once."""
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


# -------- What `kapelle data` takes on the command line


def declare_data(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kapelle data`."""
    parser.add_argument("action", choices=["prepare"], help="write the files of a data set")
    parser.add_argument("name", metavar="NAME", help="gsm8k, math, deepscaler, deepmath, anli or mbpp")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write; must not exist yet")
    parser.add_argument(
        "--source",
        metavar="WHERE",
        help="a folder, a file or `owner/name` on the Hugging Face hub (the usual name there)",
    )
    parser.add_argument(
        "--train", default="", metavar="A,B", help="splits or files to train on, in place of the usual ones"
    )
    parser.add_argument("--test", default="", metavar="A,B", help="splits or files to test on")
    parser.add_argument("--form", choices=["jsonl", "parquet"], default="jsonl", help="what to write (jsonl)")
    parser.add_argument(
        "--test-share",
        type=_share,
        default=0.1,
        metavar="X",
        help="share to test on where none is published (0.1)",
    )
    parser.add_argument(
        "--max-unusable",
        type=_share,
        default=0.01,
        metavar="X",
        help="largest share of rows that may be left out as unusable (0.01)",
    )
    add_flag(parser, "--json", "print the manifest")


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 <= share < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return share


# -------- The arguments of `kapelle export`

EXPORT_USAGE = "RUN [--out FOLDER] [--merge] [--format peft|hf|gguf-ready] [--agent NAME …] [--push OWNER/NAME [--public]] [--dry-run] [--json]"


def declare_export(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run directory, RUN@best or RUN@STEP")
    parser.add_argument("--out", metavar="FOLDER", help="a new folder (RUN-export)")
    add_flag(parser, "--merge", "whole models with the adapters in them; the same as --format hf")
    parser.add_argument(
        "--format",
        choices=("peft", "hf", "gguf-ready"),
        help="peft: adapters; hf: merged models; gguf-ready: merged models that llama.cpp's converter takes (peft)",
    )
    parser.add_argument(
        "--agent",
        action="append",
        metavar="NAME",
        help="the weights of this agent alone; may be given several times",
    )
    parser.add_argument("--push", metavar="OWNER/NAME", help="send the folder to this repository of a hub")
    add_flag(parser, "--public", "make a new repository public (private)")
    add_flag(parser, "--dry-run", "list what would be written and sent, and keep and send nothing")
    add_flag(parser, "--json", ONE_OBJECT)


# -------- The arguments of `kapelle launch`


def declare_launch(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments but for the recipe's."""
    add_flag(parser, "--slurm", "write a batch script for SLURM")
    add_flag(parser, "--kubernetes", "write a manifest for Kubernetes")
    numbers = {
        "--nodes": ("N", 1, "machines (1)"),
        "--processes": ("P", 1, "processes on each machine (1)"),
        "--cpus": ("N", None, "CPU cores for each process (the scheduler's choice)"),
        "--memory": ("GB", None, "memory on each machine, in gigabytes (the scheduler's choice)"),
    }
    for name, (metavar, default, meaning) in numbers.items():
        parser.add_argument(name, type=count, default=default, metavar=metavar, help=meaning)
    parser.add_argument(
        "--gpus", type=_from_zero, metavar="N", help="GPUs on each machine (one for each process); 0 for none"
    )
    parser.add_argument("--time", metavar="TIME", help="when to end it: minutes, H:MM:SS or DAYS-HOURS")
    parser.add_argument("--image", metavar="IMAGE", help="the container image; Kubernetes needs one")
    parser.add_argument(
        "--volume", metavar="CLAIM", help="Kubernetes: the persistent volume claim that keeps /runs"
    )
    parser.add_argument("--name", metavar="NAME", help="what the job is called (the recipe's name)")
    parser.add_argument(
        "--run-dir", metavar="DIR", help="where the run is kept (runs/NAME, /runs/NAME in a pod)"
    )
    parser.add_argument("--output", metavar="FILE", help="write it there; must not exist yet")
    add_flag(parser, "--unchecked", "do not look at models and data, which only the cluster has")


def _from_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 0")
    return int(text)


# -------- The arguments of `kapelle serve` and `kapelle chat`

Number = TypeVar("Number", int, float)

CALLS, SECONDS, BATCH = 1024, 600.0, 64
"""Answers under way at once, the seconds that one may take, and the answers scored together, unless set otherwise."""

WORLD_IDLE, SESSION_IDLE = 600.0, 3600.0
"""Seconds without a call after which a world, or a session without a reward, may be closed, unless set otherwise."""


def declare_serve(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="(policy | reward) RUN | environments",
        help="what to serve, and the run directory it comes from; for environments their settings, name.key=value",
    )
    parser.add_argument(
        "--record",
        metavar="FOLDER",
        help="keep what programs do with the agents, as episodes, once they post a reward",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="what clients call the team or the verifier (the run's name)"
    )
    _declare_environments(parser)
    declare_binding(parser, 8000, environments=50_051)
    parser.add_argument(
        "--grpc-port",
        type=int,
        metavar="PORT",
        help="reward: port for gRPC beside HTTP; 0 takes a free one (no gRPC)",
    )
    parser.add_argument(
        "--calls",
        type=_positive(int),
        default=CALLS,
        metavar="N",
        help=f"most answers under way at once, those that wait included ({CALLS})",
    )
    parser.add_argument(
        "--batch",
        type=_positive(int),
        default=BATCH,
        metavar="N",
        help=f"reward: most answers that are scored together ({BATCH})",
    )
    parser.add_argument(
        "--timeout",
        type=_positive(float),
        default=SECONDS,
        metavar="S",
        help=f"seconds that one call may take ({SECONDS:g})",
    )


def _declare_environments(parser: argparse.ArgumentParser) -> None:
    """Add what environments alone are served with."""
    parser.add_argument(
        "--environments",
        metavar="NAMES",
        help="environments: what to serve, as name or name=what, separated by commas",
    )
    parser.add_argument(
        "--workers",
        type=_from_zero,
        default=0,
        metavar="N",
        help="environments: processes for their worlds; 0 keeps them in one (0)",
    )
    parser.add_argument(
        "--sessions",
        type=_positive(int),
        default=4096,
        metavar="N",
        help="environments: most worlds at once (4096)",
    )
    parser.add_argument(
        "--idle",
        type=_positive(float),
        metavar="S",
        help="seconds after which what nobody calls any more may be closed: worlds of environments "
        f"({WORLD_IDLE:g}), sessions that are recorded ({SESSION_IDLE:g})",
    )
    parser.add_argument(
        "--drain",
        type=_positive(float),
        default=30.0,
        metavar="S",
        help="environments: seconds after a signal in which episodes may end (30)",
    )
    parser.add_argument(
        "--replace", metavar="NAMES", help="environments: put these on the server at --at, while runs play"
    )
    parser.add_argument("--at", metavar="HOST:PORT", help="environments: the server of --replace")
    parser.add_argument(
        "--certificate", metavar="FILE", help="environments: PEM file that the server of --at is trusted by"
    )


def declare_binding(parser: argparse.ArgumentParser, port: int, **others: int) -> None:
    """Add where a service listens and who may call it; `port` is the usual one, and with `others` the command knows it."""
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="HOST", help="address to listen on (127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=None if others else port,
        metavar="PORT",
        help=f"port to listen on; 0 takes a free one ({'; '.join([str(port), *(f'{k} {v}' for k, v in others.items())])})",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM file of the TLS certificate, with its chain")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file of its key")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name by which callers address this service; may be given several times",
    )


def declare_chat(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kapelle chat`."""
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run directory")
    parser.add_argument("--agent", metavar="NAME", help="talk with one agent alone (the whole team)")


def _positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is no number") from None
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not more than 0")
        return number

    return read


# -------- The arguments of `kapelle view`


def declare_view(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "words", nargs="*", metavar="RUNS", help="run directories, or folders that hold some (runs)"
    )
    parser.add_argument(
        "--export", metavar="FILE", help="serve nothing; write one page of these runs that needs no server"
    )
    declare_binding(parser, 7860)
