"""Check whether an environment is suitable for training, without loading a model.

    findings = await conform(environment)

Each finding contains the name of a check and its result. Episodes are rolled out with the scripted expert of the environment, with
meaningless messages, and with answers that should receive no reward.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kapelle.environment import (
    CAPABILITIES,
    OPTIONAL,
    Answerable,
    Environment,
    Private,
    Scripted,
    ShowsImages,
    Teachable,
    TeamMoves,
    check_capabilities,
    check_declared,
    has_comparable_answers,
    offers,
    report_of,
    size_of,
    task_of,
)
from kapelle.errors import DataError, EpisodeError, KapelleError
from kapelle.rollout.conformance.driving import (
    LONGEST,
    NOTHING,
    SECONDS,
    DrivenState,
    Finding,
    accepts,
    always,
    by_agent,
    drive,
    drive_or_error,
    scripted,
)
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.runtime.deadlines import DeadlineExceeded
from kapelle.runtime.foreign_code import Unfit, call_user_code, reason
from kapelle.settings.base import Settings
from kapelle.types import Episode, Split, Task

__all__ = ["Finding", "Private", "conform", "drive"]

TASKS = 12
"""Number of tasks of each split that are checked."""
SPLITS: tuple[Split, Split] = ("train", "test")


async def conform(
    environment: Environment, agents: Sequence[str] | None = None, tasks: int = TASKS
) -> list[Finding]:
    """Run all checks on an environment, and return the finding of every check.

    The argument `agents` contains the names of the agents in order. If `agents` is None, the smallest possible team is used. Raises
    the errors of `Environment.check`, for example if data is missing or the team is not supported.
    """
    found = [declared(environment)]
    try:
        check_declared(environment, SECONDS)
    except Unfit as error:
        return [*found, Finding("description", "failed", str(error))]
    bounds = "rewards in {} to {}".format(*environment.reward_range)
    found.append(Finding("description", "ok", f"{bounds}; train and test sources are named"))
    if found[0].status == "failed":
        return found
    try:
        teams = [tuple(f"agent_{k}" for k in range(size)) for size in range(1, 9)]
        # If it accepts none of these, its own `check` below raises an error that describes the required team.
        roles = tuple(agents or next((names for names in teams if accepts(environment, names)), teams[0]))
        call_user_code("check", SECONDS, environment.check, roles)
        check_capabilities(environment, len(roles), SECONDS)
        chosen = {split: first_tasks(environment, split, tasks) for split in SPLITS}
    except (Unfit, EpisodeError) as error:
        return [*found, Finding("tasks", "failed", str(error))]
    if empty := [split for split, own in chosen.items() if not own]:
        return [
            *found,
            Finding("tasks", "failed", f"the {empty[0]} split has no task: `size('{empty[0]}')` is 0"),
        ]
    train = chosen["train"]
    work: dict[str, Callable[[], Finding | list[Finding] | Awaitable[Finding | list[Finding]]]] = {
        "settings": lambda: settings_survive(environment),
        "tasks": lambda: same_tasks(environment, chosen),
        "other process": lambda: same_in_another_process(environment, chosen),
        "splits": lambda: splits_apart(environment, chosen),
        "determinism": lambda: same_states(environment, train, roles),
        "private views": lambda: private_views(environment, train, roles),
        "rewards": lambda: rewards_in_range(environment, train, roles),
        "records": lambda: outcomes_kept(environment, train, roles),
        "symmetry": lambda: roles_alike(environment, train, roles),
        "gold": lambda: gold_is_rewarded(environment, chosen),
    }
    for name, each in work.items():
        try:
            result = each()
            if isinstance(result, Awaitable):
                result = await result
        except Unfit as error:
            # Further checks would fail with the same method.
            return [*found, Finding(name, "failed", str(error))]
        except EpisodeError as error:
            result = Finding(name, "failed", str(error))
        except (KapelleError, KeyboardInterrupt, asyncio.CancelledError):
            raise
        except (Exception, DeadlineExceeded, SystemExit) as error:  # noqa: BLE001 - the environment's own code
            return [*found, Finding(name, "failed", f"the environment's code raises {reason(error)}")]
        found += result if isinstance(result, list) else [result]
    return found


# -------- Check its declarations, its settings and its tasks


def first_tasks(environment: Environment, split: Split, count: int) -> list[Task]:
    """Return at most `count` tasks from the beginning of a split. Raises Unfit if the size or a task is invalid."""
    size = size_of(environment, split, SECONDS)
    return [
        task_of(environment, split, k, SECONDS) for k in range(count if size is None else min(count, size))
    ]


def declared(environment: Environment) -> Finding:
    """Check whether all declared capabilities are complete, and return the declared capabilities or the problem."""
    name, kind = "capabilities", type(environment)
    had = list(filter(lambda capability: offers(environment, capability), CAPABILITIES))
    for capability in had:
        for part in _parts_of(capability):
            if part not in OPTIONAL and getattr(kind, part, None) is vars(capability)[part]:
                return Finding(name, "failed", f"it declares `{capability.__name__}` but has no `{part}`")
    own = [
        vars(cls)
        for cls in kind.__mro__
        if not cls.__module__.startswith(("kapelle.", "pydantic.", "builtins"))
    ]
    meant = [
        f"`{part}` (`kapelle.environment.{capability.__name__}`)"
        for capability in CAPABILITIES
        if capability not in had
        for part in _parts_of(capability)
        if any(inspect.isfunction(found.get(part)) for found in own)
    ]
    if meant:
        return Finding(
            name,
            "not checked",
            f"{', '.join(meant)} is defined but not declared. If it is intended, inherit from that class",
        )
    named = ", ".join(sorted(capability.__name__ for capability in had))
    return Finding(name, "ok", f"it declares {named or 'none'}")


def _parts_of(capability: type) -> list[str]:
    return [part for part in vars(capability) if not part.startswith("_")]


def fingerprint(environment: Environment, count: int) -> list[list[str]]:
    """Return the id, the question and the data of the first tasks of both splits, as strings."""
    return [_task_row(task) for split in SPLITS for task in first_tasks(environment, split, count)]


def _task_row(task: Task) -> list[str]:
    return [task.id, task.question, json.dumps(task.data, sort_keys=True)]


def settings_survive(environment: Environment) -> Finding:
    """Check whether the settings stay the same when they are written to a recipe and read back."""
    if not isinstance(environment, Settings):
        return Finding("settings", "not checked", "the environment is not a `kapelle.Settings`")
    if type(environment)(**environment.model_dump(mode="json")) != environment:
        return Finding("settings", "failed", "they change when written as JSON and read back")
    return Finding("settings", "ok", "they are unchanged after being written to a recipe and read back")


def same_tasks(environment: Environment, chosen: Mapping[Split, Sequence[Task]]) -> Finding:
    """Check whether repeated calls return equal tasks, and whether tasks have different ids and plain JSON data."""
    name = "tasks"
    for split, tasks in chosen.items():
        repeated = [task_of(environment, split, k, SECONDS) for k in reversed(range(len(tasks)))][::-1]
        for before, after in zip(tasks, repeated, strict=True):
            if before != after:
                return Finding(name, "failed", f"task {before.id} differs when it is requested again")
        ids = [task.id for task in tasks]
        if len(set(ids)) < len(ids):
            return Finding(name, "failed", f"two tasks of the {split} split have the same id")
        for task in tasks:
            try:
                if json.loads(json.dumps(task.data)) != task.data:
                    return Finding(name, "failed", f"the data of task {task.id} changes when written as JSON")
            except (TypeError, ValueError, RecursionError) as error:
                return Finding(name, "failed", f"the data of task {task.id} is not JSON: {error}")
    return Finding(
        name, "ok", f"{sum(map(len, chosen.values()))} tasks, which are the same when requested again"
    )


def same_in_another_process(environment: Environment, chosen: Mapping[Split, Sequence[Task]]) -> Finding:
    """Check whether another process creates the same tasks from the same settings."""
    name = "other process"
    if not isinstance(environment, Settings):
        return Finding(name, "not checked", "the environment is not a `kapelle.Settings`")
    here = [_task_row(task) for split in SPLITS for task in chosen[split]]
    request = {"settings": environment.model_dump(mode="json"), "count": max(map(len, chosen.values()))}
    # Another hash seed reveals a dependence on the order of a set.
    ran = subprocess.run(
        [sys.executable, "-m", "kapelle.rollout.conformance"],
        input=json.dumps(request),
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
    """Check whether the checked tasks of the train and test splits have a question in common (about the same image)."""
    pictures = offers(environment, ShowsImages)  # the content of a picture is in the task's data

    def whole(task: Task) -> str:
        return task.question + (f" of {json.dumps(task.data, sort_keys=True)}" if pictures else "")

    questions = {split: {whole(task) for task in tasks if task.question} for split, tasks in chosen.items()}
    shared = questions["train"] & questions["test"]
    if shared:
        game = (
            "; in a game leave `Task.question` empty, and return the text from the episode state's `observe`"
        )
        fix = game if len(questions["train"]) == 1 else ""  # a string that all tasks share is not a question
        return Finding("splits", "failed", f"train and test share the question {min(shared)[:60]!r}{fix}")
    if not questions["train"]:
        return Finding("splits", "not checked", "the tasks of a game have no questions")
    return Finding("splits", "ok", "the checked tasks share no question")


# -------- Checks of episodes: repeatable, private, rewards in range, stored exactly, symmetric roles


async def same_states(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Check whether the same seed and the same messages give equal episodes."""
    name = "determinism"
    for task in tasks[:4]:
        for respond in (scripted(environment, task), always("?")):
            first, second = [
                await drive_or_error(environment, task, agents, respond, seed=5) for _ in range(2)
            ]
            if first != second:
                return Finding(
                    name,
                    "failed",
                    f"task {task.id}, differs between two episodes with the same seed and messages",
                )
    return Finding(name, "ok", "the same seed and messages give the same episode")


async def private_views(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Check whether observing an episode leaves its state unchanged, and whether observations contain private strings of other agents.

    The check runs at the start and after each step. Actions are written by the scripted expert or are meaningless. If an agent writes
    a private string in its message, the string is considered public from then on.
    """
    name = "private views"
    nonsense = always("?")
    speakers = [(task, nonsense) for task in tasks]
    if offers(environment, Scripted):
        speakers += [(task, scripted(environment, task)) for task in tasks]
    for task, respond in speakers:
        secrets: list[tuple[str, str]] = []
        if offers(environment, Private):
            for owner in agents:
                own: object = call_user_code("private", SECONDS, environment.private, task, owner, agents)
                if isinstance(own, str) or not isinstance(own, Sequence):
                    raise Unfit(f"`private` returns {own!r:.60}. Return a tuple of strings.")
                if wrong := [each for each in own if not isinstance(each, str) or not each]:
                    raise Unfit(
                        f"`private` returns the secret {wrong[0]!r:.60}. Return only non-empty strings."
                    )
                secrets += [(owner, each) for each in own]
        moves = dict.fromkeys(agents, 0)
        state = await DrivenState.open(environment, task, agents, 0)
        try:
            for steps in range(LONGEST):
                when = f"after step {steps}" if steps else "at the start"
                views = {agent: state.observe(agent) for agent in agents}
                if {agent: state.observe(agent) for agent in reversed(agents)} != views:
                    return Finding(
                        name,
                        "failed",
                        f"an agent's observation of task {task.id} {when} depends on who observed before",
                    )
                for (owner, secret), (agent, view) in itertools.product(secrets, views.items()):
                    if agent != owner and secret in view:
                        # Part of the view on both sides of the secret.
                        at = view.index(secret)
                        shown = view[max(0, at - 60) : at + len(secret) + 60]
                        return Finding(
                            name,
                            "failed",
                            f"'{agent}' observes a secret of '{owner}' in task {task.id} {when}: {secret[:60]!r} in {shown[:200]!r}",
                        )
                movers = state.movers()
                if not movers:
                    break
                actions = {agent: respond(agent, views[agent], moves[agent]) for agent in movers}
                await state.step(actions)
                moves |= {agent: moves[agent] + 1 for agent in movers}
                secrets = [each for each in secrets if not any(each[1] in text for text in actions.values())]
        except EpisodeError:
            continue  # the checks "rewards" and "records" report failed episodes
        finally:
            await state.close()
    note = "" if offers(environment, Private) else "; it declares no secrets (`Private`) to look for"
    return Finding(name, "ok", f"observing changes nothing{note}")


async def rewards_in_range(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Check whether all rewards are finite, within the declared range, and given only to agents of the team."""
    low, high = environment.reward_range
    name, failed = "rewards", 0
    slack = 1e-9 * max(1.0, abs(low), abs(high))
    for task in tasks[:4]:
        for respond in (scripted(environment, task), *map(always, NOTHING)):
            episode = await drive_or_error(environment, task, agents, respond)
            if isinstance(episode, str):
                failed += 1
                continue
            for agent, total in episode.returns.items():
                if agent not in agents:
                    return Finding(
                        name, "failed", f"task {task.id} rewards '{agent}', which is not in the team"
                    )
                if not math.isfinite(total) or not low - slack <= total <= high + slack:
                    return Finding(
                        name, "failed", f"task {task.id} gives a return of {total}, outside {[low, high]}"
                    )
            success = episode.outcome.success
            if success is not None and not 0.0 <= success <= 1.0:
                return Finding(name, "failed", f"task {task.id} reports success {success}, outside [0, 1]")
    note = f"; {failed} messages made an episode fail" if failed else ""
    return Finding(name, "ok", f"finite and within {[low, high]} for every message{note}")


async def outcomes_kept(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Check whether outcomes stay the same when they are written and read back."""
    for task in tasks[:4]:
        driven = await drive_or_error(environment, task, agents, scripted(environment, task))
        if isinstance(driven, str):
            return Finding("records", "failed", f"task {task.id}, driven by its script, fails: {driven}")
        o = driven.outcome
        episode = Episode(task, 0, tuple(agents), (), dict(o.rewards), o.success, dict(o.info), o.truncated)
        try:
            read = load_episode(json.loads(dump_episode(episode)))
        except DataError as error:
            return Finding("records", "failed", str(error))
        if read != episode:
            return Finding(
                "records", "failed", f"the outcome of task {task.id} changes when it is written and read"
            )
    return Finding("records", "ok", "outcomes can be written and read again")


async def roles_alike(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Check whether exchanging the messages of two symmetric roles also exchanges their rewards."""
    name = "symmetry"
    if offers(environment, TeamMoves):
        note = (
            "all agents share one role, so they have the same observations and rewards. Set `workflow.name: chain` so that several agents work on each move; "
            "`play` and `tool_use` train one agent"
        )
        return Finding(name, "not checked", note)
    if len(agents) < 2 and has_comparable_answers(environment):
        agents = ("agent_0", "agent_1")
        if not accepts(environment, agents):
            return Finding(name, "not checked", "it has one agent")
    alike = report_of(environment).symmetric
    alike = has_comparable_answers(environment) if alike is None else alike
    if not alike or len(agents) < 2:
        return Finding(name, "not checked", "it does not declare symmetric roles (`symmetric`)")
    for task in tasks[:4]:
        good, bad = scripted(environment, task, "solver"), always("?")
        one, other = agents[0], agents[1]
        straight = await drive_or_error(environment, task, agents, by_agent({one: good}, bad))
        crossed = await drive_or_error(environment, task, agents, by_agent({other: good}, bad))
        if isinstance(straight, str) or isinstance(crossed, str):
            continue
        here = (straight.returns[one], straight.returns[other])
        if here != (crossed.returns[other], crossed.returns[one]):
            return Finding(
                name,
                "failed",
                f"in task {task.id} exchanging the messages of two roles does not exchange their rewards",
            )
    return Finding(name, "ok", "exchanging the messages of two roles exchanges their rewards")


# -------- Check that only a correct answer gets the full reward


async def gold_is_rewarded(environment: Environment, chosen: Mapping[Split, Sequence[Task]]) -> list[Finding]:
    """Check whether the solution of the scripted expert receives the maximum reward, and other answers do not."""
    names = ("solver",)
    solvable = has_comparable_answers(environment) and offers(environment, Scripted)
    if offers(environment, Teachable) and environment.teacher is not None:
        why = "`environment.teacher` provides its demonstrations, which may fit only one team's roles or be incorrect"
        return [Finding("gold", "not checked", why), Finding("cheating", "not checked", why)]
    if not solvable or not accepts(environment, names):
        why = "it has no script that solves a question alone"
        return [Finding("gold", "not checked", why), Finding("cheating", "not checked", why)]
    high = environment.reward_range[1]
    for task in (*chosen["train"], *chosen["test"]):
        episode = await drive_or_error(environment, task, names, scripted(environment, task))
        if isinstance(episode, str):
            return [Finding("gold", "failed", f"task {task.id}, solved by the script, fails: {episode}")]
        if episode.returns["solver"] != high or episode.outcome.success not in (None, 1.0):
            result = f"{episode.returns} (success {episode.outcome.success})"
            return [
                Finding(
                    "gold",
                    "failed",
                    f"task {task.id}, solved by the script, has the reward {result}, not {high}",
                )
            ]
    found = [Finding("gold", "ok", "the script's solution receives the full reward")]
    for task in chosen["train"]:
        # Nonsense, the question, and solutions of other tasks with another answer.
        tasks = chosen["train"]
        assert offers(environment, Answerable), "other environments have no solutions to try"
        gold = call_user_code(
            "extract", SECONDS, environment.extract, scripted(environment, task)("solver", task.question, 0)
        )
        solutions = [scripted(environment, other)("solver", other.question, 0) for other in tasks]
        for text in [
            text
            for text in (*NOTHING, task.question, *solutions)
            if call_user_code("extract", SECONDS, environment.extract, text) != gold
        ]:
            episode = await drive_or_error(environment, task, names, always(text))
            if not isinstance(episode, str) and (
                episode.returns["solver"] >= high or episode.outcome.success == 1.0
            ):
                return [
                    *found,
                    Finding("cheating", "failed", f"task {task.id} gives the full reward for {text[:60]!r}"),
                ]
    return [
        *found,
        Finding(
            "cheating", "ok", "nonsense, the question itself and other tasks' solutions receive no reward"
        ),
    ]
