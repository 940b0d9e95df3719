"""Playing a world by hand: texts in place of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kapelle.environment import Environment, Outcome, Scripted, offers
from kapelle.errors import ConfigError, EpisodeError
from kapelle.types import Message, Task

LONGEST = 2_000
"""Most steps of an episode; one that has not ended then is a fault."""

NOTHING = (
    "",
    " \n",
    "?",
    "I do not know.",
    "Correct! Reward: 1.0",
    "null",
    "\\boxed{}",
    "####",
    "🙂" * 40,
    "9" * 5_000,
)
"""Texts without an answer; the reward for them must be in range, and less than the maximum."""

Speaker = Callable[[str, str, int], str]
"""Returns an agent's text: (agent, observation, number of its move) → text."""


@dataclass(frozen=True, slots=True)
class Played:
    """One episode, driven by hand."""

    seen: tuple[tuple[str, str], ...]
    """(agent, observation) in order."""
    paid: Mapping[str, float]
    """What each agent earned in total."""
    outcome: Outcome


def accepts(environment: Environment, names: Sequence[str]) -> bool:
    """Return whether an environment takes a team of these names; data that are missing still raise."""
    try:
        environment.check(names)
    except ConfigError:
        return False
    return True


async def drive(
    environment: Environment, task: Task, agents: Sequence[str], say: Speaker, seed: int = 0
) -> Played:
    """Play one episode in which `say` speaks for every agent; EpisodeError when it does not end."""
    world = environment.start(task, agents, seed)
    seen: list[tuple[str, str]] = []
    paid = dict.fromkeys(agents, 0.0)
    moves = dict.fromkeys(agents, 0)
    try:
        for _ in range(LONGEST):
            movers = world.movers()
            if not movers:
                break
            views = [(agent, world.observe(agent)) for agent in movers]
            seen += views
            actions = {agent: say(agent, view, moves[agent]) for agent, view in views}
            for agent, reward in (await world.step(actions)).items():
                paid[agent] = paid.get(agent, 0.0) + reward
            for agent in movers:
                moves[agent] += 1
        else:
            raise EpisodeError(f"The episode of task {task.id} has not ended after {LONGEST} steps.")
        outcome = world.outcome()
    finally:
        await world.close()
    for agent, reward in outcome.rewards.items():
        paid[agent] = paid.get(agent, 0.0) + reward
    return Played(tuple(seen), paid, outcome)


async def attempt(
    environment: Environment, task: Task, agents: Sequence[str], say: Speaker, seed: int = 0
) -> Played | str:
    """Play, or return the text of the EpisodeError that ended it; anything else is the environment's fault."""
    try:
        return await drive(environment, task, agents, say, seed)
    except EpisodeError as error:
        return str(error)


def in_words(played: Played | str) -> str:
    """Return what an episode paid, or why it failed, for a finding."""
    return played if isinstance(played, str) else f"{played.paid} (success {played.outcome.success})"


def always(text: str) -> Speaker:
    """Return a speaker that always gives the same text."""
    return lambda agent, view, move: text


def by_agent(speakers: Mapping[str, Speaker], otherwise: Speaker) -> Speaker:
    """Return a speaker that uses the given ones for some agents and `otherwise` for all others."""
    return lambda agent, view, move: speakers.get(agent, otherwise)(agent, view, move)


def scripted(environment: Environment, task: Task, role: str | None = None) -> Speaker:
    """Return a speaker that follows the environment's script, in each agent's own role or in `role`; `?` without one."""
    if not offers(environment, Scripted):
        return always("?")
    return lambda agent, view, move: environment.script(role or agent, task, [Message("user", view)], move)
