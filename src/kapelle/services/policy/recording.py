"""Recording mode: what outside programs do with the agents becomes episodes, once somebody posts a reward.

    POST /v1/sessions/NAME/reward   {"reward": 1.0}   or   {"rewards": {"planner": 0.5, "coder": 1.0}}

An episode is written as a run writes its own (`runs.episode_json`), a line in `episodes.jsonl`: exact token ids,
log-probs, agents, versions and hashes of the weights. Nothing is written of a session without a reward.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import Field

from kapelle.errors import DataError, EpisodeError, OutputError
from kapelle.rollout.outcomes import in_range, plain
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.services.http.application import Answer, Call, Route
from kapelle.services.http.refusals import Body, Refusal, read_body, wrong
from kapelle.services.policy.admission import Ticket
from kapelle.services.policy.agents import Agents, Chat, Done, News, Prompt, prompted
from kapelle.services.policy.chat_form import ChatRequest, read_message
from kapelle.services.policy.sessions import Place, Session, Sessions, record
from kapelle.services.policy.teams import Played, Spoken
from kapelle.types import Episode, Json, Message, Task, Turn

# -------- Calls that are sent again because their answers were lost: answered as the first time, and counted once
#
# A client that hears nothing asks again by itself, OpenAI's own does so twice. What an agent would say the second time would be one
# more turn of the episode, trained on by a reward that only what was heard has earned.

KEY, COUNT = "idempotency-key", "x-stainless-retry-count"
"""Headers by which a call tells that it may have been sent before: a key of its own, or how often it was."""
MOST = 4096
"""Answers, and rewards, that are known again."""
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Answered:
    session: Session
    key: str | None
    chat: Chat
    done: Sequence[Done]


class Repeats:
    """The last answer to each call of a named session, and to each reward."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, str, bytes], _Answered] = OrderedDict()
        self._rewards: OrderedDict[str, tuple[bytes, Mapping[str, Json]]] = OrderedDict()

    def answered(self, call: Call, chat: Chat, session: Session, done: Sequence[Done]) -> None:
        """Keep what a call that names its session was answered."""
        if call.session is not None:
            answered = _Answered(session, call.headers.get(KEY), chat, done)
            _keep(self._answers, (session.name, chat.agent, _digest(call.body)), answered)

    def answer(self, call: Call, agent: str, session: Session | None) -> tuple[Chat, Sequence[Done]] | None:
        """Return what this very call was answered in its session; None for one that is not sent again."""
        known = None if session is None else self._answers.get((session.name, agent, _digest(call.body)))
        if known is None or known.session is not session:
            return None
        key, count = call.headers.get(KEY), call.headers.get(COUNT, "0")
        again = key == known.key if key is not None else count.isdecimal() and int(count[:9]) > 0
        return (known.chat, known.done) if again else None

    def rewarded(self, name: str, body: Json, told: Mapping[str, Json]) -> None:
        """Keep what came of a session's reward."""
        _keep(self._rewards, name, (_digest(body), told))

    def was_rewarded(self, name: str) -> bool:
        """Return whether a session has had its reward."""
        return name in self._rewards

    def reward(self, name: str, body: Json) -> Mapping[str, Json] | None:
        """Return what came of the same reward of a session; None where it had another or none."""
        known = self._rewards.get(name)
        return known[1] if known is not None and known[0] == _digest(body) else None


def _keep(kept: OrderedDict[K, V], name: K, value: V) -> None:
    kept[name] = value
    kept.move_to_end(name)
    while len(kept) > MOST:
        kept.popitem(last=False)


def _digest(body: Json) -> bytes:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).digest()


# -------- What a program posts when it knows how well its agents did


class Reward(Body):
    """What the agents of a session have earned."""

    reward: float | None = None
    """Of every agent that spoke."""
    rewards: dict[str, float] = Field(default={}, max_length=1024)
    """Of agents by name, in place of `reward`."""
    success: float | None = Field(default=None, ge=0.0, le=1.0)
    """How well the team as a whole did."""
    info: dict[str, Any] = Field(default={}, max_length=64)
    """What is kept beside it."""

    def by_agent(self, team: Sequence[str]) -> Mapping[str, float]:
        """Return what each agent has earned."""
        shared = {} if self.reward is None else dict.fromkeys(team, self.reward)
        return {**shared, **self.rewards}


def read_reward(
    body: Json, team: Sequence[str], bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Reward:
    """Return a reward; Refusal (400) for one that names nobody, or that an episode could not hold.

    `bounds` are the least and the greatest that an agent may earn.
    """
    reward = read_body(Reward, body)
    if reward.reward is None and not reward.rewards:
        raise wrong("Post `reward`, for all agents that spoke, or `rewards` by agent.", "reward")
    for name in reward.rewards:
        if name not in team:
            raise wrong(
                f"`rewards` names an agent that the team does not have. It has: {', '.join(team)}.", "rewards"
            )
    shared = {} if reward.reward is None else {"reward": reward.reward}
    for place, paid in {
        **shared,
        **{f"rewards.{name}": paid for name, paid in reward.rewards.items()},
    }.items():
        if not in_range(paid, bounds):
            raise wrong(
                f"`{place}` is {paid:g}, and rewards of this run lie in [{bounds[0]:g}, {bounds[1]:g}] "
                "(`environment.rewards` of its recipe). Post one in that range; the session still waits for it.",
                place,
            )
    try:
        plain(reward.info, "info")
    except EpisodeError as error:
        raise wrong(str(error), "info") from None
    return reward


TASK = "x-kapelle-task"
"""Header that names the task at which a program works: episodes of one task are one group."""
FILE = "episodes.jsonl"
_BEGINS = b'{"step":'
"""What every line of it begins with."""


class Taker(Protocol):
    """Where sessions go that are over."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest that an agent may earn."""
        ...

    def take(self, session: Session, reward: Reward) -> Mapping[str, object]:
        """Take a session with its reward; return what its caller is told."""
        ...

    def drop(self, session: Session) -> None:
        """Learn of a session that ended without a reward."""
        ...


class Recorder:
    """Sessions under way, and what becomes of them."""

    def __init__(self, taker: Taker, agents: Agents, lifetime: float = math.inf) -> None:
        """Hand sessions of these agents to a taker when they are rewarded; `lifetime` is in seconds after the last call."""
        self.sessions = Sessions(lifetime=lifetime)
        self._repeats = Repeats()
        self._taker = taker
        self._agents = agents

    def routes(self) -> Sequence[Route]:
        """Return what it answers."""
        return (
            Route("POST", "/v1/sessions", self.open),
            Route("GET", "/v1/sessions/", self.show),
            Route("POST", "/v1/sessions/", self.reward),
            Route("DELETE", "/v1/sessions/", self.drop),
            Route("POST", "/v1/reward", self.reward),
        )

    async def open(self, call: Call) -> Answer:
        """Begin a session and return its name."""
        if call.body:
            raise Refusal(
                400,
                "A session is begun with an empty object; its task is named by a header.",
                None,
                "invalid_request",
            )
        session = self.sessions.begin(call.session)
        session.named = True
        session.task = call.headers.get(TASK, session.task)
        return Answer({"session": session.name})

    async def show(self, call: Call) -> Answer:
        """Return what a session has come to."""
        session = self.sessions.get(call.path)
        turns = [
            {"agent": turn.agent, "seen": turn.seen, "tokens": len(turn.completion_ids)}
            for turn in session.turns
        ]
        return Answer({"session": session.name, "task": session.task, "turns": turns, **dict(session.counts)})

    async def drop(self, call: Call) -> Answer:
        """End a session without a reward: nothing is kept of it."""
        ended = self.sessions.end(call.path)
        try:
            self._taker.drop(ended)
        except BaseException:
            self.sessions.open_again(ended)
            raise
        return Answer({"session": ended.name, "turns": len(ended.turns), "deleted": True})

    async def reward(self, call: Call) -> Answer:
        """End a session with a reward."""
        name, slash, rest = call.path.partition("/")
        if slash and rest != "reward":
            raise Refusal(404, "There is no such path here.", None, "not_found")
        name = name or call.session or ""
        reward = read_reward(call.body, self._agents.play.team.names, self._taker.bounds)
        if self.sessions.known(name) is None and self._repeats.was_rewarded(name):
            if (known := self._repeats.reward(name, call.body)) is not None:
                return Answer(dict(known))
            raise Refusal(
                404, "This session ended with its first reward, which stays.", None, "session_not_found"
            )
        session = self.sessions.get(name)
        if not session.turns:
            raise Refusal(409, "No agent has said anything in this session.", None, "session_empty")
        ended = self.sessions.end(name)
        try:
            told = self._taker.take(ended, reward)
        except BaseException:
            self.sessions.open_again(ended)  # its caller may try once more
            raise
        said: dict[str, Json] = {"session": name, "turns": len(session.turns), **dict(session.counts), **told}
        self._repeats.rewarded(name, call.body, said)
        return Answer(said)

    async def answers(
        self, chat: Chat, messages: Sequence[Message], call: Call, ticket: Ticket
    ) -> tuple[Chat, AsyncIterator[News | Done]]:
        """Return a chat with its prompt and session, and its answers, each recorded before its caller has it."""
        again = self._repeats.answer(call, chat.agent, self.sessions.known(call.session))
        if again is not None:
            return again[0], _told(again[1])
        place = await self._place(chat, call)
        self._takes_part(place.session, call, ticket, chat.request.n)
        chat = replace(chat, session=place.session.name)
        chat = await self._prompted(chat, messages, place)
        return chat, self._kept(chat, place, self._answered(chat, place), call)

    def team_answers(
        self, request: ChatRequest, call: Call, ticket: Ticket, answers: AsyncIterator[Spoken | Played]
    ) -> tuple[str, AsyncIterator[Spoken | Played]]:
        """Return the session of a call of the whole team, and its answers; all turns are recorded before the answer is told.

        Refusal (400) for several answers at once: they would be one session, and one of them would be rewarded for the others.
        """
        if request.n > 1:
            raise wrong(
                "The team's answers are recorded one at a time. Ask again, each time in a session of its own.",
                "n",
            )
        session = self.sessions.begin(call.session)
        self._takes_part(session, call, ticket, 1)
        return session.name, self._team_kept(session, answers)

    async def _team_kept(
        self, session: Session, answers: AsyncIterator[Spoken | Played]
    ) -> AsyncIterator[Spoken | Played]:
        before = len(session.turns)
        async with aclosing(answers) as told:  # type: ignore[type-var]
            async for each in told:
                if isinstance(each, Played):
                    for turn in each.episode.turns:
                        record(session, replace(turn, index=-1), before + turn.seen)
                yield each

    def _takes_part(self, session: Session, call: Call, ticket: Ticket, answers: int) -> None:
        """Note that a call is under way in a session, until its room is given back."""
        session.task = call.headers.get(TASK, session.task)
        session.under_way += answers

        def over() -> None:
            session.under_way -= answers

        ticket.then(over)

    async def _place(self, chat: Chat, call: Call) -> Place:
        return self.sessions.place(chat.agent, chat.request, call.session)

    async def _prompted(self, chat: Chat, messages: Sequence[Message], place: Place) -> Chat:
        """Return a chat with its prompt: a conversation that continues reads the very tokens of its beginning."""
        if place.after is None:
            return await prompted(chat, self._agents, messages, None)
        turn, heard = place.after.turn, [read_message(message) for message in place.heard]
        play = self._agents.play
        renderer = play.engine.renderer(play.team.policy(place.agent).name)
        known = partial(renderer.extend, turn.prompt_ids, turn.completion_ids, heard)
        return await prompted(chat, self._agents, messages, known)

    def _answered(self, chat: Chat, place: Place) -> AsyncIterator[News | Done]:
        return self._agents.answers(chat.prompt, listening=chat.request.stream)

    async def _kept(
        self, chat: Chat, place: Place, answers: AsyncIterator[News | Done], call: Call
    ) -> AsyncIterator[News | Done]:
        done: list[Done] = []
        async with aclosing(answers) as told:  # type: ignore[type-var]
            async for each in told:
                if isinstance(each, Done):
                    self._keep(chat.prompt, place, each)
                    done.append(each)
                    if len(done) == chat.request.n:
                        self._repeats.answered(call, chat, place.session, done)
                yield each

    def _keep(self, prompt: Prompt, place: Place, done: Done) -> None:
        completion, policy = done.completion, self._agents.play.team.policy(place.agent)
        turn = Turn(
            agent=place.agent,
            policy=policy.name,
            version=completion.version,
            weights_hash=completion.weights_hash,
            index=-1 if done.turn is None else done.turn,
            seen=0,
            prompt_ids=prompt.ids,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            text=completion.text,
            heard=prompt.messages if place.after is None else tuple(map(read_message, place.heard)),
            trained=policy.trained,
        )
        self.sessions.keep(place, turn)


async def _told(answers: Sequence[Done]) -> AsyncIterator[News | Done]:
    for each in answers:
        yield each


class EpisodeFile:
    """Writes rewarded sessions as episodes; a taker."""

    bounds = (-math.inf, math.inf)

    def __init__(self, folder: Path, team: Sequence[str]) -> None:
        """Append to a folder's episodes; raises OutputError when it cannot be written."""
        self._team = tuple(team)
        self._groups: dict[str, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / FILE
            self._written = 0
            if self.path.exists():
                whole, rest = _whole(self.path)
                try:
                    recorded = _episodes(whole)
                except DataError as error:
                    raise DataError(f"{error} Or name another folder than {folder}.") from None
                if not rest.startswith(_BEGINS[: len(rest)]):
                    raise OutputError(
                        f"{self.path} ends with something else than an episode. Name another folder, or end its last line."
                    )
                os.truncate(self.path, len(whole))  # of a process that was killed while it wrote
                for episode in recorded:
                    self._groups.setdefault(episode.task.id, len(self._groups))
                    self._written += 1
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise OutputError(
                f"{folder} cannot be written: {error.strerror}. Name another folder."
            ) from error

    def take(self, session: Session, reward: Reward) -> Mapping[str, object]:
        """Write an episode and return its number."""
        task = Task(session.task or session.name, "")
        episode = episode_of(session, reward, task, 0, self._team)
        group = self._groups.setdefault(task.id, len(self._groups))
        left = memoryview(dump_episode(episode, step=max(t.version for t in session.turns), group=group))
        before = self._file.seek(0, os.SEEK_END)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            raise Refusal(507, f"The episode could not be written: {error.strerror}.", None, "disk") from None
        self._written += 1
        return {"episode": self._written - 1}

    def drop(self, session: Session) -> None:
        """Write nothing of it."""

    def close(self) -> None:
        """Write no more."""
        self._file.close()


def episode_of(session: Session, reward: Reward, task: Task, seed: int, team: Sequence[str]) -> Episode:
    """Return the episode that a rewarded session is; agents that said nothing earn nothing."""
    spoke = {turn.agent for turn in session.turns}
    info = {"session": session.name, **dict(session.counts), **reward.info}
    earned = {agent: paid for agent, paid in reward.by_agent(team).items() if agent in spoke}
    return Episode(task, seed, tuple(team), tuple(session.turns), earned, reward.success, info)


def read_recorded(folder: Path) -> list[Episode]:
    """Return the episodes of a folder that `--record` has written, in their order, but for an incomplete last line.

    DataError for a file that holds something else.
    """
    return _episodes(_whole(folder / FILE)[0])


def _whole(path: Path) -> tuple[bytes, bytes]:
    """Return a file's complete lines, and what follows the last of them."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    return content[:end], content[end:]


def _episodes(lines: bytes) -> list[Episode]:
    rows = []
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"Line {number} of {FILE} is no episode: {error}. Remove that line.") from None
    return [load_episode(row) for row in rows]
