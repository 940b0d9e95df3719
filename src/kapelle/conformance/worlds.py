"""Check worlds: repeatable, discreet, rewards in range, stored without loss, fair to seats."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from kapelle.conformance.driving import NOTHING, accepts, always, attempt, by_agent, scripted
from kapelle.conformance.finding import Finding
from kapelle.environment import Environment, Private, Symmetric, asks_questions, offers
from kapelle.errors import DataError
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.types import Episode, Task


async def same_worlds(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Return whether one seed and the same texts give the same episode twice."""
    name = "determinism"
    for task in tasks[:4]:
        for say in (scripted(environment, task), always("?")):
            first, second = [await attempt(environment, task, agents, say, seed=5) for _ in range(2)]
            if first != second:
                return Finding(
                    name, "failed", f"task {task.id}, played twice with one seed and the same texts, differs"
                )
    return Finding(name, "ok", "one seed and the same texts give the same episode")


async def private_views(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Return whether looking changes nothing and secrets stay with the agents that own them."""
    name = "private views"
    for task in tasks:
        world = environment.start(task, agents, 0)
        try:
            views = {agent: world.observe(agent) for agent in agents}
            if {agent: world.observe(agent) for agent in reversed(agents)} != views:
                return Finding(
                    name, "failed", f"what an agent sees of task {task.id} depends on who looked before"
                )
            if offers(environment, Private):
                for agent in agents:
                    for secret in environment.private(task, agent, agents):
                        leaks = [other for other in agents if other != agent and secret in views[other]]
                        if leaks:
                            return Finding(
                                name, "failed", f"'{leaks[0]}' sees what only '{agent}' may: {secret[:60]!r}"
                            )
        finally:
            await world.close()
    note = "" if offers(environment, Private) else "; it names no secrets (`private`) to look for"
    return Finding(name, "ok", f"looking changes nothing{note}")


async def rewards_in_range(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Return whether every text pays finite numbers in the declared range to members of the team."""
    low, high = environment.reward_range
    name, refused = "rewards", 0
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        return Finding(
            name, "failed", f"`reward_range` is {(low, high)}; declare two finite numbers, the smaller first"
        )
    slack = 1e-9 * max(1.0, abs(low), abs(high))
    for task in tasks[:4]:
        for say in (scripted(environment, task), *map(always, NOTHING)):
            played = await attempt(environment, task, agents, say)
            if isinstance(played, str):
                refused += 1
                continue
            for agent, total in played.paid.items():
                if agent not in agents:
                    return Finding(name, "failed", f"task {task.id} pays '{agent}', who is not in the team")
                if not math.isfinite(total) or not low - slack <= total <= high + slack:
                    return Finding(name, "failed", f"task {task.id} pays {total}, outside {[low, high]}")
            success = played.outcome.success
            if success is not None and not 0.0 <= success <= 1.0:
                return Finding(name, "failed", f"task {task.id} reports success {success}, outside [0, 1]")
    note = f"; {refused} texts made an episode fail" if refused else ""
    return Finding(name, "ok", f"finite and within {[low, high]} for every text{note}")


async def outcomes_kept(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Return whether outcomes are the same after they were written and read again."""
    for task in tasks[:4]:
        played = await attempt(environment, task, agents, scripted(environment, task))
        if isinstance(played, str):
            return Finding("records", "failed", f"task {task.id}, played by its script, fails: {played}")
        o = played.outcome
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


async def seats_alike(environment: Environment, tasks: Sequence[Task], agents: Sequence[str]) -> Finding:
    """Return whether exchanging the texts of two seats exchanges what they earn, where seats are alike."""
    name = "seats"
    if len(agents) < 2 and asks_questions(environment):
        agents = ("agent_0", "agent_1")
        if not accepts(environment, agents):
            return Finding(name, "not checked", "it is played alone")
    alike = environment.symmetric if offers(environment, Symmetric) else asks_questions(environment)
    if not alike or len(agents) < 2:
        return Finding(name, "not checked", "it does not declare its seats alike (`symmetric`)")
    for task in tasks[:4]:
        good, bad = scripted(environment, task, "solver"), always("?")
        one, other = agents[0], agents[1]
        straight = await attempt(environment, task, agents, by_agent({one: good}, bad))
        crossed = await attempt(environment, task, agents, by_agent({other: good}, bad))
        if isinstance(straight, str) or isinstance(crossed, str):
            continue
        here = (straight.paid[one], straight.paid[other])
        if here != (crossed.paid[other], crossed.paid[one]):
            return Finding(
                name, "failed", f"in task {task.id} exchanging the texts of two seats changes what they earn"
            )
    return Finding(name, "ok", "exchanging the texts of two seats exchanges what they earn")
