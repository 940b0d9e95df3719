"""Training in processes that die: what a test starts, and the places where it can be told to die.

A server process imports the library once; each run is a fork of it, with a process id, a run directory and a
death of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        "algorithm": {"name": "grpo", "group_size": 3, "minibatches": 2},
        "workflow": {"name": "tests.support.plugins:Echo"},
    },
    "ppo": {
        # Critics, a reference that is refreshed, and dropout, which draws from the global generator.
        "algorithm": {
            "name": "ippo",
            "group_size": 2,
            "minibatches": 2,
            "reference_every": 2,
            "gae": {"kl_in_reward": 0.05},
        },
        "workflow": {"name": "debate"},
        "team": {
            "agents": 2,
            "lora": {"rank": 2, "alpha": 4.0, "dropout": 0.2},
            "critic_lora": {"rank": 2, "alpha": 4.0},
            "sampling": {"max_tokens": 4},
        },
    },
    "whole": {
        "algorithm": {"name": "mappo", "loss": {"kl_coefficient": 0.1}, "reference_every": 3},
        "team": {"sharing": "shared", "agents": 2, "sampling": {"max_tokens": 4}},
    },
    "waiting": {
        # Episode states that really wait, in threads and on the event loop, and agents that fall silent at different times.
        "environment": {"name": "tests.support.waiting:Waiting", "tasks": 5},
        "workflow": {"name": "tests.support.waiting:Rounds"},
        "team": {"agents": 2, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 40}},
    },
}
STEPS = 6
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Death:
    """Where a run dies: at the `times`-th call of `place`, with that signal to itself."""

    place: str
    times: int = 1
    number: int = signal.SIGKILL
    again: bool = False
    """Whether the signal is sent twice."""


def start(method: str, run: Path, *, resume: bool = False, death: Death | None = None) -> int | None:
    """Train in a process of its own until it ends or dies; return its exit code."""
    process = preloaded().Process(target=_train, args=(method, str(run), resume, death))
    process.start()
    process.join()
    return process.exitcode


def spawn(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a function in a process of its own and return the process."""
    process = preloaded().Process(target=target, args=arguments)
    process.start()
    return process


def preloaded() -> ForkServerContext:
    """Return a way to start processes that have imported the library already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    with chdir(
        ROOT
    ):  # the server finds modules from where it is started, and says nothing where it finds none
        ensure_running()
    return context


def trainer(method: str, run: Path, *, resume: bool = False, **over: Any) -> Any:
    """Return the trainer of a method, the same in every process."""
    from tests.support.tiny import sections

    from kapelle.training.trainer import Trainer

    settings = sections(
        training={"steps": STEPS, "tasks_per_step": 2},
        evaluation={"problems": 3, "problems_while_training": 2, "every": 2},
        checkpoint={"every": 2, "keep": 2},
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2},
        **{
            "environment": {"name": "tests.support.plugins:Digest", "tasks": 5, "noisy": True},
            **SETTINGS[method],
        },
    )
    return Trainer(**{**settings, **over}, run_dir=run, resume=resume)


def _train(method: str, run: str, resume: bool, death: Death | None) -> None:
    import random

    import numpy as np
    import torch

    if death is not None:
        arm(death)
    # The environment draws from the global generators: another seed shows that a checkpoint brings them back.
    seed = 1 if (Path(run) / "latest").exists() else 0
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    os.fsync = lambda _descriptor: None  # type: ignore[assignment] # what dies is the process, not the machine
    try:
        with trainer(method, Path(run), resume=resume) as made:
            summary = made.train()
    except KeyboardInterrupt:
        os._exit(130)
    os._exit(summary.stopped_by)


def _places() -> Mapping[str, tuple[Any, str, str]]:
    """Return by name where a process can be told to die: what is called there, and which side of the call."""
    import shutil

    from kapelle.engines.rollout.local.engine import LocalEngine
    from kapelle.engines.train.torch.engine import ForwardPass
    from kapelle.engines.train.torch.learner import Learner
    from kapelle.rollout.evaluation import evaluate as evaluation
    from kapelle.runs import checkpoint, checkpoint_contents
    from kapelle.runs.checkpoint import Share
    from kapelle.runs.writer import RunDirectory
    from kapelle.runtime.rank_group import RankGroup, StoreBarrier
    from kapelle.training.loop import Loop
    from kapelle.training.progress import Progress

    # `before` and `after` stand for the two sides of a call.
    return {
        "in a rollout": (LocalEngine, "generate", "before"),
        "in an update": (ForwardPass, "outputs", "before"),
        "in an evaluation": (evaluation, "summarise", "before"),
        "between updates": (Learner, "launch", "before"),
        "after a step, nothing recorded": (Loop, "step", "after"),
        "metrics recorded": (RunDirectory, "record_metrics", "after"),
        "episodes recorded": (RunDirectory, "record_episodes", "after"),
        "evaluation recorded": (RunDirectory, "record_evaluation", "after"),
        "positions taken": (RunDirectory, "positions", "after"),
        "state written": (checkpoint, "_write_state", "after"),
        "policies written": (Progress, "write_policies", "after"),
        "before the seal": (checkpoint, "_write_manifest", "before"),
        "sealed, not renamed": (checkpoint, "_write_manifest", "after"),
        "renamed, not pointed at": (RunDirectory, "point_latest", "before"),
        "before pruning": (RunDirectory, "prune", "before"),
        "in the middle of pruning": (shutil, "rmtree", "after"),
        # Of several processes, or of a save that is written meanwhile.
        "in a meeting": (RankGroup, "_exchange", "before"),
        "in a sum": (RankGroup, "_sum", "before"),
        "in a meeting aside": (StoreBarrier, "all_gather", "after"),
        "save begun": (Progress, "begin_save", "after"),
        "folder made": (checkpoint, "_make_folder", "after"),
        "before a share": (Share, "write", "before"),
        "share written": (Share, "write", "after"),
        "policies saved": (checkpoint_contents, "save_adapter", "after"),
        "files listed": (checkpoint, "_listed", "after"),
        "reading a checkpoint": (checkpoint, "read", "before"),
        "rewound": (RunDirectory, "rewind", "after"),
    }


def arm(death: Death, others: Callable[[], Sequence[int]] | None = None) -> None:
    """Let this process die as told, and before it those whose numbers `others` returns."""
    owner, name, side = _places()[death.place]
    call = getattr(owner, name)
    counted = 0

    def die() -> None:
        for other in others() if others is not None else ():
            with suppress(ProcessLookupError):
                os.kill(other, death.number)
        for _ in range(1 + death.again):
            os.kill(os.getpid(), death.number)

    def watched(*arguments: Any, **keywords: Any) -> Any:
        nonlocal counted
        counted += 1
        last = counted == death.times
        if last and side == "before":
            die()
        result = call(*arguments, **keywords)
        if last and side == "after":
            die()
        return result

    setattr(owner, name, watched)
