"""Selects the problems on which a run is tested, and ensures that the run does not train on any of them.

Two problems are equal if their words, numbers and mathematical signs are equal. Spaces, capitalisation and the
punctuation of sentences are ignored. Images are compared too, because the same question may be asked about many images.
Games have no questions, so they are not compared.

A finite training split is compared with every additional test set (`evaluation.sets`) before a model is loaded. A row
that is in both raises an error. The tasks of a generated split are compared when they are sampled. A task that is in a
test set is replaced by another task.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice

from kapelle.environment import Environment, ShowsImages, check_declared, offers, size_of, task_of
from kapelle.errors import ConfigError, DataError
from kapelle.runtime.foreign_code import Unfit, call_user_code
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.schema import EvaluationConfig, RunConfig
from kapelle.team import Team
from kapelle.types import Split, Task

Fits = Callable[[Task], bool]

SIGNS = frozenset("+-*/^%()[]{}!.")
"""The characters that are kept in addition to letters, numbers and mathematical symbols. All other characters count as punctuation."""
KEPT = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Sm"})
"""The Unicode categories of letters and their marks, numbers, and mathematical symbols."""
LOOKED_AT = 256
"""The number of tasks of a generated training split that are compared with the test sets."""


def same_words(question: str) -> str:
    """Return the normal form of a question; for example, `What's 2,000 + 3?` becomes `what s 2000+3`."""
    raised = (
        f"^{each}" if unicodedata.decomposition(each).startswith("<super>") else each for each in question
    )
    text = unicodedata.normalize("NFKC", "".join(raised)).casefold().replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    # Remove full stops and exclamation marks at the end of sentences, and hyphens within words.
    text = re.sub(r"(?<!\d)\.|\.(?!\d)|(?<![\d)])!|(?<=[^\W\d_])-(?=[^\W\d_])", " ", text)
    kept = "".join(each if each in SIGNS or unicodedata.category(each) in KEPT else " " for each in text)
    words = re.sub(r"\s*([^\w\s])\s*", _unspaced, " ".join(kept.split()))
    return words or question.strip()


def _unspaced(found: re.Match[str]) -> str:
    sign = found.group(1)
    return found.group() if unicodedata.category(sign)[0] == "M" else sign


def problem_of(environment: Environment, task: Task) -> str | None:
    """Return the normal form of a task, which is the same for equal problems, or None for a task without a question."""
    if not task.question:
        return None
    shown = f" {task.data}" if offers(environment, ShowsImages) else ""
    return f"{same_words(task.question)}{shown}"


def choose_tasks(
    environment: Environment, split: Split, count: int, seed: int = 0, fits: Fits | None = None
) -> list[Task]:
    """Sample `count` tasks of a split with a seed. If the split is finite, tasks are sampled without replacement.

    Tasks for which `fits` returns False are excluded.
    """
    size = environment.size(split)
    if size == 0:
        raise ConfigError(
            f"`{environment.name}` has no tasks in the split '{split}' (source: "
            f"{environment.sources[split]}). Provide tasks with `eval_dataset=` of `kapelle.train`, or with "
            "`environment.eval_path`."
        )
    if size is None:
        # Generated tasks may repeat; 20 draws per task find enough different ones, if they exist.
        chosen: dict[str, Task] = {}
        for index in range(20 * count):
            task = task_of(environment, split, index)
            # Questions about images often have the same text.
            shown = f" {task.data}" if offers(environment, ShowsImages) else ""
            if fits is None or fits(task):
                chosen.setdefault(f"{task.question}{shown}" if task.question else task.id, task)
            if len(chosen) == count:
                break
        return list(chosen.values())
    draw = random.Random(derive_seed(seed, split))
    if fits is not None:
        whole = (task_of(environment, split, index) for index in draw.sample(range(size), size))
        return list(islice(filter(fits, whole), count))
    return [task_of(environment, split, index) for index in draw.sample(range(size), min(count, size))]


def problems_of(
    environment: Environment, settings: EvaluationConfig, fits: Fits | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the normal form and the question of each problem of a test set.

    For a finite split, all problems are yielded; otherwise, the problems that an evaluation samples are yielded.
    """
    size = environment.size("test")
    count = max(settings.problems, settings.problems_while_training)
    tasks = (
        choose_tasks(environment, "test", count, fits=fits)
        if size is None
        else (task_of(environment, "test", index) for index in range(size))
    )
    for task in tasks:
        problem = problem_of(environment, task)
        if problem is not None:
            yield problem, task.question


def untested(config: RunConfig, fits: Fits | None = None) -> Fits | None:
    """Return a filter for training tasks, or None if there is nothing to filter.

    The filter accepts tasks that `fits` accepts and that are in none of the additional test sets.
    """
    settings = config.evaluation
    if not settings.sets:
        return fits
    known: frozenset[str] | None = None

    def free(task: Task) -> bool:
        nonlocal known
        if known is None:  # the test sets are read when the first task is drawn
            known = frozenset(
                problem
                for tested in settings.sets.values()
                for problem, _ in problems_of(tested, settings, fits)
            )
        return (fits is None or fits(task)) and problem_of(config.environment, task) not in known

    return free


def check_sets(config: RunConfig, team: Team) -> list[str]:
    """Check the additional test sets, and return notes about the problems that are excluded from training.

    Raises ConfigError for a set that does not suit the team, that contains training rows, or that contains all problems
    of a generator.
    """
    if not config.evaluation.sets:
        return []
    seconds, environment = config.patience.environment, config.environment
    for name, tested in config.evaluation.sets.items():
        where = f"`evaluation.sets.{name}`"
        try:
            check_declared(tested, seconds)
            call_user_code("check", seconds, tested.check, team.names)
            call_user_code("check", seconds, config.workflow.check, team.agents, tested)
            size = size_of(tested, "test", seconds)
        except (Unfit, ConfigError, DataError) as error:
            raise ConfigError(f"{where} (`{tested.name}`) does not fit the team: {error}") from None
        if size == 0:
            raise ConfigError(f"{where} has no tasks of the split 'test' ({tested.sources['test']}).")
    notes: list[str] = []
    size = size_of(environment, "train", seconds)
    indices = range(LOOKED_AT) if size is None else range(size)
    trained = {
        problem_of(
            environment, task_of(environment, "train", drawn(config.seed, each) if size is None else each)
        )
        for each in indices
    } - {None}
    for name, tested in config.evaluation.sets.items():
        problems = list(problems_of(tested, config.evaluation))
        known = {problem: question for problem, question in problems if problem in trained}
        if not known:
            continue
        where, source = f"`evaluation.sets.{name}`", f"`{environment.name}`, {environment.sources['train']}"
        first = f"such as {next(iter(known.values()))!r:.60}"
        if size is not None:
            raise ConfigError(
                f"{where}: {len(known)} of its {len(problems)} problems are also in the training data "
                f"({source}), {first}. Remove them from the training rows."
            )
        if trained <= known.keys():
            raise ConfigError(
                f"{where} contains all {len(trained)} problems of {LOOKED_AT} tasks that training draws "
                f"({source}), {first}. Give the set settings that differ from those of `environment`."
            )
        notes.append(
            f"{where} contains {len(known)} of {len(trained)} problems that training would draw, {first}; "
            "training excludes them"
        )
    return notes


def drawn(seed: int, cursor: int, *again: int) -> int:
    """Return the index of a task that training samples from a generated split. The values in `again` select replacement tasks."""
    return derive_seed(seed, "task", cursor, *again) >> 16
