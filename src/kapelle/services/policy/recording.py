"""Recording: sessions of outside programs, which become episodes once their rewards are posted.

    POST /v1/sessions/NAME/reward   {"reward": 1.0}   or   {"rewards": {"planner": 0.5, "coder": 1.0}}

An episode is written as a run writes its own (`runs.episode_json`), a line in `episodes.jsonl`: exact token ids,
log-probs, agents, versions and hashes of the weights. Sessions without a reward are dropped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field
from starlette.routing import Route

from kapelle.engines.rollout.protocol import agent_renderer
from kapelle.environments.grading.text.tool_call import ReadCall
from kapelle.errors import DataError, EpisodeError, OutputError
from kapelle.rollout.outcomes import in_range, plain
from kapelle.rollout.scene import said
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.services.http import Call, JsonAnswer, Peer, route
from kapelle.services.policy.agents import Agents, Chat, Done, News
from kapelle.services.policy.chat_form import NAMED, PLAINLY, ChatRequest, MessageReader
from kapelle.services.policy.speech import Speech
from kapelle.services.policy.teams import PlayedAnswer, Spoken
from kapelle.services.refusals import Body, Refusal, busy, read_body, wrong
from kapelle.types import Episode, Json, Message, Task, Turn

# -------- Sessions, and which conversation a call continues
#
# An agent reads its own earlier words as the very tokens that it sampled, so a call must be matched with the conversation that it
# continues. Callers name their session by a header or by the address that they call. Without a name the conversation itself is
# matched: it continues the longest beginning that ends with an answer given here. One that matches none (because the
# program edited or compacted its history) begins anew and is counted.

MOST_TURNS = 4096
"""Of one session."""


@dataclass(eq=False, slots=True)
class ReadPrefix:
    """An answer from which conversations may continue."""

    session: ChatSession
    turn: Turn
    continued: int = 0
    """How many answers continue from it."""
    before: tuple[Message, ...] = ()
    """The conversation up to this answer, with the tokens of answers."""


@dataclass(eq=False, slots=True)
class ChatSession:
    """One run of a caller's program: the turns that its agents have taken."""

    name: str
    named: bool
    """Whether the caller named it; others are recognised by their conversations."""
    task: str | None = None
    """The task that the caller says it works at; None for one of its own."""
    turns: list[Turn] = field(default_factory=list)
    nodes: dict[tuple[str, bytes], list[ReadPrefix]] = field(default_factory=dict)
    """(agent, digest of a conversation up to an answer) → such answers."""
    counts: Counter[str] = field(default_factory=Counter)
    """`branches`: calls that continue from an answer that was continued before. `restarts`: conversations that begin anew
    although the agent has spoken already."""
    under_way: int = 0
    """Answers that are being sampled."""
    called: float = 0.0
    """When it was last called, by the monotonic clock, in seconds."""


Join = Callable[[ChatSession], None]
"""Counts the answers of a call as under way in its session."""


@dataclass(frozen=True, slots=True)
class ContinuedAt:
    """Where a call continues."""

    session: ChatSession
    agent: str
    after: ReadPrefix | None
    """The answer that it continues from; None where it begins."""
    heard: tuple[Message, ...]
    """The messages since."""
    digest: bytes
    """Of the whole conversation."""
    seen: int
    """How many turns of the session were complete."""


class Sessions:
    """All sessions under way; used by one thread."""

    def __init__(
        self, most: int = 1024, lifetime: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep at most `most` sessions; one that has had no call for `lifetime` seconds makes room for a new one."""
        self._most = most
        self._lifetime = lifetime
        self._clock = clock
        self._open: dict[str, ChatSession] = {}
        self.dropped = 0
        """How many sessions ended without a reward to make room."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[ChatSession]:
        return iter(self._open.values())

    def known(self, name: str | None) -> ChatSession | None:
        """Return the session of that name if it is under way, else None."""
        return None if name is None else self._open.get(name)

    def get(self, name: str) -> ChatSession:
        """Return a session; Refusal (404) if it is not under way."""
        if name not in self._open:
            raise Refusal(404, "There is no such session under way.", None, "session_not_found")
        return self._open[name]

    def begin(self, name: str | None = None) -> ChatSession:
        """Return a new session, or the one of that name; Refusal (429) if there is no room."""
        if (known := self.known(name)) is not None:
            known.called = self._clock()
            return known
        if len(self._open) >= self._most:
            # Those idle for longer than the lifetime make room, else the one without a name that was idle for longest.
            now = self._clock()
            idle = [each for each in self._open.values() if not each.under_way]
            leaving = [each for each in idle if now - each.called > self._lifetime]
            if not leaving:
                unnamed = [each for each in idle if not each.named]
                leaving = sorted(unnamed, key=lambda each: each.called)[:1]
            if not leaving:
                lasting = (
                    "a session lasts until its reward"
                    if math.isinf(self._lifetime)
                    else f"a session without calls is dropped after {self._lifetime:g} s"
                )
                raise busy(
                    f"{self._most} sessions are under way. Post their rewards, end those that will get none (DELETE "
                    f"/v1/sessions/NAME), or try again later: {lasting}."
                )
            for each in leaving:
                del self._open[each.name]
            self.dropped += len(leaving)
        session = ChatSession(name or f"s-{secrets.token_hex(8)}", name is not None)
        self._open[session.name] = session
        session.called = self._clock()
        return session

    @contextmanager
    def ending(self, name: str) -> Iterator[ChatSession]:
        """End a session, unless the block raises: then it stays under way, and its caller may try once more."""
        session = self.get(name)
        if session.under_way:
            raise Refusal(
                409, "Answers of this session are under way. Wait for them first.", None, "session_busy"
            )
        del self._open[name]
        try:
            yield session
        except BaseException:
            self._open[name] = session
            raise

    def forget(self, over: Callable[[str], bool]) -> None:
        """Drop the sessions whose names are `over`, without a reward."""
        for name in [name for name in self._open if over(name)]:
            del self._open[name]

    def find(self, agent: str, request: ChatRequest, name: str | None) -> tuple[ReadPrefix, int] | None:
        """Return the answer that a conversation continues and the number of messages up to it; None if it begins.

        Without a name, all sessions without a name are searched.
        """
        digests = _digests(agent, request)
        searched = [s for s in self if (s.name == name if name is not None else not s.named)]
        for count in range(len(request.messages), 0, -1):
            if request.messages[count - 1].role == "assistant":
                nodes = [node for s in searched for node in s.nodes.get((agent, digests[count]), ())]
                if nodes:
                    return min(reversed(nodes), key=lambda node: node.continued), count
        return None

    def place(
        self, agent: str, request: ChatRequest, name: str | None, reader: MessageReader = PLAINLY
    ) -> ContinuedAt:
        """Return where a call continues; it may begin a session. The agent's `reader` reads what it heard since."""
        found = self.find(agent, request, name)
        session = self.begin(name) if found is None else found[0].session
        session.called = self._clock()
        if len(session.turns) + session.under_way + request.n > MOST_TURNS:
            raise busy(f"The session has {MOST_TURNS} turns, the most that it may have.")
        after, count = found or (None, 0)
        if after is not None:
            session.counts["branches"] += after.continued > 0
            after.continued += 1
        elif any(turn.agent == agent for turn in session.turns):
            session.counts["restarts"] += 1
        heard = reader.messages(request.messages, count)
        digest = _digests(agent, request)[-1]
        return ContinuedAt(session, agent, after, heard, digest, len(session.turns))

    def keep(
        self, place: ContinuedAt, turn: Turn, said: Speech, conversation: tuple[Message, ...] = ()
    ) -> Turn:
        """Record an answer, of which the caller was told what it said, and return it with its number.

        `conversation` is all up to this answer.
        """
        session = place.session
        kept = record(session, turn, place.seen)
        words, calls = said.words, [[call.name, _plain(call.arguments)] for call in said.calls]
        digest = _extended(place.digest, ["assistant", words.strip() if calls else words, calls])
        session.nodes.setdefault((place.agent, digest), []).append(
            ReadPrefix(session, kept, before=conversation)
        )
        return kept


def record(session: ChatSession, turn: Turn, seen: int) -> Turn:
    """Append a turn to a session and return it with its number."""
    kept = replace(turn, index=len(session.turns) if turn.index < 0 else turn.index, seen=seen)
    session.turns.append(kept)
    return kept


def _digests(agent: str, request: ChatRequest) -> list[bytes]:
    """Return a digest of every beginning of a conversation, the empty one first; all include the tools."""
    tools = [tool.model_dump() for tool in request.tools] if request.calls_tools else []
    digests = [_extended(b"", [agent, tools])]
    for message in request.messages:
        calls = []
        for call in message.tool_calls or ():
            arguments: Json = call.function.arguments
            read = call.function.read
            if isinstance(read, ReadCall):
                with suppress(RecursionError, OverflowError):
                    arguments = _plain(dict(read.arguments))
            calls.append([call.function.name, arguments])
        role = "system" if message.role == "developer" else message.role
        who = [message.name] if message.name is not None and role in NAMED else []
        # Some clients keep the spaces around words beside calls, others drop them.
        words = message.text.strip() if calls else message.text
        digests.append(_extended(digests[-1], [role, words, calls, *who]))
    return digests


def _extended(digest: bytes, what: Json) -> bytes:
    text = json.dumps(what, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(digest + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _plain(value: Json) -> Json:
    """Return a value with its numbers as texts, so that 1 and 1.0 are the same."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    return repr(float(value))


# -------- What a program posts when it knows how well its agents did


class PostedReward(Body):
    """What the agents of a session have earned."""

    reward: float | None = None
    """Of every agent that spoke."""
    rewards: dict[str, float] = Field(default={}, max_length=1024)
    """Of agents by name, in place of `reward`."""
    success: float | None = Field(default=None, ge=0.0, le=1.0)
    """The success of the team as a whole."""
    info: dict[str, Any] = Field(default={}, max_length=64)
    """Further facts, kept with the episode."""

    def by_agent(self, team: Sequence[str]) -> Mapping[str, float]:
        """Return what each agent has earned."""
        shared = {} if self.reward is None else dict.fromkeys(team, self.reward)
        return {**shared, **self.rewards}


def read_reward(
    body: Json, team: Sequence[str], bounds: tuple[float, float] = (-math.inf, math.inf)
) -> PostedReward:
    """Return a reward; Refusal (400) if it pays no agent, or if an episode could not hold it.

    `bounds` are the least and the greatest reward of an agent.
    """
    reward = read_body(PostedReward, body)
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


# -------- The recorder
#
# A client that gets no answer sends its call again; OpenAI's own does so twice. A second sample would be one more turn of the episode,
# trained on by a reward that only the first one has earned. So a repeated call gets its first answer, and is counted once.

KEY, COUNT = "idempotency-key", "x-stainless-retry-count"
"""Headers that say that a call may be a repetition: a key of its own, or how often it was sent before."""
MOST = 4096
"""Answers, and rewards, that are remembered for repeated calls."""
K = TypeVar("K")
V = TypeVar("V")


def _remember(known: OrderedDict[K, V], name: K, value: V) -> None:
    known[name] = value
    known.move_to_end(name)
    while len(known) > MOST:
        known.popitem(last=False)


TASK = "x-kapelle-task"
"""Header that names a program's task: episodes of one task are one group."""
FILE = "episodes.jsonl"
_BEGINS = b'{"step":'
"""What every line of it begins with."""


class Recorder:
    """Records sessions, and hands them on when they are rewarded."""

    def __init__(
        self,
        agents: Agents,
        take: Callable[[ChatSession, PostedReward], Mapping[str, object]],
        drop: Callable[[ChatSession], None] | None = None,
        bounds: tuple[float, float] = (-math.inf, math.inf),
        lifetime: float = math.inf,
        called: Callable[[str, Peer | None], None] = lambda _name, _peer: None,
    ) -> None:
        """`take` gets each session that is over with its reward, and returns further facts for its caller.

        `drop` gets those that end without a reward. `bounds` are the least and the greatest reward of an agent; `lifetime` is how
        long a session is kept after its last call, in seconds, when others need its place. `called` gets session and connection of
        each call that asks about a session or rewards it.
        """
        self.sessions = Sessions(lifetime=lifetime)
        self._answers: OrderedDict[
            tuple[str, str, bytes], tuple[ChatSession, str | None, Chat, Sequence[Done]]
        ] = OrderedDict()
        """(session, agent, digest of the body) → the session, the call's key, and its answer."""
        self._rewards: OrderedDict[str, tuple[bytes, Mapping[str, Json]]] = OrderedDict()
        """Session → digest of its reward, and the answer to that."""
        self._rewarded, self._dropped, self._bounds, self._called = take, drop, bounds, called
        self._agents = agents

    def routes(self) -> Sequence[Route]:
        """Return its routes."""
        return (
            route("POST", "/v1/sessions", self.open),
            route("GET", "/v1/sessions/{name:path}", self.show),
            route("POST", "/v1/sessions/{name:path}", self.reward),
            route("DELETE", "/v1/sessions/{name:path}", self.drop),
            route("POST", "/v1/reward", self.reward),
        )

    async def open(self, call: Call) -> JsonAnswer:
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
        return JsonAnswer({"session": session.name})

    async def show(self, call: Call) -> JsonAnswer:
        """Return a session's turns so far."""
        self._called(call.path, call.peer)
        session = self.sessions.get(call.path)
        turns = [
            {"agent": turn.agent, "seen": turn.seen, "tokens": len(turn.completion_ids)}
            for turn in session.turns
        ]
        return JsonAnswer(
            {"session": session.name, "task": session.task, "turns": turns, **dict(session.counts)}
        )

    async def drop(self, call: Call) -> JsonAnswer:
        """End a session without a reward."""
        with self.sessions.ending(call.path) as ended:
            if self._dropped is not None:
                self._dropped(ended)
        return JsonAnswer({"session": ended.name, "turns": len(ended.turns), "deleted": True})

    async def reward(self, call: Call) -> JsonAnswer:
        """End a session with a reward."""
        name, slash, rest = call.path.partition("/")
        if slash and rest != "reward":
            raise Refusal(404, "There is no such path here.", None, "not_found")
        name = name or call.session or ""
        self._called(name, call.peer)
        reward = read_reward(call.body, self._agents.play.team.names, self._bounds)
        if self.sessions.known(name) is None and name in self._rewards:
            digest, told = self._rewards[name]
            if digest == _extended(b"", call.body):
                return JsonAnswer(dict(told))
            raise Refusal(
                404, "This session ended with its first reward, which stays.", None, "session_not_found"
            )
        if not self.sessions.get(name).turns:
            raise Refusal(409, "No agent has said anything in this session.", None, "session_empty")
        with self.sessions.ending(name) as ended:
            told = self._rewarded(ended, reward)
        said: dict[str, Json] = {"session": name, "turns": len(ended.turns), **dict(ended.counts), **told}
        _remember(self._rewards, name, (_extended(b"", call.body), said))
        return JsonAnswer(said)

    async def answers(self, chat: Chat, call: Call, join: Join) -> tuple[Chat, AsyncIterator[News | Done]]:
        """Return a chat with its prompt and session, and its answers, each recorded before its caller has it."""
        session = self.sessions.known(call.session)
        known = session and self._answers.get((session.name, chat.prompt.agent, _extended(b"", call.body)))
        key, count = call.headers.get(KEY), call.headers.get(COUNT, "0")
        if known and known[0] is session:
            _, known_key, known_chat, done = known
            if key == known_key if key is not None else count.isdecimal() and int(count[:9]) > 0:

                async def again() -> AsyncIterator[News | Done]:
                    for each in done:
                        yield each

                return known_chat, again()
        place = await self._place(chat, call)
        join(place.session)
        place.session.task = call.headers.get(TASK, place.session.task)
        chat = replace(chat, head=replace(chat.head, session=place.session.name))
        chat, answers = await self._asked(chat, place)
        return chat, self._kept(chat, place, answers, call)

    def team_answers(
        self, request: ChatRequest, call: Call, join: Join, answers: AsyncIterator[Spoken | PlayedAnswer]
    ) -> tuple[str, AsyncIterator[Spoken | PlayedAnswer]]:
        """Return the session of a call of the whole team, and its answers; all turns are recorded before the answer is told.

        Refusal (400) for several answers at once: they would be one session, and one of them would be rewarded for the others.
        """
        if request.n > 1:
            raise wrong(
                "The team's answers are recorded one at a time. Ask again, each time in a session of its own.",
                "n",
            )
        session = self.sessions.begin(call.session)
        join(session)
        session.task = call.headers.get(TASK, session.task)
        before = len(session.turns)

        async def kept() -> AsyncIterator[Spoken | PlayedAnswer]:
            async with aclosing(answers) as told:  # type: ignore[type-var]
                async for each in told:
                    if isinstance(each, PlayedAnswer):
                        for turn in each.episode.turns:
                            record(session, replace(turn, index=-1), before + turn.seen)
                    yield each

        return session.name, kept()

    async def _place(self, chat: Chat, call: Call) -> ContinuedAt:
        """Return where a call continues."""
        return self.sessions.place(chat.prompt.agent, chat.request, call.session, chat.reader)

    async def _asked(self, chat: Chat, place: ContinuedAt) -> tuple[Chat, AsyncIterator[News | Done]]:
        """Return a chat with its prompt, and its answers: a conversation that continues reads the very tokens of its beginning."""
        known = None
        if place.after is not None:
            turn, play = place.after.turn, self._agents.play
            policy = play.team.policy(place.agent).name
            renderer = agent_renderer(play.team[place.agent], play.engine.renderer(policy))
            read = turn.prompt_ids, turn.completion_ids, place.heard, place.after.before
            known = partial(renderer.extend, *read)
        chat = await chat.prompted(known)
        return chat, self._agents.answers(chat.prompt, listening=chat.request.stream)

    async def _kept(
        self, chat: Chat, place: ContinuedAt, answers: AsyncIterator[News | Done], call: Call
    ) -> AsyncIterator[News | Done]:
        done: list[Done] = []
        async with aclosing(answers) as told:  # type: ignore[type-var]
            async for each in told:
                if isinstance(each, Done):
                    play, completion = self._agents.play, each.completion
                    policy = play.team.policy(place.agent)
                    renderer = agent_renderer(play.team[place.agent], play.engine.renderer(policy.name))
                    heard, before = chat.prompt.messages, tuple[Message, ...]()
                    if place.after is not None:
                        before = place.after.before
                        past = place.after.turn.prompt_ids + place.after.turn.completion_ids
                        # Where earlier thoughts are left out, the prompt begins anew.
                        heard = place.heard if chat.prompt.ids[: len(past)] == past else heard
                    turn = Turn(
                        agent=place.agent,
                        policy=policy.name,
                        version=completion.version,
                        weights_hash=completion.weights_hash,
                        index=-1 if each.turn is None else each.turn,
                        seen=0,
                        prompt_ids=chat.prompt.ids,
                        completion_ids=completion.ids,
                        logprobs=completion.logprobs,
                        finish_reason=completion.finish_reason,
                        text=completion.text,
                        heard=heard,
                        trained=policy.trained,
                        constraint=completion.constraint,
                        thoughts=renderer.thoughts(chat.prompt.ids, completion.ids, completion.text)[1],
                    )
                    news = chat.prompt.messages if place.after is None else place.heard
                    conversation = (*before, *news, said(turn, renderer))
                    spoken = chat.said(completion.ids, completion.text)
                    self.sessions.keep(place, turn, spoken, conversation)
                    done.append(each)
                    if len(done) == chat.request.n and call.session is not None:
                        name = (place.session.name, place.agent, _extended(b"", call.body))
                        _remember(self._answers, name, (place.session, call.headers.get(KEY), chat, done))
                yield each


class EpisodeFile:
    """Writes rewarded sessions as episodes."""

    def __init__(self, folder: Path, team: Sequence[str]) -> None:
        """Append to a folder's episodes; raises OutputError if it cannot be written."""
        self._team = tuple(team)
        self._groups: dict[str, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / FILE
            self._written = 0
            if self.path.exists():
                try:
                    recorded, end, rest = _read_lines(self.path)
                except DataError as error:
                    raise DataError(f"{error} Or name another folder than {folder}.") from None
                if not rest.startswith(_BEGINS[: len(rest)]):
                    raise OutputError(
                        f"{self.path} ends with something that is not an episode. Name another folder, or end its last line."
                    )
                os.truncate(self.path, end)  # of a process that was killed while it wrote
                for episode in recorded:
                    self._groups.setdefault(episode.task.id, len(self._groups))
                    self._written += 1
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise OutputError(
                f"{folder} cannot be written: {error.strerror}. Name another folder."
            ) from error

    def take(self, session: ChatSession, reward: PostedReward) -> Mapping[str, object]:
        """Write an episode and return its number."""
        task = Task(session.task or session.name, "")
        spoke = {turn.agent for turn in session.turns}  # agents that said nothing earn nothing
        info = {"session": session.name, **dict(session.counts), **reward.info}
        earned = {agent: paid for agent, paid in reward.by_agent(self._team).items() if agent in spoke}
        episode = Episode(task, 0, self._team, tuple(session.turns), earned, reward.success, info)
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

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_recorded(folder: Path) -> list[Episode]:
    """Return the episodes that `--record` has written to a folder, in order; an incomplete last line is left out.

    Raises DataError if the file holds something else.
    """
    return _read_lines(folder / FILE)[0]


def _read_lines(path: Path) -> tuple[list[Episode], int, bytes]:
    """Return the episodes of a file's complete lines, where the last of these ends, and what follows it."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(content[:end].splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"Line {number} of {FILE} is no episode: {error}. Remove that line.") from None
    return [load_episode(row) for row in rows], end, content[end:]
