"""What a workflow is: a short async program over seats and a world.

    async def run(self, scene):
        draft = await scene["writer"].say(scene.task.question)
        notes = await scene["critic"].say(f"Criticise: {draft.text}")
        final = await scene["writer"].say(notes.text)
        await scene.step({"writer": final.text}, final=final.text)

`say` generates, records and returns the turn. Debate, chains and votes are workflows, not
environments: a workflow runs on every environment that it is compatible with, and `check` refuses
the others before a model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from kapelle.environment import Environment, asks_questions
from kapelle.errors import ConfigError, did_you_mean
from kapelle.runtime.plugins import catalogue, find_class
from kapelle.team import Agent
from kapelle.types import Constraint, Message, Task, Turn, as_text, worded


class Seat(Protocol):
    """One agent in one episode; it keeps the agent's own conversation."""

    @property
    def agent(self) -> Agent:
        """The agent that sits here."""
        ...

    @property
    def renderer(self) -> object:
        """How its conversation becomes tokens in its next turn; of a model that is here, it is one of `TokenizesChats`."""
        ...

    async def say(self, *messages: Message | str, fresh: bool = False) -> Turn:
        """Add messages to the agent's conversation, let it speak, record and return the turn.

        A plain string is a user message. The conversation continues from exactly the tokens that the
        agent sampled before; with `fresh` it starts anew with the agent's system message.
        """
        ...


@runtime_checkable
class TokenizesChats(Protocol):
    """A renderer that hands out the tokeniser of its model."""

    @property
    def tokenizer(self) -> Any:
        """The tokeniser, in the form of transformers."""
        ...

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt ids of a new conversation, ready for the agent's completion."""
        ...

    def whole(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a finished conversation."""
        ...


@dataclass(frozen=True, slots=True)
class Written(Message):
    """The last message of a new conversation that a workflow has put into the model's tokens itself.

    The agent reads `ids` in place of what its chat template would make of the messages, unless it has a system message.
    """

    ids: tuple[int, ...] = ()
    """The whole prompt."""


@dataclass(frozen=True, slots=True)
class Continued:
    """What an agent is asked in a conversation that its caller keeps."""

    messages: tuple[Message, ...]
    """What it reads; without `after`, the whole conversation, system message included."""
    after: int | None
    """Index of the turn of its own that the messages follow; None begins a conversation."""
    max_tokens: int | None = None
    """Most tokens of the answer, where the agent's own limit is not lower."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, beside the agent's own. All else that sampling depends on is the agent's: the trainer
    has to find the same log-probs."""
    constraint: Constraint | None = None
    """What the answer has to look like, in place of the agent's own; the turn records it, and the trainer masks likewise."""
    caller: int | None = None
    """Index of another agent's turn that calls for this one, where that is known (`Turn.caller`)."""


class Scene(Protocol):
    """What a workflow's program gets: the task, the seats in order, and the world's moves."""

    @property
    def task(self) -> Task:
        """The problem."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Agent names in seat order."""
        ...

    @property
    def seed(self) -> int:
        """Seed of this episode, for a workflow that draws lots."""
        ...

    @property
    def one_seat(self) -> bool:
        """Whether the world takes one text a move, from any agent (`OneSeat`); others take one answer, or say who moves."""
        ...

    def __getitem__(self, name: str) -> Seat:
        """Return the seat of an agent."""
        ...

    async def together(
        self, words: Mapping[str, Sequence[Message | str]], fresh: bool = False
    ) -> dict[str, Turn]:
        """Let several agents speak at the same moment; none sees another's text. See `Seat.say`."""
        ...

    async def converse(self, asked: Mapping[str, Continued]) -> dict[str, Turn]:
        """Let several agents answer at the same moment, each in a conversation that the workflow has put together.

        May be called while it is under way, for the same agents too: a turn is recorded when it is complete.
        """
        ...

    def allow_answers(self, most: int) -> None:
        """Let the world of a question stay open after a wrong final text, for at most `most` texts in all.

        Other worlds decide through `movers` whether they continue.
        """
        ...

    def observe(self, agent: str) -> str:
        """Return what the world shows this agent now."""
        ...

    def movers(self) -> tuple[str, ...]:
        """Return who may move in the world now."""
        ...

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Hand the agents' texts to the world; what it pays is added to their last turns."""
        ...

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text; None where there is none, or where the environment has no answers."""
        ...

    def leave_out(self) -> None:
        """Do not train on the turns recorded so far; they stay in the episode."""
        ...

    async def score(self, turn: Turn) -> float:
        """Score a turn's text as its agent's answer, record it in `Turn.score` and return it.

        Nothing is paid and the world stays as it is. EpisodeError where the world cannot score a text.
        """
        ...


class Workflow(Protocol):
    """A topology: frozen settings and one async program."""

    @property
    def name(self) -> str:
        """The name by which its class is found; a settings field."""
        ...

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError when these agents or this environment cannot play it."""
        ...

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        ...


class Drawable:
    """A workflow that can be drawn."""

    def mermaid(self, names: Sequence[str]) -> str:
        """Return a Mermaid flowchart of who reads whom; `names` are the agents in seat order."""
        raise NotImplementedError


class ScoresRounds:
    """A workflow that can have every turn's text scored as an answer."""

    score_rounds: bool
    """Whether it does; a setting of the workflow."""


class CountsTurns:
    """A workflow that knows from its settings how many turns an agent takes in an episode."""

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the most turns of each agent; `names` are the agents in seat order."""
        raise NotImplementedError


class GoesOnWithout:
    """A workflow that goes on without agents that are removed: they are missing in `Scene.names`, unless all are.

    In any other workflow a removed agent is asked and says nothing.
    """


def workflow_class(name: str) -> type:
    """Return the class of a workflow by name, `module:Class` or entry point."""
    return find_class("workflow", name, catalogue("kapelle.workflows"))


def workflow_files() -> Any:
    """Return the module that reads files which describe a whole workflow, such as siiRL's (`kapelle.workflows.dag_file`).

    Like a class of a workflow it is found by name, so that this module knows none.
    """
    return import_module(import_module("kapelle.workflows").FILES)


_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace `{name}` by its value; braces around anything unknown stay as they are.

    Nothing is evaluated and values are not scanned again, so that an agent's text cannot change the
    template.
    """
    return _FIELD.sub(lambda match: values.get(match[1], match[0]), template)


def instructions(agent: Agent, task: Task) -> list[Message]:
    """Return the system message of an agent in a task: its own, then the task's unless it is the same; empty without any."""
    said = dict.fromkeys(text for text in (agent.system, task.system) if text)
    return [Message("system", "\n\n".join(said))] if said else []


def conversation(message: Message, task: Task, turn: int = 0) -> list[Message]:
    """Return a message before an agent's turn (from 0), with the conversation of the task's row in place of its text.

    A row's conversation is one text where a prompt is made of it. What stands around that text goes into the row's last message
    if that is the user's; otherwise the text remains.
    """
    if turn >= len(task.messages) or message.role != "user" or message.structured is not None:
        return [message]
    *before, last = task.messages[turn]
    whole = as_text((*before, last))
    if message.content == whole:
        return [*before, replace(last, images=message.images)]
    if last.role != "user" or whole not in message.content:
        return [message]
    asked = worded(last, lambda text: message.content.replace(whole, text, 1))
    return [*before, replace(message, content=asked.content, structured=asked.structured)]


def opening(agent: Agent, task: Task) -> list[Message]:
    """Return what an agent reads first of a question, as far as a workflow adds nothing to it."""
    prompt = (agent.prompt or "{question}").replace("{question}", task.question)
    return [*instructions(agent, task), *conversation(Message("user", prompt), task)]


def append_texts(question: str, texts: Mapping[str, str]) -> str:
    """Return the question followed by each agent's text, as one prompt."""
    return "\n\n".join([question, *(f"{name}: {text}" for name, text in texts.items())])


def need_answers(workflow: str, does: str, environment: Environment) -> None:
    """Raise ConfigError for a game: `does` describes what the workflow needs an answer for."""
    if not asks_questions(environment):
        own = (
            " If it asks questions, let its class inherit from `kapelle.Answerable` and have `extract`."
            if ":" in environment.name
            else ""
        )
        raise ConfigError(
            f"`workflow.name: {workflow}` {does}, and `{environment.name}` is a game of moves. "
            f"Set `workflow.name: play` where agents take turns, `parallel` where all move at once.{own}"
        )


def need_two(what: str, agents: Sequence[Agent], remedy: str = "Add agents") -> None:
    """Raise ConfigError for a single agent: `what` describes what the workflow needs more agents for."""
    if len(agents) < 2:
        raise ConfigError(
            f"{what}, but the team has only '{agents[0].name}'. {remedy}, or set `workflow.name: solo`."
        )


def check_names(agents: Sequence[Agent], taken: Sequence[str]) -> None:
    """Raise ConfigError when an agent has the name of a field that templates already use."""
    for agent in agents:
        if agent.name in taken:
            raise ConfigError(
                f"An agent named '{agent.name}' cannot be distinguished from {{{agent.name}}}. Rename it."
            )


def braced(names: Sequence[str]) -> str:
    """Return names as fields of a template, for error messages."""
    return ", ".join(f"{{{name}}}" for name in names)


def check_template(agent: Agent, known: Sequence[str], where: str) -> None:
    """Raise ConfigError when an agent's prompt uses a field that does not exist."""
    for name in _FIELD.findall(agent.prompt or ""):
        if name not in known:
            raise ConfigError(
                f"The prompt of agent '{agent.name}' uses {{{name}}}, which {where} does not know."
                f"{did_you_mean(name, known)}"
            )
