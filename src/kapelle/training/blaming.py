"""Measure blame for the episodes and weights of a run (`kapelle.blame`).

The module `evaluation.blame` computes the blame, and `runs.blamed` stores it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from kapelle.errors import ConfigError, DataError, RunDirectoryError
from kapelle.rollout.episodes import CollectsGroups
from kapelle.rollout.evaluation.blame import check_repeatable, choose_episodes, measure_blame
from kapelle.rollout.evaluation.evaluate import decoded, evaluate_shared
from kapelle.runs.blamed import Blame, BlameFile
from kapelle.runs.reader import read_groups
from kapelle.runtime.randomness import capture_random, restore_random
from kapelle.setup.problems import choose_tasks
from kapelle.setup.prompt_lengths import short_enough
from kapelle.types import Group

if TYPE_CHECKING:
    from kapelle.training.trainer import Trainer

SPLITS = ("eval", "train")
"""The possible sources of episodes: an evaluation, or tasks of the training split."""


def blame_team(
    trainer: Trainer,
    run: Path | None,
    settings: Sequence[str],
    episodes: int,
    samples: int,
    split: str,
    seed: int | None,
) -> Blame:
    """Return the blame for the current weights of a trainer. If `run` is None, no files are read or written.

    The states of the global random generators are restored afterwards, so that the call does not affect later training.
    """
    check_blame(episodes, samples, split)
    check_repeatable(trainer.config.environment)
    if trainer.algorithm.judges:
        raise ConfigError(
            f"`{trainer.algorithm.name}` trains a verifier, but blame needs episodes of a team. Use a run that trains or evaluates a team."
        )
    if trainer.ranks.size > 1 or isinstance(trainer.setup.engine, CollectsGroups):
        raise ConfigError(
            "Blame needs a single process, but this run has several. Run `kapelle blame RUN` on its checkpoint in a separate process."
        )
    drawn = capture_random()
    try:
        groups = _groups(trainer, None if settings else run, split)
        # Weights are identified by their hash, because a run that was rolled back can reach the same step with other weights.
        weights = sorted({(t.policy, t.weights_hash) for g in groups for e in g.episodes for t in e.turns})
        measured = {
            "step": trainer.done,
            "split": split,
            "samples": samples,
            "seed": trainer.config.seed if seed is None else seed,
            "environment": trainer.setup.environment.name,
            "settings": list(settings),
            "weights": blake2b(json.dumps(weights).encode(), digest_size=8).hexdigest(),
        }
        file = None if run is None else BlameFile(run, measured)
        chosen = choose_episodes(groups, episodes)
        report = trainer.observer.phase
        return measure_blame(trainer.setup, chosen, measured, file, lambda line: report("blame", line))
    finally:
        restore_random(drawn)


def check_blame(episodes: int, samples: int, split: str) -> None:
    """Raise ConfigError if a number is less than 1 or the split is unknown."""
    for name, value in (("episodes", episodes), ("samples", samples)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"`{name}` is {value!r}. Give a whole number of at least 1.")
    if split not in SPLITS:
        raise ConfigError(
            f"`split` is {split!r}, which is not a split of the data. Choose {' or '.join(map(repr, SPLITS))}."
        )


def _groups(trainer: Trainer, run: Path | None, split: str) -> Sequence[Group]:
    """Return the recorded evaluation episodes of the current weights.

    If there are none, or if `split` is `train`, roll out episodes.
    """
    config, setup = trainer.config, trainer.setup
    if split == "eval" and run is not None:
        # Without a readable recording, the episodes are rolled out again.
        with suppress(RunDirectoryError, DataError):
            found = read_groups(run, trainer.done, "test")
            own = [group for group in found if group.task.part not in config.evaluation.sets]
            trainer.observer.phase(
                "blame", f"the {len(own)} problems of the evaluation after step {trainer.done}"
            )
            return own
    problems = config.evaluation.problems
    fits = short_enough(config, setup.team, setup.engine.renderer)
    tasks = choose_tasks(setup.environment, "test" if split == "eval" else "train", problems, fits=fits)
    trainer.observer.phase("blame", f"evaluating {len(tasks)} problems of the {split} split")
    if split == "eval":
        setup = decoded(setup, config.evaluation)
    samples = config.evaluation.samples if split == "eval" else 1
    return evaluate_shared(setup, tasks, config.seed, samples=samples).groups
