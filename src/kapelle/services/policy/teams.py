"""Generates answers of the whole team, where the workflow of the run answers the question of the caller."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from kapelle.engines.rollout.protocol import Completion, Request, RolloutEngine, stream_or_generate
from kapelle.environment import (
    Answerable,
    DrivenByPrograms,
    Environment,
    EpisodeState,
    has_comparable_answers,
    offers,
)
from kapelle.environments.grading.verdict import right
from kapelle.environments.questions import QuestionState
from kapelle.environments.tool_questions import OffersTools
from kapelle.rollout.episodes import roll_out_episode
from kapelle.runtime.randomness import derive_seed
from kapelle.services.binding import LOG
from kapelle.services.policy.agents import Agents, Decodes, Send, TextStream, relayed, too_long
from kapelle.services.policy.chat_form import ChatRequest, Finished, Head, Piece, TextFormat
from kapelle.services.request_errors import RequestError, wrong
from kapelle.types import Episode, Task

# -------- A caller's question as an environment, without a reference answer


@dataclass(frozen=True)
class ServedEnvironment(Answerable):
    """The environment for a single question from a caller. Every answer counts as correct."""

    name: str
    environment: Environment
    """The environment of the run, which defines the tools and the format of answers."""
    answers: list[str] = field(default_factory=list)
    """The completions of the agents in each move. If the workflow does not define an answer, the last completion is the answer
    of the team."""

    reward_range = (0.0, 1.0)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> EpisodeState:
        """Start the episode for the question."""
        state = _ServedState(task, agents, self.answers)
        own = self.environment
        return own.around(state, agents) if isinstance(own, OffersTools) and own.tools else state

    def extract(self, text: str) -> str | None:
        """Return the final answer in a text, as extracted by the environment of the run."""
        assert offers(self.environment, Answerable), "`team_answers` has checked it"
        return self.environment.extract(text)


class _ServedState(QuestionState):
    def __init__(self, task: Task, agents: Sequence[str], answers: list[str]) -> None:
        super().__init__(task, agents, right, {})
        self._answers = answers

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        texts = [text if len(actions) == 1 else f"{name}: {text}" for name, text in actions.items()]
        self._answers.append("\n\n".join(texts))
        return await super().step(actions, final)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A piece of text that an agent has generated."""

    choice: int
    agent: str
    text: str
    begins: bool = False
    """Whether this text begins the agent's turn."""
    ends: bool = False
    """Whether this text ends the agent's turn."""


@dataclass(frozen=True, slots=True)
class TeamAnswer:
    """An answer of the team."""

    choice: int
    text: str
    episode: Episode


def team_answers(
    agents: Agents, request: ChatRequest, *, listening: bool
) -> AsyncIterator[Spoken | TeamAnswer]:
    """Yield the answers of a team. If `listening` is true, also yield the text of its agents while it is generated.

    Raises RequestError (400) immediately for requests that only individual agents support.
    """
    setup = agents.setup
    names = ", ".join(setup.team.names)
    if offers(setup.environment, DrivenByPrograms):
        raise wrong(
            f"A program runs this team and calls its agents one by one. Set `model` to one of them: {names}.",
            "model",
        )
    if not has_comparable_answers(setup.environment):
        raise wrong(
            f"The team plays a game and does not answer questions. Set `model` to an agent: {names}.",
            "model",
        )
    for_one_agent = {
        "tools": bool(request.tools),
        "tool_choice": request.tool_choice not in ("auto", "none"),
        "response_format": not isinstance(request.response_format, TextFormat),
        "stop": bool(request.stop),
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs > 0,
        "chat_template_kwargs": bool(request.chat_template_kwargs),
        "logit_bias": bool(request.logit_bias),
    }
    for name, given in for_one_agent.items():
        if given:
            raise wrong(f"`{name}` is not supported for the whole team. Set `model` to an agent.", name)

    # The question is the conversation's only message, or all messages with their roles.
    messages = [message for message in request.messages if message.text]
    if not messages or messages[-1].role != "user":
        raise wrong("The last message for a team must have the role `user`.", "messages")
    texts = [f"{each.name or each.role}: {each.text}" for each in messages]
    task = Task("served", "\n\n".join(texts) if messages[1:] else messages[0].text)
    first = secrets.randbits(62) if request.seed is None else request.seed

    async def roll_out_all(send: Send) -> None:
        for choice in range(request.n):
            environment = ServedEnvironment(setup.environment.name, setup.environment)
            question = replace(
                setup,
                environment=cast("Environment", environment),
                sampling={agent.name: request.sampling(agent.sampling) for agent in setup.team.agents},
                generate=partial(_streamed, setup.engine, choice, send) if listening else None,
            )
            seed = first if choice == 0 else derive_seed(first, "choice", choice)
            episode = await roll_out_episode(question, task, seed)
            if episode.error is not None:
                kind, _, why = episode.error.partition(": ")
                if kind.startswith("ContextError"):
                    raise too_long(why)
                # The message may quote the question.
                LOG.error("The team could not answer: its workflow failed with %s.", kind.partition(":")[0])
                raise RequestError(
                    500, "The team's workflow failed; see the service's log.", None, "workflow"
                )
            last = environment.answers[-1] if environment.answers and episode.final is None else None
            send(TeamAnswer(choice, episode.answer if last is None else last, episode))

    return _counted(agents, relayed(agents.thread, roll_out_all))


async def _counted(
    agents: Agents, answers: AsyncIterator[Spoken | TeamAnswer]
) -> AsyncGenerator[Spoken | TeamAnswer, None]:
    """Yield the answers, and count the tokens of their turns."""
    async with aclosing(answers) as coming:  # type: ignore[type-var]
        async for each in coming:
            if isinstance(each, TeamAnswer):
                for turn in each.episode.turns:
                    agents.metrics.answered(turn.agent, *turn.token_counts)
            yield each


async def _streamed(engine: RolloutEngine, choice: int, send: Send, request: Request) -> Completion:
    """Return the completion of the engine, and send its text while it is generated."""
    renderer = engine.renderer(request.policy)
    text = TextStream(renderer.spoken, request.sampling.stop) if isinstance(renderer, Decodes) else None
    spoken = partial(Spoken, choice, request.agent)
    send(spoken("", begins=True))

    def on_tokens(ids: Sequence[int], _logprobs: Sequence[float]) -> None:
        if text is not None and (new := text.add(ids)):
            send(spoken(new))

    completion = await stream_or_generate(engine, request, on_tokens)
    send(spoken(completion.text if text is None else text.rest(completion.text), ends=True))
    return completion


@dataclass(frozen=True, slots=True)
class TeamChat:
    """A request to a team that is in progress. Streams contain the texts of the agents in addition to the content."""

    head: Head

    async def pieces(
        self, answers: AsyncIterator[Spoken | TeamAnswer]
    ) -> AsyncGenerator[Piece | Finished, None]:
        """Yield the texts of the agents while they are generated, and each answer with its turns when the answer is complete."""
        async with aclosing(answers) as coming:  # type: ignore[type-var]
            async for each in coming:
                if isinstance(each, Spoken):
                    extra = {"agent": each.agent, "text": each.text, "begins": each.begins, "ends": each.ends}
                    yield Piece(each.choice, "", "", extra=extra)
                    continue
                turns = each.episode.turns
                rows = [
                    {
                        "agent": turn.agent,
                        "text": turn.text,
                        "finish_reason": turn.finish_reason,
                        "tokens": len(turn.completion_ids),
                    }
                    for turn in turns
                ]
                message = {"role": "assistant", "content": each.text, "refusal": None}
                usage = (
                    sum(turn.token_counts[0] for turn in turns),
                    sum(turn.token_counts[1] for turn in turns),
                )
                yield Finished(each.choice, "", each.text, None, message, "stop", usage, {"turns": rows})
