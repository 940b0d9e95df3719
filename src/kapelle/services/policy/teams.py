"""Answers of the whole team: the run's workflow, played on the caller's question."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from kapelle.engines.rollout.protocol import Completion, Request, RolloutEngine, stream_or_generate
from kapelle.environment import Answerable, Environment, PlayedFromOutside, World, asks_questions, offers
from kapelle.environments.grading.verdict import right
from kapelle.environments.questions import QuestionWorld
from kapelle.environments.tool_questions import OffersTools
from kapelle.rollout.episodes import play_episode
from kapelle.runtime.randomness import derive_seed
from kapelle.services.binding import LOG
from kapelle.services.policy.agents import Agents, Decodes, Ended, Heard, Tell, TextStream, told, too_long
from kapelle.services.policy.chat_form import ChatRequest, Head, usage_row
from kapelle.services.refusals import Refusal, wrong
from kapelle.types import Episode, Json, Task

# -------- A caller's question as an environment: the run's workflow plays it, and there is no answer to compare with


@dataclass(frozen=True)
class AskedEnvironment(Answerable):
    """What an episode asks of its environment, for one question of a caller; every answer counts as right."""

    name: str
    environment: Environment
    """The run's own; its tools and its form of answers are kept."""
    answers: list[str] = field(default_factory=list)
    """What the agents of each move said, the last one last: the team's answer where its workflow names none."""

    reward_range = (0.0, 1.0)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> World:
        """Open the world of the question."""
        world = _AskedWorld(task, agents, self.answers)
        own = self.environment
        return own.around(world, agents) if isinstance(own, OffersTools) and own.tools else world

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text, as the run's environment reads it."""
        assert offers(self.environment, Answerable), "`team_answers` has asked"
        return self.environment.extract(text)


class _AskedWorld(QuestionWorld):
    def __init__(self, task: Task, agents: Sequence[str], answers: list[str]) -> None:
        super().__init__(task, agents, right, {})
        self._answers = answers

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        said = [text if len(actions) == 1 else f"{name}: {text}" for name, text in actions.items()]
        self._answers.append("\n\n".join(said))
        return await super().step(actions, final)


@dataclass(frozen=True, slots=True)
class Spoken:
    """New words of an agent."""

    choice: int
    agent: str
    text: str
    begins: bool = False
    """Whether the agent's turn begins with them."""
    ends: bool = False
    """Whether it ends with them."""


@dataclass(frozen=True, slots=True)
class PlayedAnswer:
    """A team's answer."""

    choice: int
    text: str
    """The team's answer."""
    episode: Episode


def team_answers(
    agents: Agents, request: ChatRequest, *, listening: bool
) -> AsyncIterator[Spoken | PlayedAnswer]:
    """Yield a team's answers; `listening` also yields the words of its agents as they come.

    Raises Refusal (400), before anything is asked, for requests that only single agents can answer.
    """
    play = agents.play
    names = ", ".join(play.team.names)
    if offers(play.environment, PlayedFromOutside):
        raise wrong(f"A program plays this team and calls its agents one by one. Name one: {names}.", "model")
    if not asks_questions(play.environment):
        raise wrong(
            f"The team plays a game of moves and answers no questions. Ask its agents: {names}.", "model"
        )
    asked_of_one = {
        "tools": bool(request.tools),
        "tool_choice": request.tool_choice not in ("auto", "none"),
        "response_format": request.response_format != {"type": "text"},
        "stop": bool(request.stop),
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs > 0,
    }
    for name, given in asked_of_one.items():
        if given:
            raise wrong(
                f"`{name}` is for one agent; the team speaks by its workflow. Name an agent in `model`.", name
            )

    # The question is the conversation's only message, or all of them by role.
    said = [message for message in request.messages if message.text]
    if not said or said[-1].role != "user":
        raise wrong("A team answers a message of the role `user`, which must be the last one.", "messages")
    texts = [f"{each.name or each.role}: {each.text}" for each in said] if said[1:] else [said[0].text]
    task = Task("served", "\n\n".join(texts))
    first = secrets.randbits(62) if request.seed is None else request.seed

    async def play_all(tell: Tell) -> None:
        for choice in range(request.n):
            environment = AskedEnvironment(play.environment.name, play.environment)
            asked = replace(
                play,
                environment=cast("Environment", environment),
                sampling={agent.name: request.sampling(agent.sampling) for agent in play.team.agents},
                generate=partial(_overheard, play.engine, choice, tell) if listening else None,
            )
            seed = first if choice == 0 else derive_seed(first, "choice", choice)
            episode = await play_episode(asked, task, seed)
            if episode.error is not None:
                kind, _, why = episode.error.partition(": ")
                if kind.startswith("ContextError"):
                    raise too_long(why)
                # Its message may quote the question.
                LOG.error("The team could not answer: its workflow failed with %s.", kind.partition(":")[0])
                raise Refusal(
                    500, "The team's workflow failed; the service's log says why.", None, "workflow"
                )
            said = (
                environment.answers[-1] if environment.answers and episode.final is None else episode.answer
            )
            tell(PlayedAnswer(choice, said, episode))

    return _counted(agents, told(agents.thread, play_all))


async def _counted(
    agents: Agents, answers: AsyncIterator[Spoken | PlayedAnswer]
) -> AsyncGenerator[Spoken | PlayedAnswer, None]:
    """Yield answers, and count the tokens of their turns."""
    async with aclosing(answers) as told:  # type: ignore[type-var]
        async for each in told:
            if isinstance(each, PlayedAnswer):
                for turn in each.episode.turns:
                    agents.metrics.spoke(turn.agent, len(turn.prompt_ids), len(turn.completion_ids))
            yield each


async def _overheard(engine: RolloutEngine, choice: int, tell: Tell, request: Request) -> Completion:
    """Return what the engine answers, and tell its words as they come."""
    renderer = engine.renderer(request.policy)
    words = TextStream(renderer.spoken, request.sampling.stop) if isinstance(renderer, Decodes) else None
    say = partial(Spoken, choice, request.agent)
    tell(say("", begins=True))

    def on_tokens(ids: Sequence[int], _logprobs: Sequence[float]) -> None:
        if words is not None and (text := words.hear(ids)):
            tell(say(text))

    completion = await stream_or_generate(engine, request, on_tokens)
    tell(say(completion.text if words is None else words.end(completion.text), ends=True))
    return completion


# -------- A team's answer to one request: whole, or as the chunks of a stream in which each agent is heard as it speaks


@dataclass(frozen=True, slots=True)
class TeamChat:
    """A request to a team that is being answered."""

    request: ChatRequest
    head: Head

    async def whole(self, answers: AsyncIterator[Spoken | PlayedAnswer]) -> Json:
        """Return the answer, with the turns behind it."""
        async with aclosing(answers) as told:  # type: ignore[type-var]
            played = [each async for each in told if isinstance(each, PlayedAnswer)]
        choices = [
            {
                "index": each.choice,
                "message": {"role": "assistant", "content": each.text, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "kapelle": {"turns": _turn_rows(each.episode)},
            }
            for each in played
        ]
        row = {**self.head.row("chat.completion"), "choices": choices, "usage": _usage(played)}
        return row if self.head.session is None else {**row, "kapelle": self.head.extra}

    async def chunks(self, answers: AsyncIterator[Spoken | PlayedAnswer]) -> AsyncIterator[Json | str]:
        """Yield the answer in pieces: what agents say beside the content, then the team's answer as the content."""
        played: list[PlayedAnswer] = []
        for choice in range(self.request.n):
            yield self.head.opening(choice)
        async with aclosing(answers) as told:  # type: ignore[type-var]
            async for each in told:
                if isinstance(each, Spoken):
                    said = {"agent": each.agent, "text": each.text, "begins": each.begins, "ends": each.ends}
                    yield self.head.chunk(each.choice, {"content": ""}, extra=said)
                    continue
                played.append(each)
                yield self.head.chunk(each.choice, {"content": each.text})
                turns = {"turns": _turn_rows(each.episode)}
                yield self.head.chunk(each.choice, {}, reason="stop", extra=turns)
        if self.request.wants_usage:
            yield {**self.head.row("chat.completion.chunk"), "choices": [], "usage": _usage(played)}
        yield "[DONE]"

    async def heard(
        self, answers: AsyncIterator[Spoken | PlayedAnswer]
    ) -> AsyncGenerator[Heard | Ended, None]:
        """Yield the team's answers, each when it is complete."""
        async with aclosing(answers) as told:  # type: ignore[type-var]
            async for each in told:
                if isinstance(each, PlayedAnswer):
                    message = {"role": "assistant", "content": each.text, "refusal": None}
                    turns = each.episode.turns
                    usage = (
                        sum(len(turn.prompt_ids) for turn in turns),
                        sum(len(turn.completion_ids) for turn in turns),
                    )
                    about = {"turns": _turn_rows(each.episode)}
                    yield Ended(each.choice, "", each.text, None, message, "stop", usage, about)


def _turn_rows(episode: Episode) -> list[Json]:
    """Return the turns behind a team's answer."""
    return [
        {
            "agent": turn.agent,
            "text": turn.text,
            "finish_reason": turn.finish_reason,
            "tokens": len(turn.completion_ids),
        }
        for turn in episode.turns
    ]


def _usage(played: Sequence[PlayedAnswer]) -> Json:
    """Return how many tokens all agents read and wrote."""
    turns = [turn for each in played for turn in each.episode.turns]
    return usage_row(sum(len(t.prompt_ids) for t in turns), sum(len(t.completion_ids) for t in turns))
