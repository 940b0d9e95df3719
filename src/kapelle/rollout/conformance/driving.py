"""Roll out episodes with given messages instead of a model, and check every result of the environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from kapelle.environment import Environment, Outcome, RemoteState, Scripted, offers
from kapelle.errors import ConfigError, DataError, EpisodeError
from kapelle.rollout.bounded_states import BoundedState, BrokenContract, open_state
from kapelle.rollout.outcomes import checked_rewards, pending_cancellations, plain_outcome, text
from kapelle.runtime.deadlines import DeadlineExceeded, Patience
from kapelle.runtime.foreign_code import Unfit, call_user_code, reason
from kapelle.types import Message, Task

T = TypeVar("T")

LONGEST = 2_000
"""Maximum number of steps of an episode. A longer episode is reported as a fault."""
SECONDS = 60.0
"""Maximum time limit in seconds of a call during checks, if `environment.timeout` is longer."""

NOTHING = (
    "",
    " \n",
    "?",
    "I do not know.",
    "Correct! Reward: 1.0",
    "null",
    "nan",
    "\\boxed{}",
    "####",
    "🙂" * 40,
    "9" * 5_000,
)
"""Messages that contain no answer. Their reward must be within the declared range and less than the maximum."""

Speaker = Callable[[str, str, int], str]
"""Function of an agent, its observation and the number of its move that returns the text of the move."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of an environment."""

    name: str
    status: Literal["ok", "failed", "not checked"]
    detail: str


@dataclass(frozen=True, slots=True)
class DrivenEpisode:
    """The record of one episode that was rolled out with given messages."""

    seen: tuple[tuple[str, str], ...]
    """Pairs of an agent and its observation, in the order in which they were observed."""
    returns: Mapping[str, float]
    """The return of each agent."""
    outcome: Outcome


def patience(environment: Environment) -> Patience:
    """Return the time limits of calls during checks."""
    allowed = getattr(environment, "timeout", SECONDS)
    seconds = float(allowed) if isinstance(allowed, int | float) else SECONDS
    return Patience(environment=min(SECONDS, seconds), grader=min(SECONDS, seconds))


def accepts(environment: Environment, names: Sequence[str]) -> bool:
    """Return whether an environment supports a team of agents with these names. Raises an error if data is missing."""
    try:
        call_user_code("check", SECONDS, environment.check, names)
    except Unfit:
        raise
    except ConfigError:
        return False
    return True


class DrivenState:
    """An episode state with time limits for all calls and checks of all results. Invalid results raise Unfit."""

    def __init__(self, state: BoundedState | RemoteState, task: Task, agents: Sequence[str]) -> None:
        self._state, self._task, self._agents = state, task, agents

    @classmethod
    async def open(
        cls, environment: Environment, task: Task, agents: Sequence[str], seed: int
    ) -> DrivenState:
        """Open the state of one episode."""
        made = open_state(environment, task, agents, seed, patience(environment))
        return cls(await _awaited("start", task, made), task, agents)

    def observe(self, agent: str) -> str:
        """Return the observation of an agent."""
        return self._now("observe", lambda: text(self._state.observe(agent), f"`observe('{agent}')`"))

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move."""
        found: object = self._now("movers", self._state.movers)
        if isinstance(found, str) or not isinstance(found, Sequence):
            raise Unfit(
                f"`movers` returns {found!r:.60}. Return a tuple of agents' names, which is empty at the end of the episode."
            )
        for name in found:
            if name not in self._agents:
                raise Unfit(f"`movers` returns {name!r:.60}, which is not in the team {list(self._agents)}.")
        return tuple(found)

    async def step(self, actions: Mapping[str, str]) -> dict[str, float]:
        """Apply the actions of agents, and return the rewards."""
        rewards = await _awaited("step", self._task, self._state.step(dict(actions), None))
        return self._now("step", lambda: checked_rewards(rewards, self._agents))

    async def outcome(self) -> Outcome:
        """Return the outcome of the episode."""
        found: object = await _awaited("outcome", self._task, self._state.outcome())
        if not isinstance(found, Outcome):
            raise Unfit(
                f"`outcome` returns {found!r:.60}, a {type(found).__name__}. Return a kapelle.Outcome."
            )
        for part in ("rewards", "roles", "info"):
            if not isinstance(getattr(found, part), Mapping):
                raise Unfit(
                    f"`outcome` returns an Outcome whose `{part}` is {getattr(found, part)!r:.60}, which is not a mapping."
                )
        success: object = found.success
        if success is not None and not (isinstance(success, int | float) or hasattr(success, "__float__")):
            raise Unfit(f"`outcome` reports success {success!r:.60}. Return a number in [0, 1] or None.")
        return self._now("outcome", lambda: _plain(found, self._agents))

    async def close(self) -> None:
        """Close the episode state."""
        await _awaited("close", self._task, self._state.close())

    def _now(self, method: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except (Unfit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - user code
            raise Unfit(_blame(method, self._task, error)) from None


async def _awaited(method: str, task: Task, work: Awaitable[T]) -> T:
    try:
        return await work
    except (Unfit, KeyboardInterrupt, ConfigError, DataError):
        raise
    except EpisodeError as error:
        if isinstance(error, BrokenContract):
            raise Unfit(_blame(method, task, error)) from None
        raise
    except BaseException as error:
        # A cancellation from outside is not the environment's error.
        if isinstance(error, asyncio.CancelledError) and pending_cancellations():
            raise
        raise Unfit(_blame(method, task, error)) from None


def _blame(method: str, task: Task, error: BaseException) -> str:
    message = reason(error).removesuffix(".")
    if isinstance(error, EpisodeError | DeadlineExceeded):
        return f"{message} (task {task.id})."
    return f"`{method}` raises {message} in task {task.id}."


def _plain(outcome: Outcome, agents: Sequence[str]) -> Outcome:
    rewards = checked_rewards(outcome.rewards, agents)
    # A success outside [0, 1] is reported by another check.
    kept = None if outcome.success is None else float(outcome.success)
    return Outcome(
        rewards,
        kept,
        plain_outcome(Outcome({}, None, outcome.info, outcome.truncated, outcome.roles), {}).info,
        bool(outcome.truncated),
        outcome.roles,
    )


async def drive(
    environment: Environment, task: Task, agents: Sequence[str], say: Speaker, seed: int = 0
) -> DrivenEpisode:
    """Roll out one episode with the actions that `say` returns.

    Raises EpisodeError if the episode fails or does not end.

    Raises Unfit if a method is missing, raises an error, or returns a value of an invalid type.
    """
    state = await DrivenState.open(environment, task, agents, seed)
    seen: list[tuple[str, str]] = []
    totals = dict.fromkeys(agents, 0.0)
    moves = dict.fromkeys(agents, 0)
    try:
        for _ in range(LONGEST):
            movers = state.movers()
            if not movers:
                break
            views = [(agent, state.observe(agent)) for agent in movers]
            seen += views
            actions = {agent: say(agent, view, moves[agent]) for agent, view in views}
            for agent, reward in (await state.step(actions)).items():
                totals[agent] = totals.get(agent, 0.0) + reward
            for agent in movers:
                moves[agent] += 1
        else:
            raise Unfit(f"the episode of task {task.id} has not ended after {LONGEST:,} steps.")
        outcome = await state.outcome()
    finally:
        await state.close()
    for agent, reward in outcome.rewards.items():
        totals[agent] = totals.get(agent, 0.0) + reward
    return DrivenEpisode(tuple(seen), totals, outcome)


async def drive_or_error(
    environment: Environment, task: Task, agents: Sequence[str], say: Speaker, seed: int = 0
) -> DrivenEpisode | str:
    """Roll out one episode, or return the message of its EpisodeError. Raises Unfit for other errors."""
    try:
        return await drive(environment, task, agents, say, seed)
    except EpisodeError as error:
        return str(error)


def always(text: str) -> Speaker:
    """Return a function that returns the same message for every move."""
    return lambda agent, view, move: text


def by_agent(speakers: Mapping[str, Speaker], otherwise: Speaker) -> Speaker:
    """Return a function that uses `speakers` for the agents in this mapping, and `otherwise` for all other agents."""
    return lambda agent, view, move: speakers.get(agent, otherwise)(agent, view, move)


def scripted(environment: Environment, task: Task, role: str | None = None) -> Speaker:
    """Return a function that follows the scripted expert in each agent's own role, or in `role` if it is given.

    Without a scripted expert, every message is `?`.
    """
    if not offers(environment, Scripted):
        return always("?")

    def respond(agent: str, view: str, move: int) -> str:
        text: object = call_user_code(
            "script", SECONDS, environment.script, role or agent, task, [Message("user", view)], move
        )
        if not isinstance(text, str):
            raise Unfit(f"`script` returns {text!r:.60}, a {type(text).__name__}. Return a string.")
        return text

    return respond
