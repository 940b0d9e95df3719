"""Answers of the whole team: the run's workflow, played on the caller's question."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from kapelle.engines.rollout.protocol import Completion, Renderer, Request, RolloutEngine, stream_or_generate
from kapelle.environment import Answerable, Environment, World, asks_questions, offers
from kapelle.environments.questions import QuestionWorld
from kapelle.environments.tool_questions import Tools
from kapelle.grading.verdict import right
from kapelle.rollout.play import play_episode
from kapelle.runtime.randomness import derive_seed
from kapelle.services.binding import LOG
from kapelle.services.policy.agents import Agents, Decodes, Tell, TextStream, told, too_long
from kapelle.services.policy.chat_form import ChatRequest, Head, chunk_row
from kapelle.services.refusals import Refusal, wrong
from kapelle.types import Episode, Json, Split, Task

# -------- A caller's question as an environment: the run's workflow plays it, and there is no answer to compare with


@dataclass(frozen=True)
class AskedEnvironment:
    """An environment of one question; every answer counts as right."""

    environment: Environment
    """The run's own; its tools and its form of answers are kept."""
    finals: list[str] = field(default_factory=list)
    """The team's answers, the last one last."""

    @property
    def name(self) -> str:
        """The run's own."""
        return self.environment.name

    reward_range = (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The caller."""
        return {"train": "a caller", "test": "a caller"}

    def check(self, agents: Sequence[str]) -> None:
        """Accept the team: the run's environment has."""

    def size(self, split: Split) -> int | None:
        """Return None: callers come without end."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Raise AssertionError: callers ask."""
        raise AssertionError("callers ask")

    def start(self, task: Task, agents: Sequence[str], seed: int) -> World:
        """Open the world of the question."""
        world = _AskedWorld(task, agents, self.finals)
        return self.environment.around(world, agents) if isinstance(self.environment, Tools) else world

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text, as the run's environment reads it."""
        assert offers(self.environment, Answerable), "`Teams.check` has asked"
        return self.environment.extract(text)


class _AskedWorld(QuestionWorld):
    def __init__(self, task: Task, agents: Sequence[str], finals: list[str]) -> None:
        super().__init__(task, agents, right, {})
        self._finals = finals

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        if final is None:
            said = [text if len(actions) == 1 else f"{name}: {text}" for name, text in actions.items()]
            final = "\n\n".join(said)
        self._finals.append(final)
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


class Teams:
    """A team, asked as a whole."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    def check(self, request: ChatRequest) -> None:
        """Raise Refusal (400) for requests that only single agents can answer."""
        play = self._agents.play
        if not asks_questions(play.environment):
            names = ", ".join(play.team.names)
            raise wrong(
                f"The team plays a game of moves and answers no questions. Ask its agents: {names}.", "model"
            )
        for name, given in (
            ("tools", request.tools),
            ("stop", request.stop),
            ("logprobs", request.logprobs),
        ):
            if given:
                raise wrong(
                    f"`{name}` is for one agent; the team speaks by its workflow. Name an agent in `model`.",
                    name,
                )

    def answers(
        self, request: ChatRequest, seed: int, *, listening: bool
    ) -> AsyncIterator[Spoken | PlayedAnswer]:
        """Yield the team's answers; `listening` also yields the words of its agents as they come."""
        question = question_of(request)

        async def play_all(tell: Tell) -> None:
            for choice in range(request.n):
                own = seed if choice == 0 else derive_seed(seed, "choice", choice)
                tell(await self._play(request, question, own, choice, tell if listening else None))

        return told(self._agents.thread, play_all)

    async def _play(
        self, request: ChatRequest, question: str, seed: int, choice: int, tell: Tell | None
    ) -> PlayedAnswer:
        play = self._agents.play
        asked = AskedEnvironment(play.environment)
        own = {agent.name: request.sampling(agent.sampling) for agent in play.team.agents}
        engine = play.engine if tell is None else _Overheard(play.engine, choice, tell)
        episode = await play_episode(
            replace(play, environment=asked, engine=engine, sampling=own), Task("served", question), seed
        )
        if episode.error is not None:
            if episode.error.startswith("ContextError"):
                raise too_long(episode.error.partition(": ")[2])
            # Its message may quote the question.
            LOG.error(
                "The team could not answer: its workflow failed with %s.", episode.error.partition(":")[0]
            )
            raise Refusal(500, "The team's workflow failed; the service's log says why.", None, "workflow")
        last = episode.turns[-1].text if episode.turns else ""
        return PlayedAnswer(choice, asked.finals[-1] if asked.finals else last, episode)


def question_of(request: ChatRequest) -> str:
    """Return the question that a conversation puts to a team: its only message, or all of them by role."""
    said = [message for message in request.messages if message.text]
    if not said or said[-1].role != "user":
        raise wrong("A team answers a message of the role `user`, which must be the last one.", "messages")
    if len(said) == 1:
        return said[0].text
    return "\n\n".join(f"{message.name or message.role}: {message.text}" for message in said)


def turn_rows(episode: Episode) -> list[Json]:
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


class _Overheard:
    """A rollout engine that tells its words as they come."""

    def __init__(self, engine: RolloutEngine, choice: int, tell: Tell) -> None:
        self._engine, self._choice, self._tell = engine, choice, tell

    @property
    def policies(self) -> Sequence[str]:
        return self._engine.policies

    def renderer(self, policy: str) -> Renderer:
        return self._engine.renderer(policy)

    async def generate(self, request: Request) -> Completion:
        renderer = self.renderer(request.policy)
        words = TextStream(renderer.spoken, request.sampling.stop) if isinstance(renderer, Decodes) else None
        self._say(request.agent, "", begins=True)

        def on_tokens(ids: Sequence[int], _logprobs: Sequence[float]) -> None:
            if words is not None:
                self._say(request.agent, words.hear(ids))

        completion = await stream_or_generate(self._engine, request, on_tokens)
        self._say(request.agent, completion.text if words is None else words.end(completion.text), ends=True)
        return completion

    def _say(self, agent: str, text: str, *, begins: bool = False, ends: bool = False) -> None:
        if text or begins or ends:
            self._tell(Spoken(self._choice, agent, text, begins, ends))

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        raise AssertionError("a team that is asked does not learn")

    def release_caches(self) -> None:
        """Keep them."""

    def close(self) -> None:
        """Stay open."""


# -------- A team's answer to one request: whole, or as the chunks of a stream in which each agent is heard as it speaks


@dataclass(frozen=True)
class TeamChat:
    """A request to a team that is being answered."""

    model: str
    request: ChatRequest
    session: str | None = None
    """Its session; None on a server that records nothing."""
    head: Head = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", Head(self.model))

    @property
    def _extra(self) -> dict[str, Json]:
        """Fields of the answer beyond OpenAI's form."""
        return {} if self.session is None else {"session": self.session}

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
                "kapelle": {"turns": turn_rows(each.episode)},
            }
            for each in played
        ]
        row = {**self.head.row("chat.completion"), "choices": choices, "usage": _usage(played)}
        return row if self.session is None else {**row, "kapelle": self._extra}

    async def chunks(self, answers: AsyncIterator[Spoken | PlayedAnswer]) -> AsyncIterator[Json | str]:
        """Yield the answer in pieces: what agents say beside the content, then the team's answer as the content."""
        played: list[PlayedAnswer] = []
        for choice in range(self.request.n):
            yield chunk_row(
                self.head,
                choice,
                {"role": "assistant", "content": "", "refusal": None},
                None,
                None,
                self._extra,
            )
        async with aclosing(answers) as told:  # type: ignore[type-var]
            async for each in told:
                if isinstance(each, Spoken):
                    said = {"agent": each.agent, "text": each.text, "begins": each.begins, "ends": each.ends}
                    yield chunk_row(self.head, each.choice, {"content": ""}, None, None, said)
                    continue
                played.append(each)
                yield chunk_row(self.head, each.choice, {"content": each.text}, None, None)
                turns = {"turns": turn_rows(each.episode)}
                yield chunk_row(self.head, each.choice, {}, None, "stop", turns)
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield {**self.head.row("chat.completion.chunk"), "choices": [], "usage": _usage(played)}
        yield "[DONE]"


def _usage(played: Sequence[PlayedAnswer]) -> Json:
    """Return how many tokens all agents read and wrote."""
    turns = [turn for each in played for turn in each.episode.turns]
    read, written = sum(len(t.prompt_ids) for t in turns), sum(len(t.completion_ids) for t in turns)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
