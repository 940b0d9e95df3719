"""Check tasks: the same everywhere, in separate splits, plain enough to be stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from kapelle.conformance.finding import Finding
from kapelle.environment import Environment
from kapelle.settings.base import Settings
from kapelle.types import Split, Task

SPLITS: tuple[Split, Split] = ("train", "test")


def first_tasks(environment: Environment, split: Split, count: int) -> list[Task]:
    """Return the first tasks of a split, at most `count`."""
    size = environment.size(split)
    return [environment.task(split, k) for k in range(count if size is None else min(count, size))]


def fingerprint(environment: Environment, count: int) -> list[list[str]]:
    """Return id, question and data of the first tasks of both splits, as text."""
    return [_task_row(task) for split in SPLITS for task in first_tasks(environment, split, count)]


def _task_row(task: Task) -> list[str]:
    return [task.id, task.question, json.dumps(task.data, sort_keys=True)]


def settings_survive(environment: Environment) -> Finding:
    """Return whether the settings are the same after they were written to a recipe and read again."""
    if not isinstance(environment, Settings):
        return Finding("settings", "not checked", "the environment is no `kapelle.Settings`")
    again = type(environment)(**environment.model_dump(mode="json"))
    if again != environment:
        return Finding("settings", "failed", "written as JSON and read again, they have changed")
    return Finding("settings", "ok", "they survive being written to a recipe")


def same_tasks(environment: Environment, chosen: Mapping[Split, Sequence[Task]]) -> Finding:
    """Return whether tasks are the same when asked for again, have different ids and are plain JSON."""
    name = "tasks"
    for split, tasks in chosen.items():
        again = [environment.task(split, k) for k in reversed(range(len(tasks)))][::-1]
        for before, after in zip(tasks, again, strict=True):
            if before != after:
                return Finding(name, "failed", f"task {before.id} has changed when it is asked for again")
        ids = [task.id for task in tasks]
        if len(set(ids)) < len(ids):
            return Finding(name, "failed", f"two tasks of the {split} split have one id")
        for task in tasks:
            try:
                if json.loads(json.dumps(task.data)) != task.data:
                    return Finding(name, "failed", f"the data of task {task.id} change when written as JSON")
            except (TypeError, ValueError, RecursionError) as error:
                return Finding(name, "failed", f"the data of task {task.id} are not JSON: {error}")
    return Finding(name, "ok", f"{sum(map(len, chosen.values()))} tasks, the same when asked for again")


def same_in_another_process(environment: Environment, chosen: Mapping[Split, Sequence[Task]]) -> Finding:
    """Return whether a fresh process makes the same tasks from the same settings."""
    name = "other process"
    if not isinstance(environment, Settings):
        return Finding(name, "not checked", "the environment is no `kapelle.Settings`")
    here = [_task_row(task) for split in SPLITS for task in chosen[split]]
    asked = json.dumps(
        {"settings": environment.model_dump(mode="json"), "count": max(map(len, chosen.values()))}
    )
    # Another hash seed, so that a dependence on the order of a set shows.
    ran = subprocess.run(
        [sys.executable, "-m", "kapelle.conformance"],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(name, "failed", f"a fresh process cannot make the tasks: {last}")
    if json.loads(ran.stdout) != here:
        return Finding(name, "failed", "a fresh process makes different tasks from the same settings")
    return Finding(name, "ok", "a fresh process makes the same tasks")


def splits_apart(environment: Environment, chosen: Mapping[Split, Sequence[Task]]) -> Finding:
    """Return whether train and test share a question among the checked tasks."""
    questions = {split: {task.question for task in tasks if task.question} for split, tasks in chosen.items()}
    shared = questions["train"] & questions["test"]
    if shared:
        return Finding("splits", "failed", f"train and test share the question {next(iter(shared))[:60]!r}")
    if not questions["train"]:
        return Finding("splits", "not checked", "the tasks of a game have no questions")
    return Finding("splits", "ok", "the checked tasks share no question")
