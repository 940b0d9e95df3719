"""A scripted rollout for golden transcripts: agents are functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kapelle.engines.rollout.protocol import Request, WritingRenderer
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment, Scripted
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, Task
from kapelle.workflow import Workflow

Say = Callable[[Request], str]
TASK = Task("train-0", "47+85", {"answer": 132})


def team_of(*agents: Agent | str) -> Team:
    """A team of frozen agents, each with a policy of its own name."""
    seats = tuple(Agent(agent) if isinstance(agent, str) else agent for agent in agents)
    policies = {seat.name: Policy(seat.name, base="", trained=False) for seat in seats}
    return Team(seats, policies, {seat.name: seat.name for seat in seats})


def lines(*texts: str) -> Say:
    """Say these texts, one per turn."""
    return lambda request: texts[sum(m.role == "assistant" for m in request.messages)]


def expert(environment: Scripted) -> Say:
    """Say what the environment's script says."""
    return lambda r: environment.script(r.agent, r.task, r.messages, r.seed)


async def play(
    environment: Environment,
    workflow: Workflow,
    agents: Sequence[Agent | str],
    scripts: Mapping[str, Say],
    task: Task,
    samples: int = 1,
    seed: int = 0,
    renderer: WritingRenderer | None = None,
) -> tuple[Episode, ...]:
    """Play one task and return its episodes, with a renderer for all agents if one is given."""
    team = team_of(*agents)
    workflow.check(team.agents, environment)
    renderers = {} if renderer is None else dict.fromkeys(scripts, renderer)
    stage = RolloutSetup(team, environment, workflow, ScriptedEngine(scripts, renderers))
    return (await rollout(stage, [task], samples, seed))[0].episodes


def transcript(episode: Episode) -> list[str]:
    """One line per turn: how many turns it had seen, what it heard, who spoke, what it said."""
    return [
        f"{turn.index} seen={turn.completed_before} {' | '.join(m.content for m in turn.new_messages)} -> {turn.agent}: {turn.text}"
        for turn in episode.turns
    ]
