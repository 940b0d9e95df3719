"""Determine the lengths of prompts and completions in a step by rolling out episodes with a mock engine.

The mock engine immediately returns completions with the maximum number of tokens. In games, it makes the moves of the environment's
scripted expert; in other environments, it repeats a word. Environments that need servers or endpoints are not started. For these
environments, the plan assumes that every agent answers its first prompt once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment, Scripted, has_comparable_answers, offers, report_of
from kapelle.errors import ConfigError, KapelleError
from kapelle.models.renderer import ChatRenderer
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import make_rollout_setup
from kapelle.rows import agent_renderer
from kapelle.runtime.event_loop import run_async
from kapelle.settings.schema import RunConfig
from kapelle.team import Team
from kapelle.training.selection import training_tasks
from kapelle.workflow import opening

PLAYED = 8
"""Maximum number of tasks that are rolled out. For each turn, the longest prompt is used."""
WORD = " the"
_ARRIVING = 20
"""Number of iterations of the event loop after which all requests of a moment have arrived."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """The lengths of the prompt and the completion of one turn."""

    policy: str
    agent: str
    moment: int
    """Number of earlier turns in the episode. Turns with the same number are sampled together."""
    prompt: int
    """Number of tokens of the prompt."""
    answer: int
    """Maximum number of tokens of the completion."""
    tempered: bool
    """Whether the temperature is not 1."""
    continues: bool = False
    """Whether the prompt starts with the previous prompt and completion of the agent."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The turns of one episode, and the number of episodes in a step."""

    turns: tuple[PlannedTurn, ...]
    tasks: int
    group: int
    """Number of episodes per task."""
    played: bool
    """Whether the environment was started. If the environment was not started, later turns are unknown."""

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a prompt together with its completion."""
        return max((turn.prompt + turn.answer for turn in self.turns), default=0)


class _PlannedAgent(ScriptedEngine):
    """A mock engine that returns completions of the maximum length and records the turns."""

    def __init__(self, team: Team, environment: Environment, renderers: Mapping[str, ChatRenderer]) -> None:
        super().__init__(dict.fromkeys(team.policies, lambda _: ""), renderers)
        moves = offers(environment, Scripted) and not has_comparable_answers(environment)
        self._script = environment if moves and offers(environment, Scripted) else None
        self.turns: list[PlannedTurn] = []
        self._read: dict[str, tuple[int, ...]] = {}
        """Mapping from each agent to the tokens of its last prompt and completion."""

    async def generate(self, request: Request) -> Completion:
        """Return a completion with the maximum number of tokens."""
        moment = len(self.turns)
        for _ in range(_ARRIVING):
            await asyncio.sleep(0)
        most, sampling = request.sampling.max_tokens, request.sampling
        words = self.renderer(request.policy).completion(WORD * 16)[:-1]
        if self._script is not None:
            text = self._script.script(request.agent, request.task, request.messages, request.seed)
        else:
            text = WORD * -(-most * 16 // max(1, len(words)))
        ids = (words or (0,)) * (1 + most // max(1, len(words)))
        before, prompt = self._read.get(request.agent), request.prompt_ids
        continues = before is not None and prompt[: len(before)] == before
        self._read[request.agent] = (*prompt, *ids[:most])
        who = request.policy, request.agent
        self.turns.append(PlannedTurn(*who, moment, len(prompt), most, sampling.temperature != 1, continues))
        return Completion(ids[:most], (0.0,) * most, "stop", text, version=0, weights_hash="plan")


def workload(config: RunConfig, team: Team, renderers: Mapping[str, ChatRenderer], group: int) -> Workload:
    """Return the workload of a step, given the renderers by base model path and the number of episodes per task (`group`).

    Raises ConfigError if no episode has a turn.
    """
    by_policy = {
        name: renderers[team.bases[policy.base]]
        for name, policy in team.policies.items()
        if not policy.endpoint
    }
    tasks = config.training.tasks_per_step
    alive = report_of(config.environment).alive
    if alive:
        return Workload(_openings(config, team, by_policy), tasks, group, played=False)
    episodes: list[list[PlannedTurn]] = []
    reason = ""
    for task in training_tasks(config.environment, config, 1)[:PLAYED]:
        mock = _PlannedAgent(team, config.environment, by_policy)
        setup = replace(make_rollout_setup(config, team, mock), rewarded=False)  # without requests to judges
        try:
            (found,) = run_async(lambda setup=setup, task=task: rollout(setup, [task], 1, config.seed))  # type: ignore[misc]
            reason = found.episodes[0].error or reason
        except KapelleError as error:
            reason = str(error)
        if mock.turns:
            episodes.append(mock.turns)
    if not episodes:
        raise ConfigError(
            f"No episode of '{config.environment.name}' has a turn: {reason or 'every episode ends at once'}. Run `kapelle validate` to check "
            "the environment."
        )
    return Workload(_longest(episodes), tasks, group, played=True)


def _longest(episodes: Sequence[Sequence[PlannedTurn]]) -> tuple[PlannedTurn, ...]:
    """Return the turns of the longest episode.

    Each turn has the longest prompt that the same turn of its agent has in any episode.
    """
    most = max(episodes, key=len)
    prompts: dict[tuple[str, int], int] = {}
    for episode in episodes:
        counts: dict[str, int] = {}
        for turn in episode:
            key = turn.agent, counts.setdefault(turn.agent, 0)
            counts[turn.agent] += 1
            prompts[key] = max(prompts.get(key, 0), turn.prompt)
    counts = {}
    longest = []
    for turn in most:
        key = turn.agent, counts.setdefault(turn.agent, 0)
        counts[turn.agent] += 1
        longest.append(replace(turn, prompt=prompts[key]))
    return tuple(longest)


def _openings(
    config: RunConfig, team: Team, renderers: Mapping[str, ChatRenderer]
) -> tuple[PlannedTurn, ...]:
    """Return one turn for each agent, with its first prompt.

    If tasks have no text, the prompt fills the context of the agent.
    """
    found = []
    for moment, agent in enumerate(team.agents):
        policy = team.policy(agent.name)
        if policy.name not in renderers:
            continue
        sampling, renderer = agent.sampling, agent_renderer(agent, renderers[policy.name])
        tasks = training_tasks(config.environment, config, 1)[:PLAYED]
        unknown = not any(task.question for task in tasks)  # an external program writes the prompts
        lengths = [max(1, renderer.context - sampling.max_tokens) if unknown else 1]
        lengths += [len(renderer.start(opening(agent, task))) for task in tasks]
        found.append(
            PlannedTurn(
                policy.name, agent.name, moment, max(lengths), sampling.max_tokens, sampling.temperature != 1
            )
        )
    return tuple(found)
