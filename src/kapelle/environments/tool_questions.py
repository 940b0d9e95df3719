"""Questions that are answered with tools: an agent calls, reads results, calls again, and answers in words.

`questions` is any environment of questions with one answer (`math`, `arithmetic`, `gsm8k_steps`, …), which also grades. A text
that calls no tool is the answer. The workflow `tool_use` hands results back as messages of the role `tool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from kapelle.environment import (
    Alive,
    Doubting,
    Environment,
    Holding,
    Skipping,
    World,
    asks_questions,
    offers,
)
from kapelle.environments.questions import HandsOnQuestions, InnerQuestions
from kapelle.environments.tools.calculator import Calculator
from kapelle.environments.tools.contract import tools_prompt
from kapelle.environments.tools.files import Files
from kapelle.environments.tools.functions import Functions
from kapelle.environments.tools.mcp import Mcp
from kapelle.environments.tools.python import Python
from kapelle.environments.tools.search import Search
from kapelle.environments.tools.world import CallRules, ToolsWorld
from kapelle.errors import ConfigError
from kapelle.grading.text.extraction import defused
from kapelle.grading.text.tool_call import Form
from kapelle.types import Split, Task

AnyTool = Annotated[Calculator | Python | Files | Search | Functions | Mcp, Field(discriminator="tool")]


class Tools(HandsOnQuestions, Alive, Skipping, Doubting, Holding):
    """Questions with tools: calculator, Python, files, search, functions of one's own, MCP servers."""

    name: Literal["tools"] = "tools"
    questions: InnerQuestions
    """Settings of the environment that asks and grades: `{name: math, …}`."""
    tools: tuple[AnyTool, ...] = Field(default=(Calculator(),), min_length=1)
    """What agents can call; each entry says which `tool` it is."""
    form: Form = "hermes"
    """How the agents' model writes calls: `hermes` (Hermes, Qwen), `llama` (JSON) or `pythonic`."""
    max_turns: int = Field(default=8, ge=1)
    """How often an agent may speak; if it has not answered by then, it earns 0."""
    call_s: float = Field(default=30.0, gt=0.0)
    """Seconds within which a call must return; a tool may have a shorter limit of its own."""
    max_characters: int = Field(default=4000, ge=100)
    """Most of one result that an agent reads."""

    @property
    def _asks(self) -> Environment:
        return self.questions

    @property
    def reward_range(self) -> tuple[float, float]:
        """The questions' own, with 0 for no answer."""
        low, high = self._asks.reward_range
        return (min(low, 0.0), max(high, 0.0))

    @property
    def alive(self) -> Sequence[str]:
        """Tools that are servers of somebody, and what the questions' own environment names."""
        own = self._asks.alive if offers(self._asks, Alive) else ()
        servers = [
            f"tool `{tool.tool}` ({tool.url if isinstance(tool, Search) else 'a server'})"
            for tool in self.tools
            if isinstance(tool, Mcp) or (isinstance(tool, Search) and tool.url is not None)
        ]
        return (*servers, *own)

    def skipped(self) -> Mapping[Split, str]:
        """Return what the environment that asks leaves out."""
        return self._asks.skipped() if offers(self._asks, Skipping) else {}

    def doubts(self) -> Sequence[str]:
        """Return what the environment that asks doubts."""
        return self._asks.doubts() if offers(self._asks, Doubting) else []

    def descriptors(self, agents: int) -> int:
        """Return the most descriptors that the tools of one episode hold open."""
        return agents * sum(tool.descriptors for tool in self.tools if isinstance(tool, Python | Mcp))

    def check(self, agents: Sequence[str]) -> None:
        """Check the questions and every tool; ConfigError for games, and for two tools of one name."""
        if not asks_questions(self._asks):
            raise ConfigError(
                f"`tools` takes questions with one answer, and `{self._asks.name}` is a game of moves. Set "
                "`environment.questions` to math, arithmetic or another environment of questions."
            )
        self._asks.check(agents)
        for tool in self.tools:
            tool.check()
        offered = [(schema.name, tool.tool) for tool in self.tools for schema in tool.schemas()]
        names = [name for name, _ in offered]
        for name in names:
            if names.count(name) > 1:
                entries = " and ".join(entry for found, entry in offered if found == name)
                raise ConfigError(
                    f"Two tools are called '{name}', in the entries {entries}. Leave out one, or rename the function."
                )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ToolsWorld:
        """Open the world of one question, with tools of its own for each agent."""
        return self.around(self._asks.start(task, agents, seed), agents)

    def around(self, question: World, agents: Sequence[str]) -> ToolsWorld:
        """Return a question's world with tools of its own for each agent."""
        schemas = [schema.as_json() for tool in self.tools for schema in tool.schemas()]
        return ToolsWorld(
            question,
            {agent: [tool.open() for tool in self.tools] for agent in agents},
            defused(tools_prompt(schemas, self.form)),
            CallRules(self.form, self.max_turns, self.call_s, self.max_characters),
        )
