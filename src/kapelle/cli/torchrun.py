"""`kapelle train … --launch torchrun`: torch's own launcher starts the processes of a run on this machine.

It runs here, without restarts: its signal handlers pass Ctrl-C and SIGTERM on to all processes, and wait for them to save.
Several machines are for `torchrun` itself (docs/clusters.md).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kapelle.errors import ConfigError, EngineError
from kapelle.runtime.ranks import VARIABLES

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import ProcessFailure

SAVING = 24 * 3600
"""Seconds that the processes have to save after a signal; afterwards they are killed."""


def launch(arguments: argparse.Namespace) -> int:
    """Start the command in as many processes as it says, without `--launch`, and return its exit code."""
    refuse_second_launcher()
    words = words_of(arguments) + (["--no-rich"] if arguments.no_rich else [])
    processes = arguments.processes or _devices()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # What a process has to say it says itself.
    logging.disable(logging.CRITICAL)
    own = [
        "--standalone",
        f"--nproc-per-node={processes}",
        "--max-restarts=0",
        f"--shutdown-timeout={SAVING}",
        "--module",
        "kapelle",
    ]
    try:
        run(get_args_parser().parse_args([*own, *words]))
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        return _exit_code(failed.failures)
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"torch's launcher did not start {processes} processes: {str(error).splitlines()[0]}."
        ) from error
    return 0


def refuse_second_launcher() -> None:
    """Raise ConfigError in a process that a launcher has started."""
    if os.environ.keys() >= set(VARIABLES):
        raise ConfigError(
            "`--launch` starts processes, but a launcher has started this one already (RANK is set). Leave one of them out."
        )


def words_of(arguments: argparse.Namespace) -> list[str]:
    """Return the words of the command that each process runs."""
    words = ["train", *arguments.words]
    words += [] if arguments.run_dir is None else ["--run-dir", arguments.run_dir]
    return words + [f"--{name}" for name in ("real", "resume", "json") if getattr(arguments, name)]


def _devices() -> int:
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise ConfigError(
            "There is no GPU to count: say with `--processes` how many processes `--launch` starts."
        )
    return found


def _exit_code(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit code of the process that failed first; 128 + the signal where all were killed."""
    rank, said = min(failures.items(), key=lambda each: (each[1].exitcode < 0, each[1].timestamp))
    if said.exitcode < 0:
        print(f"kapelle: Rank {rank} was killed by signal {-said.exitcode}.", file=sys.stderr)
        return 128 - int(said.exitcode)
    return int(said.exitcode)
