"""What answers a call of the whole team: the run's workflow, played on the caller's question."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kapelle.engines.rollout.protocol import Completion, Renderer, Request, RolloutEngine, stream_or_generate
from kapelle.rollout.play import play_episode
from kapelle.runtime.randomness import derive_seed
from kapelle.services.http.refusals import Refusal, wrong
from kapelle.services.log import LOG
from kapelle.services.policy.agents import Agents, Decodes, Tell, told, too_long
from kapelle.services.policy.asked import Asked
from kapelle.services.policy.chat_form import ChatRequest
from kapelle.services.policy.words import Words
from kapelle.types import Episode, Json, Task


@dataclass(frozen=True, slots=True)
class Spoken:
    """Words of an agent that came."""

    choice: int
    agent: str
    text: str
    begins: bool = False
    """Whether the agent's turn begins with them."""
    ends: bool = False
    """Whether it ends with them."""


@dataclass(frozen=True, slots=True)
class Played:
    """A team's answer."""

    choice: int
    text: str
    """What counts as the team's answer."""
    episode: Episode


class Teams:
    """A team, asked as a whole."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    def check(self, request: ChatRequest) -> None:
        """Raise Refusal (400) for what only an agent by itself can be asked."""
        play = self._agents.play
        if not Asked.can_ask(play.environment):
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

    def answers(self, request: ChatRequest, seed: int, *, listening: bool) -> AsyncIterator[Spoken | Played]:
        """Yield the team's answers, with the words of its agents as they come if somebody is listening."""
        question = question_of(request)

        async def play_all(tell: Tell) -> None:
            for choice in range(request.n):
                own = seed if choice == 0 else derive_seed(seed, "choice", choice)
                tell(await self._play(request, question, own, choice, tell if listening else None))

        return told(self._agents.thread, play_all)

    async def _play(
        self, request: ChatRequest, question: str, seed: int, choice: int, tell: Tell | None
    ) -> Played:
        play = self._agents.play
        asked = Asked(play.environment)
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
        return Played(choice, asked.finals[-1] if asked.finals else last, episode)


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
    """A rollout engine whose words are told as they come."""

    def __init__(self, engine: RolloutEngine, choice: int, tell: Tell) -> None:
        self._engine, self._choice, self._tell = engine, choice, tell

    @property
    def policies(self) -> Sequence[str]:
        return self._engine.policies

    def renderer(self, policy: str) -> Renderer:
        return self._engine.renderer(policy)

    async def generate(self, request: Request) -> Completion:
        renderer = self.renderer(request.policy)
        words = Words(renderer.spoken, request.sampling.stop) if isinstance(renderer, Decodes) else None
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
