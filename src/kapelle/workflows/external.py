"""An outside program speaks with the agents: this workflow hands its calls to them, and their answers back.

Conversations are the program's. Where one continues an answer that an agent gave before, the agent reads that answer as the
very tokens that it sampled (`Scene.converse`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.environment import Environment, PlayedFromOutside, offers
from kapelle.errors import ConfigError, ContextError
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.types import Constraint, Json, Message
from kapelle.workflow import Continued, Scene
from kapelle.workflows.callers import Callers


class ExternalWorkflow(Settings):
    """The program of `environment: {name: external}` decides who speaks when."""

    name: Literal["external"] = "external"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for an environment that no program plays."""
        if not offers(environment, PlayedFromOutside):
            raise ConfigError(
                f"`workflow.name: external` waits for an outside program, and `{environment.name}` has none. Set "
                "`environment.name: external` (or `coding_agent`), or another workflow."
            )

    async def run(self, scene: Scene) -> None:
        """Play one episode: every call is answered as soon as it is sampled, whatever else is under way."""
        answering: dict[int, asyncio.Task[None]] = {}
        callers = Callers()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await scene.step({})
                    movers = scene.movers()
                    for agent in movers:
                        news = json.loads(scene.observe(agent))
                        for number, asked in news["calls"]:
                            answering[number] = tasks.create_task(
                                _answered(scene, callers, agent, number, asked)
                            )
                        for number in news["gone"]:
                            answering.pop(number).cancel()  # nobody hears it: it is no turn of the episode
                    if not movers:
                        break
                for task in answering.values():
                    task.cancel()
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None


async def _answered(
    scene: Scene, callers: Callers, agent: str, number: int, asked: Mapping[str, Json]
) -> None:
    """Let an agent answer a call."""
    said: dict[str, Json]
    try:
        # What an agent is asked; what the program says of temperatures does not count in training.
        messages = tuple(
            Message(role, content, structured=structured) for role, content, structured in asked["messages"]
        )
        form = None if asked["constraint"] is None else Constraint(*asked["constraint"])
        limits = asked["max_tokens"], tuple(asked["stop"]), form
        caller = callers.find(agent, messages, asked["after"])
        turn = (await scene.converse({agent: Continued(messages, asked["after"], *limits, caller)}))[agent]
        callers.record(turn, messages, asked["after"])
        said = {
            "turn": turn.index,
            "prompt_tokens": len(turn.prompt_ids),
            "ids": turn.completion_ids,
            "logprobs": turn.logprobs,
            "finish_reason": turn.finish_reason,
            "text": turn.text,
            "version": turn.version,
            "weights_hash": turn.weights_hash,
        }
    except ContextError as error:
        said = {"too_long": str(error)}  # its program may go on with less
    await scene.step({agent: json.dumps([number, said])})
