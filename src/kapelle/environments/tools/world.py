"""The world of a question with tools: texts with calls are answered with results, a text without calls is the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from kapelle.environment import Outcome, Retriable, World
from kapelle.environments.questions import need_seats
from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, fit_arguments
from kapelle.errors import EpisodeError, did_you_mean
from kapelle.grading.text.extraction import defused
from kapelle.grading.text.tool_call import Form, NotCalls, ReadCall, parse_calls
from kapelle.runtime.clock import suspend_aware_timeout
from kapelle.types import Json


@dataclass(frozen=True, slots=True)
class CallRules:
    """How calls are made and bounded."""

    form: Form
    max_turns: int
    call_s: float
    max_characters: int


@dataclass(slots=True)
class ToolUser:
    """One agent's tools and what it has done with them."""

    boxes: Sequence[Toolbox]
    reads: str
    """What it reads next."""
    turns: int = 0
    answer: str | None = None
    calls: list[str] = field(default_factory=list)
    faults: int = 0

    @property
    def tools(self) -> dict[str, Tool]:
        """Its tools by name."""
        return {tool.schema.name: tool for box in self.boxes for tool in box.tools}


class ToolsWorld(Retriable):
    """One question; every agent has tools of its own, and its first text without a call is its answer.

    Every fault of a call becomes a text that the agent reads. The question's own world grades the
    answers when all agents have given theirs or used up their turns.
    """

    def __init__(
        self, question: World, boxes_of: Mapping[str, Sequence[Toolbox]], prompt: str, rules: CallRules
    ) -> None:
        self._question = question
        self._users = {
            agent: ToolUser(boxes, f"{prompt}\n\n{question.observe(agent)}")
            for agent, boxes in boxes_of.items()
        }
        self._rules = rules
        self._over = False
        self._most = 1
        self._given = 0

    def allow_answers(self, most: int) -> None:
        """Answer so many texts of the team, one after another: calls with results, a wrong answer by saying so."""
        self._most = most
        if isinstance(self._question, Retriable):
            self._question.allow_answers(most)

    def observe(self, agent: str) -> str:
        """Return the tools and the question, later the results of the agent's last calls."""
        return self._users[agent].reads

    def movers(self) -> tuple[str, ...]:
        """Return the agents that still have to answer and have turns left."""
        if self._over:
            return ()
        # Where several answers are allowed, a wrong one ends nobody's part.
        return tuple(
            agent
            for agent, user in self._users.items()
            if self._most > 1 or (user.answer is None and user.turns < self._rules.max_turns)
        )

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Carry out the calls of these texts; EpisodeError for a stranger or an agent that is done.

        With a `final` text the texts are answers, calls or not, and the episode ends. Where more than one is
        allowed, a `final` text that calls is answered with results like any other, as long as another may follow.
        """
        need_seats(actions, self._users)
        for agent in actions:
            if agent not in self.movers():
                raise EpisodeError(f"'{agent}' has answered, or has no turn left of {self._rules.max_turns}.")
        self._given += 1
        if final is not None and self._given < self._most and self._calls(final):
            await asyncio.gather(*(self._act(self._users[agent], text) for agent, text in actions.items()))
            # Those who made no call see what came of the others': one of them may speak next.
            told = "\n\n".join(self._users[agent].reads for agent in actions)
            for agent, user in self._users.items():
                if agent not in actions:
                    user.reads = told
            return {}
        if final is not None:
            for agent, text in actions.items():
                self._users[agent].answer = text
        else:
            await asyncio.gather(*(self._act(self._users[agent], text) for agent, text in actions.items()))
        if final is not None or not self.movers():
            answers = {name: user.answer for name, user in self._users.items() if user.answer is not None}
            paid = await self._question.step(answers, final) if answers else {}
            self._over = self._given >= self._most or not self._question.movers()
            if not self._over:
                for agent, user in self._users.items():
                    user.answer, user.reads = None, self._question.observe(agent)
            return paid
        return {}

    def _calls(self, text: str) -> bool:
        try:
            return bool(parse_calls(text, (self._rules.form,)))
        except NotCalls:
            return True

    async def _act(self, user: ToolUser, text: str) -> None:
        user.turns += 1
        try:
            calls = parse_calls(text, (self._rules.form,))
        except NotCalls as fault:
            user.faults += 1
            user.reads = defused(f"Error: {fault}")
            return
        if not calls:
            user.answer = text
            return
        # One after another: a later call may build on what an earlier one has done.
        results = [await self._result(user, call) for call in calls]
        named = [f"{call.name}: {result}" for call, result in zip(calls, results, strict=True)]
        user.reads = results[0] if len(results) == 1 else "\n\n".join(named)

    async def _result(self, user: ToolUser, call: ReadCall) -> str:
        user.calls.append(call.name)
        try:
            tool = user.tools.get(call.name)
            if tool is None:
                raise ToolFault(f"There is no tool '{call.name[:80]}'.{did_you_mean(call.name, user.tools)}")
            arguments = fit_arguments(call.arguments, tool.schema.parameters)
            async with suspend_aware_timeout(self._rules.call_s):
                said = await asyncio.to_thread(tool.call, arguments)
        except ToolFault as fault:
            user.faults += 1
            said = f"Error: {fault}"
        except TimeoutError:
            user.faults += 1
            said = f"Error: `{call.name}` did not answer within {self._rules.call_s:g} s."
        said, most = defused(said), self._rules.max_characters
        return said if len(said) <= most else f"{said[:most]}\n… ({len(said) - most:,} more characters)"

    def outcome(self) -> Outcome:
        """Return the question's outcome; an agent that acted without ever answering earns 0."""
        ended = self._question.outcome()
        acted = {agent: user for agent, user in self._users.items() if user.turns or user.answer is not None}
        silent = {agent: 0.0 for agent, user in acted.items() if user.answer is None}
        success = ended.success
        if silent and success is not None and ended.rewards:
            success *= (len(acted) - len(silent)) / len(acted)
        info: dict[str, Json] = {
            **ended.info,
            "calls": {agent: list(user.calls) for agent, user in acted.items()},
            "call_faults": {agent: user.faults for agent, user in acted.items()},
        }
        return replace(
            ended,
            rewards={**silent, **ended.rewards},
            success=success,
            info=info,
            truncated=bool(silent) or not acted,
        )

    async def close(self) -> None:
        """Free the tools and the question's world; a failure does not stop the others from being freed."""
        async with AsyncExitStack() as held:
            held.push_async_callback(self._question.close)
            for user in self._users.values():
                for box in user.boxes:
                    held.push_async_callback(asyncio.to_thread, box.close)
