"""The interface of workflows: a workflow is a short async program that uses the sessions of a team's agents and an environment.

    async def run(self, scene):
        draft = await scene["writer"].say(scene.task.question)
        notes = await scene["critic"].say(f"Criticise: {draft.text}")
        final = await scene["writer"].say(notes.text)
        await scene.step({"writer": final.text}, final=final.text)

The method `say` generates, records and returns a turn. Debates, chains and votes are workflows, not environments. A workflow can be
used with every compatible environment. For other environments, `check` raises ConfigError before a model is loaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kapelle.environment import Environment, Scorable, has_comparable_answers, task_of
from kapelle.errors import ConfigError, did_you_mean, noting
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.foreign_code import Unfit, call_user_code, check_parameters
from kapelle.runtime.plugins import catalogue, find_class
from kapelle.team import Agent
from kapelle.types import Constraint, Message, Task, Turn, as_text, worded

if TYPE_CHECKING:
    from kapelle.settings.checks import Check, RunToCheck


class AgentSession(Protocol):
    """An agent in one episode, together with its conversation."""

    @property
    def agent(self) -> Agent:
        """The agent."""
        ...

    @property
    def renderer(self) -> object:
        """The renderer that converts the agent's conversation to tokens in its next turn.

        If the model is on this machine, the renderer is a `TokenizesChats`.
        """
        ...

    async def say(self, *messages: Message | str, fresh: bool = False) -> Turn:
        """Add messages to the agent's conversation, generate its completion, and record and return the turn.

        A message that is a string is a user message. The conversation continues from the exact tokens that the agent sampled before.
        With `fresh`, a new conversation starts with the agent's system message.
        """
        ...


@runtime_checkable
class TokenizesChats(Protocol):
    """A renderer with access to the tokeniser of its model."""

    @property
    def tokenizer(self) -> Any:
        """The tokeniser, with the same interface as in transformers."""
        ...

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt ids of a new conversation, up to the position where the agent's completion starts."""
        ...

    def whole(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a finished conversation."""
        ...


@dataclass(frozen=True, slots=True)
class Written(Message):
    """The last message of a new conversation whose prompt the workflow itself has converted to tokens of the model.

    The agent reads `ids` instead of the rendered messages, unless the agent has a system message.
    """

    ids: tuple[int, ...] = ()
    """Token ids of the whole prompt."""


@dataclass(frozen=True, slots=True)
class Continued:
    """A request to an agent to continue a conversation that the caller manages."""

    messages: tuple[Message, ...]
    """The new messages. If `after` is None, these are all messages of the conversation, including the system message."""
    after: int | None
    """Index of the agent's turn after which the messages are added. None starts a new conversation."""
    max_tokens: int | None = None
    """Maximum number of tokens of the completion. The agent's own maximum also applies."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion, in addition to the agent's own stop strings. The agent's other sampling settings cannot be
    changed, so that the trainer computes the same log-probs."""
    constraint: Constraint | None = None
    """Constraint of the completion, which replaces the agent's own constraint. The turn records the constraint for the trainer."""
    caller: int | None = None
    """Index of the turn of another agent that caused this request, if known (`Turn.caller`)."""


class Scene(Protocol):
    """The argument of a workflow's program, which gives access to the task, the agents' sessions and the episode of the environment."""

    @property
    def task(self) -> Task:
        """The task."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the agents in team order."""
        ...

    @property
    def seed(self) -> int:
        """Seed of this episode, for random choices in the workflow."""
        ...

    @property
    def team_moves(self) -> bool:
        """Whether each move is a single message that any agent of the team can send (`TeamMoves`)."""
        ...

    def __getitem__(self, name: str) -> AgentSession:
        """Return the session of an agent."""
        ...

    async def together(
        self, words: Mapping[str, Sequence[Message | str]], fresh: bool = False
    ) -> dict[str, Turn]:
        """Generate turns of several agents at the same moment. No agent reads another agent's completion; see `AgentSession.say`."""
        ...

    async def converse(self, continued: Mapping[str, Continued]) -> dict[str, Turn]:
        """Generate turns of several agents at the same moment, each in a conversation that the workflow manages.

        Several calls can run at the same time, even for the same agents. Each turn is recorded when it is complete.
        """
        ...

    def allow_answers(self, most: int) -> None:
        """Keep the episode of a question open after an incorrect final message, for at most `most` final messages in total.

        In environments without questions, `movers` determines whether the episode continues.
        """
        ...

    def observe(self, agent: str) -> str:
        """Return the current observation of an agent."""
        ...

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move now."""
        ...

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Pass the agents' messages to the environment.

        The rewards that the environment returns are added to the last turns of the agents.
        """
        ...

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text, or None if the text contains no answer or the environment has no answers."""
        ...

    def leave_out(self) -> None:
        """Exclude the turns that were recorded so far from training. Excluded turns remain in the episode."""
        ...

    async def score(self, turn: Turn) -> float:
        """Score the text of a turn as its agent's answer, record the score in `Turn.score` and return the score.

        Rewards and the state of the episode are not changed. Raises EpisodeError if the environment cannot score texts.
        """
        ...


class Workflow(Protocol):
    """A workflow between agents, defined by frozen settings and one async program."""

    @property
    def name(self) -> str:
        """The name by which the class of the workflow is found. The name is a field of the settings."""
        ...

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the workflow does not support these agents or this environment."""
        ...

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        ...


class Drawable:
    """A workflow that can be drawn as a flowchart."""

    def mermaid(self, names: Sequence[str]) -> str:
        """Return a Mermaid flowchart that shows which agent reads which other agents; `names` are the agents in team order."""
        raise NotImplementedError


class ScoresRounds:
    """A workflow that can score the text of every turn as an answer."""

    score_rounds: bool
    """Whether turns are scored. This field is a setting of the workflow."""


class CountsTurns:
    """A workflow whose settings determine the maximum number of turns of each agent in an episode."""

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the maximum number of turns of each agent; `names` are the agents in team order."""
        raise NotImplementedError


class GoesOnWithout:
    """A workflow that continues without agents that were removed from the episode.

    Removed agents are absent from `Scene.names`, unless all agents were removed. In other workflows, removed agents stay in
    `Scene.names`, and their messages are empty.
    """


def workflow_class(name: str) -> type:
    """Return the class of a workflow, given its name, `module:Class` or the name of an entry point."""
    return find_class("workflow", name, catalogue("kapelle.workflows"))


def workflow_files() -> Any:
    """Return the module `kapelle.workflows.dag_file`, which reads files that define a whole workflow.

    The module is imported by name.
    """
    return import_module(import_module("kapelle.workflows").FILES)


_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each `{name}` in a template with its value, and keep the braces around unknown names.

    No expressions are evaluated, and inserted values are not searched for further names, so an agent's text cannot change the
    template.
    """
    return _FIELD.sub(lambda match: values.get(match[1], match[0]), template)


def observation_prompt(scene: Scene, name: str) -> str:
    """Return an agent's prompt with its current observation as `{question}`. If the agent has no prompt, return the observation."""
    return fill(scene[name].agent.prompt or "{question}", {"question": scene.observe(name)})


def instructions(agent: Agent, task: Task | None = None) -> list[Message]:
    """Return the messages that an agent reads before the messages of a task.

    The messages are a system message, which joins the agent's and the task's system messages, and the agent's few-shot examples.
    """
    texts = dict.fromkeys(text for text in (agent.system, task and task.system) if text)
    system = [Message("system", "\n\n".join(texts))] if texts else []
    roles = ("user", "assistant")
    return [
        *system,
        *(Message(role, text) for each in agent.examples for role, text in zip(roles, each, strict=True)),
    ]


def conversation(message: Message, task: Task, turn: int = 0) -> list[Message]:
    """Return the messages before an agent's turn (from 0), by splitting `message` into the separate messages of the task's conversation.

    A prompt contains the conversation of a task as one string. If the last message of the conversation is a user message, the
    prompt's text before and after this string is added to it. Otherwise, the message is returned unchanged.
    """
    if turn >= len(task.messages) or message.role != "user" or message.structured is not None:
        return [message]
    *before, last = task.messages[turn]
    text = as_text((*before, last))
    if message.content == text:
        return [*before, replace(last, images=message.images)]
    if last.role != "user" or text not in message.content:
        return [message]
    question = worded(last, lambda content: message.content.replace(text, content, 1))
    return [*before, replace(message, content=question.content, structured=question.structured)]


def opening(agent: Agent, task: Task) -> list[Message]:
    """Return the first messages that an agent reads for a question, if the workflow does not add any messages."""
    prompt = (agent.prompt or "{question}").replace("{question}", task.question)
    return [*instructions(agent, task), *conversation(Message("user", prompt), task)]


def append_texts(question: str, texts: Mapping[str, str]) -> str:
    """Return the question followed by each agent's text, as one prompt."""
    return "\n\n".join([question, *(f"{name}: {text}" for name, text in texts.items())])


def need_answers(workflow: str, does: str, environment: Environment) -> None:
    """Raise ConfigError if the environment has no comparable answers. The argument `does` states why the workflow needs answers."""
    if not has_comparable_answers(environment):
        own = (
            " If its tasks are questions, make its class inherit from `kapelle.Answerable` and define `extract`."
            if ":" in environment.name
            else ""
        )
        raise ConfigError(
            f"`workflow.name: {workflow}` {does}, but `{environment.name}` is a game of moves. Set `workflow.name: play` "
            f"for a game with turns, or `parallel` if all agents move at once.{own}"
        )


def need_two(what: str, agents: Sequence[Agent], remedy: str = "Add agents") -> None:
    """Raise ConfigError if the team has only one agent. The argument `what` states why the workflow needs more agents."""
    if len(agents) < 2:
        raise ConfigError(
            f"{what}, but the team has only '{agents[0].name}'. {remedy}, or set `workflow.name: solo`."
        )


def check_names(agents: Sequence[Agent], taken: Sequence[str]) -> None:
    """Raise ConfigError if the name of an agent is also the name of a template field."""
    for agent in agents:
        if agent.name in taken:
            raise ConfigError(
                f"An agent named '{agent.name}' cannot be distinguished from the template field {{{agent.name}}}. Rename the agent."
            )


def braced(names: Sequence[str]) -> str:
    """Return the names as fields of a template, for error messages."""
    return ", ".join(f"{{{name}}}" for name in names)


def check_template(agent: Agent, known: Sequence[str], where: str) -> None:
    """Raise ConfigError if the prompt of an agent uses an unknown field."""
    for name in _FIELD.findall(agent.prompt or ""):
        if name not in known:
            raise ConfigError(
                f"The prompt of agent '{agent.name}' uses {{{name}}}, which is not a field of {where}."
                f"{did_you_mean(name, known)}"
            )


# -------- Checks of a run's workflow


def check_workflow(run: RunToCheck) -> Iterator[str]:
    """Raise ConfigError if the workflow cannot be run.

    Yield a message for each agent whose `weights.per_turn` has weights for a wrong number of turns.
    """
    workflow, team, config = run.config.workflow, run.team, run.config
    try:
        check_parameters("`check`", workflow.check, "agents", "environment")
        with noting(run.absent):
            call_user_code(
                "check", config.patience.environment, workflow.check, team.agents, config.environment
            )
        check_parameters("`run`", workflow.run, "scene")
        if inspect.isasyncgenfunction(workflow.run) or inspect.isgeneratorfunction(workflow.run):
            raise Unfit("`run` has a `yield`. Write `async def run(self, scene)` without it.")
    except Unfit as error:
        raise ConfigError(f"The workflow '{workflow.name}' does not fit the run: {error}") from None
    if not isinstance(workflow, CountsTurns):  # an episode ends at the first turn without weights
        return
    for agent, listed in team.turns_of.items():
        turns = workflow.most_turns(team.names)[agent]
        if turns != len(listed):
            yield (
                f"`weights.per_turn` of agent '{agent}' has weights for {len(listed)} turns, but the workflow gives it {turns}. Set `per_turn: {turns}`."
            )


def check_turn_scores(run: RunToCheck) -> Iterator[str]:
    """Yield a message if the algorithm needs scores of turns but the environment or the workflow does not provide them."""
    config, name, environment = run.config, run.algorithm.name, run.config.environment
    if not run.algorithm.data.scores:
        return
    state = environment.start(task_of(environment, "train", 0), run.team.names, 0)
    run_async(state.close)
    if not isinstance(state, Scorable):
        yield f"`{name}` needs a score for every turn, which '{environment.name}' cannot provide. Use an environment of questions, or `algorithm.verifier`."
    elif not (isinstance(config.workflow, ScoresRounds) and config.workflow.score_rounds):
        yield f"`{name}` needs a score for every turn. Set `workflow.score_rounds: true` (workflow `debate`), or `algorithm.verifier`."


CHECKS: tuple[Check, ...] = (check_workflow,)
TRAINING_CHECKS: tuple[Check, ...] = (check_turn_scores,)
