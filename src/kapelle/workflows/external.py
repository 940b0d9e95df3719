"""The workflow `external`: an external program calls the agents, and the workflow returns their completions to the program.

The program manages the conversations. If a call continues an earlier completion of an agent, the agent reads this completion as the
exact tokens that were sampled (`Scene.converse`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.environment import DrivenByPrograms, Environment, offers
from kapelle.errors import ConfigError, ContextError, EpisodeError, RequestRefused
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.types import Constraint, Json, Message
from kapelle.workflow import Continued, Scene
from kapelle.workflows.callers import Callers


class ExternalWorkflow(Settings):
    """A workflow in which the program of `environment: {name: external}` decides which agent acts when."""

    name: Literal["external"] = "external"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment does not start an external program."""
        if not offers(environment, DrivenByPrograms):
            raise ConfigError(
                f"`workflow.name: external` needs an external program, but `{environment.name}` has none. Set "
                "`environment.name: external` (or `coding_agent`, `verifiers_v1`), or choose another workflow."
            )

    async def run(self, scene: Scene) -> None:
        """Run one episode, in which calls are answered concurrently."""
        pending: dict[int, asyncio.Task[None]] = {}
        callers = Callers()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await scene.step({})
                    movers = scene.movers()
                    for agent in movers:
                        news = json.loads(scene.observe(agent))
                        for number, call in news["calls"]:
                            pending[number] = tasks.create_task(_answer(scene, callers, agent, number, call))
                        for number in news["gone"]:
                            pending.pop(
                                number
                            ).cancel()  # the client has disconnected: the completion does not become a turn of the episode
                    if not movers:
                        break
                for task in pending.values():
                    task.cancel()
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None


async def _answer(scene: Scene, callers: Callers, agent: str, number: int, call: Mapping[str, Json]) -> None:
    """Generate an agent's completion for a call, and return it to the program."""
    answer: dict[str, Json]
    try:
        # The program's sampling temperature is ignored in training.
        messages = tuple(
            Message(role, content, structured=structured) for role, content, structured in call["messages"]
        )
        request = Continued(
            messages,
            call["after"],
            call["max_tokens"],
            tuple(call["stop"]),
            None if call["constraint"] is None else Constraint(*call["constraint"]),
            callers.find(agent, messages, call["after"]),
        )
        turn = (await scene.converse({agent: request}))[agent]
        callers.record(turn, messages, call["after"])
        answer = {
            "turn": turn.index,
            "prompt_tokens": len(turn.prompt_ids),
            "ids": turn.completion_ids,
            "logprobs": turn.logprobs,
            "finish_reason": turn.finish_reason,
            "text": turn.text,
            "version": turn.version,
            "weights_hash": turn.weights_hash,
            "usage": turn.usage,
        }
    except ContextError as error:
        answer = {"too_long": str(error)}  # the program can continue with a shorter request
    except RequestRefused as error:
        answer = {"refused": str(error)}  # the program can continue with another request
    except EpisodeError as error:
        await scene.step({agent: json.dumps([number, {"failed": str(error)}])})
        raise
    await scene.step({agent: json.dumps([number, answer])})
