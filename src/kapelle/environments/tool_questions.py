"""Questions with tools. An agent calls tools, reads their results, and then answers.

The setting `questions` can be any environment whose questions have one answer (such as `math`, `arithmetic` or `gsm8k_steps`). The
environment in `questions` also grades the answers. A text without a tool call is the answer. The workflow `tool_use` returns
results as messages with the role `tool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from kapelle.environment import (
    EpisodeState,
    Outcome,
    Reporting,
    Retriable,
    report_of,
)
from kapelle.environments.grading.text.tool_call import Form, NotCalls, parse_calls
from kapelle.environments.questions import HandsOnQuestions, InnerQuestions, require_agents
from kapelle.environments.tools.calculator import Calculator
from kapelle.environments.tools.calendar import Calendar
from kapelle.environments.tools.contract import (
    Listing,
    Tool,
    Toolbox,
    ToolFault,
    ToolSchema,
    fit_arguments,
    signatures_prompt,
    tools_prompt,
)
from kapelle.environments.tools.files import Files
from kapelle.environments.tools.functions import Functions
from kapelle.environments.tools.mcp import Mcp
from kapelle.environments.tools.python import Python
from kapelle.environments.tools.search import Search
from kapelle.errors import ConfigError, EpisodeError, did_you_mean
from kapelle.runtime.clock import suspend_aware_timeout
from kapelle.settings.base import Settings
from kapelle.types import Json, Task

AnyTool = Annotated[
    Calculator | Python | Files | Search | Calendar | Functions | Mcp, Field(discriminator="tool")
]


class CallSettings(Settings):
    """Settings for the description of tools, the format of tool calls, and their limits."""

    form: Form = "hermes"
    """The format in which the agents' model writes tool calls, which is `hermes` (Hermes, Qwen), `llama` (JSON) or `pythonic`."""
    listing: Listing = "schemas"
    """How tools are described to agents: by `schemas`, or by `signatures` (one line per tool) for very small models."""
    max_turns: int = Field(default=8, ge=1)
    """The maximum number of turns of an agent. If the agent has not answered after the last turn, its reward is 0."""
    call_s: float = Field(default=30.0, gt=0.0)
    """Maximum time in seconds for a tool call. A tool may have a lower limit."""
    max_characters: int = Field(default=4000, ge=100)
    """The maximum number of characters of a result that an agent reads. Longer results are truncated."""

    def prompt(self, schemas: Sequence[ToolSchema]) -> str:
        """Return the description of the tools that an agent reads."""
        listed = tools_prompt if self.listing == "schemas" else signatures_prompt
        return listed([schema.as_json() for schema in schemas], self.form)


class OffersTools(CallSettings, Reporting):
    """Settings of an environment in which agents can call tools before they answer."""

    tools: tuple[AnyTool, ...] = Field(default=(Calculator(),), min_length=1)
    """The tools of the agents. Each entry names its `tool`."""

    @property
    def alive(self) -> Sequence[str]:
        """The tools that are servers, whose results may vary."""
        return [
            f"tool `{tool.tool}` ({tool.url if isinstance(tool, Search) else 'a server'})"
            for tool in self.tools
            if isinstance(tool, Mcp) or (isinstance(tool, Search) and tool.url is not None)
        ]

    def descriptors(self, agents: int) -> int:
        """Return the maximum number of descriptors that the tools of one episode hold open."""
        return agents * sum(tool.descriptors for tool in self.tools if isinstance(tool, Python | Mcp))

    def check_tools(self) -> None:
        """Check every tool. Raises ConfigError if two tools have the same name."""
        for tool in self.tools:
            tool.check()
        offered = [(schema.name, tool.tool) for tool in self.tools for schema in tool.schemas()]
        names = [name for name, _ in offered]
        for name in names:
            if names.count(name) > 1:
                entries = " and ".join(entry for found, entry in offered if found == name)
                raise ConfigError(
                    f"Two tools have the name '{name}' (entries {entries}). Remove one of them, or rename its function."
                )

    def around(self, question: EpisodeState, agents: Sequence[str]) -> ToolsState:
        """Return the state of a question's episode in which each agent has its own tools."""
        schemas = [schema for tool in self.tools for schema in tool.schemas()]
        boxes = {agent: [tool.open() for tool in self.tools] for agent in agents}
        return ToolsState(question, boxes, schemas, self)


class Tools(OffersTools, HandsOnQuestions):
    """Questions with tools: a calculator, Python, files, search, a calendar, the user's own functions and MCP servers."""

    name: Literal["tools"] = "tools"
    questions: InnerQuestions
    """Settings of the environment that provides the questions, such as `{name: math, …}`."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The reward range of the questions, extended to include 0, which agents without an answer receive."""
        low, high = self.questions.reward_range
        return (min(low, 0.0), max(high, 0.0))

    @property
    def alive(self) -> Sequence[str]:
        """The tools that are servers, and the external programs of the questions' environment, whose results may vary."""
        return (*super().alive, *report_of(self.questions).alive)

    def check(self, agents: Sequence[str]) -> None:
        """Check the questions and every tool. Raises ConfigError if the questions are a game or two tools have the same name."""
        super().check(agents)
        self.check_tools()

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ToolsState:
        """Start an episode of one question and return its state. Each agent has its own tools."""
        return self.around(self.questions.start(task, agents, seed), agents)


# -------- An episode: texts with calls receive results, and a text without calls is the answer


@dataclass(slots=True)
class ToolUser:
    """The tools of one agent, and counts of how the agent has used them."""

    boxes: Sequence[Toolbox]
    tools: Mapping[str, Tool]
    """Mapping from the name of each tool to the tool."""
    reads: str
    """The next observation of the agent."""
    turns: int = 0
    answer: str | None = None
    calls: list[str] = field(default_factory=list)
    done: int = 0
    """The number of successful tool calls."""
    faults: int = 0


class ToolsState(Retriable):
    """The state of a question's episode. Every agent has its own tools, and its first text without a tool call is its answer.

    If a call fails, the agent reads the error message. The environment of the question grades the answers when all agents have
    answered or used all their turns.
    """

    def __init__(
        self,
        question: EpisodeState,
        boxes: Mapping[str, Sequence[Toolbox]],
        schemas: Sequence[ToolSchema],
        settings: CallSettings,
    ) -> None:
        """Take the state of the question, the tools of each agent in team order, the schemas of the tools, and the settings."""
        self._question, self._settings = question, settings
        prompt = settings.prompt(schemas)
        self._users: dict[str, ToolUser] = {}
        for agent, own in boxes.items():
            by_name = {tool.schema.name: tool for box in own for tool in box.tools}
            self._users[agent] = ToolUser(own, by_name, f"{prompt}\n\n{question.observe(agent)}")
        self._over = False
        self._most = 1
        self._given = 0

    def allow_answers(self, most: int) -> None:
        """Allow up to `most` texts from the team.

        If a text contains calls, the team reads the results. If a text is an incorrect answer, the team reads that the answer is
        incorrect.
        """
        self._most = most
        if isinstance(self._question, Retriable):
            self._question.allow_answers(most)

    def observe(self, agent: str) -> str:
        """Return the observation of an agent: first the tools and the question, and later the results of the agent's last calls."""
        return self._users[agent].reads

    def movers(self) -> tuple[str, ...]:
        """Return the agents that have not answered yet and have turns left."""
        if self._over:
            return ()
        # If several answers are allowed, all agents continue after an incorrect answer.
        return tuple(
            agent
            for agent, user in self._users.items()
            if self._most > 1 or (user.answer is None and user.turns < self._settings.max_turns)
        )

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Execute the tool calls in the texts. Raises EpisodeError if an agent is unknown or may not move any more.

        If there is a `final` text, the texts are answers, with or without calls, and the episode ends. If several answers are
        allowed, a `final` text with calls receives results like any other text, unless it is the last allowed text.
        """
        require_agents(actions, self._users)
        for agent in actions:
            if agent not in self.movers():
                raise EpisodeError(
                    f"'{agent}' has already answered, or has used all turns; the limit is {self._settings.max_turns}."
                )
        self._given += 1
        calling = False
        if final is not None and self._given < self._most:
            try:
                calling = bool(parse_calls(final, (self._settings.form,)))
            except NotCalls:
                calling = True
        if calling:
            await asyncio.gather(*(self._act(self._users[agent], text) for agent, text in actions.items()))
            # Agents that made no call read the results of the other agents, because one of them may move next.
            results = "\n\n".join(self._users[agent].reads for agent in actions)
            for agent, user in self._users.items():
                if agent not in actions:
                    user.reads = results
            return {}
        if final is not None:
            for agent, text in actions.items():
                self._users[agent].answer = text
        else:
            await asyncio.gather(*(self._act(self._users[agent], text) for agent, text in actions.items()))
        if final is not None or not self.movers():
            answers = {name: user.answer for name, user in self._users.items() if user.answer is not None}
            rewards = await self._question.step(answers, final) if answers else {}
            self._over = self._given >= self._most or not self._question.movers()
            if not self._over:
                for agent, user in self._users.items():
                    user.answer, user.reads = None, self._question.observe(agent)
            return rewards
        return {}

    async def _act(self, user: ToolUser, text: str) -> None:
        user.turns += 1
        try:
            schemas = [tool.schema.as_json() for tool in user.tools.values()]
            calls = parse_calls(text, (self._settings.form,), schemas)
        except NotCalls as fault:
            user.faults += 1
            user.reads = f"Error: {fault}"
            return
        if not calls:
            user.answer = text
            return
        results, most = [], self._settings.max_characters
        # Execute calls in order, because a later call may depend on an earlier one.
        for call in calls:
            user.calls.append(call.name)
            try:
                tool = user.tools.get(call.name)
                if tool is None:
                    raise ToolFault(
                        f"There is no tool '{call.name[:80]}'.{did_you_mean(call.name, user.tools)}"
                    )
                arguments = fit_arguments(call.arguments, tool.schema.parameters)
                async with suspend_aware_timeout(self._settings.call_s):
                    result = await asyncio.to_thread(tool.call, arguments)
                user.done += 1
            except ToolFault as fault:
                user.faults += 1
                result = f"Error: {fault}"
            except TimeoutError:
                user.faults += 1
                result = f"Error: `{call.name}` did not answer within {self._settings.call_s:g} s."
            results.append(
                result
                if len(result) <= most
                else f"{result[:most]}\n… ({len(result) - most:,} more characters)"
            )
        named = [f"{call.name}: {result}" for call, result in zip(calls, results, strict=True)]
        user.reads = results[0] if len(results) == 1 else "\n\n".join(named)

    def outcome(self) -> Outcome:
        """Return the outcome of the question. An agent that acted but did not answer receives the reward 0."""
        ended = self._question.outcome()
        acted = {agent: user for agent, user in self._users.items() if user.turns or user.answer is not None}
        silent = {agent: 0.0 for agent, user in acted.items() if user.answer is None}
        success = ended.success
        if silent and success is not None and ended.rewards:
            success *= (len(acted) - len(silent)) / len(acted)
        info: dict[str, Json] = {
            **ended.info,
            "calls": {agent: list(user.calls) for agent, user in acted.items()},
            "calls_done": {agent: user.done for agent, user in acted.items()},
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
        """Close the tools and the episode of the question. If closing one of them fails, all others are still closed."""
        async with AsyncExitStack() as held:
            held.push_async_callback(self._question.close)
            for user in self._users.values():
                for box in user.boxes:
                    held.push_async_callback(asyncio.to_thread, box.close)
