"""Records sessions of outside programs. A session becomes an episode when its reward is posted.

    POST /v1/sessions/NAME/reward   {"reward": 1.0}   or   {"rewards": {"planner": 0.5, "coder": 1.0}}
    POST /v1/turns/ID/reward        {"reward": 0.2}   for one turn, before the session's reward; ID is the response's
    `id`, or the turn's number

Each episode is a line in `episodes.jsonl`, in the format of a run's episodes (`runs.episode_json`). The line contains
the exact token ids, log-probs, agents, versions and hashes of the weights. Sessions without a reward are discarded.
"""

from __future__ import annotations

import fcntl
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

from kapelle.environments.grading.text.tool_call import ReadCall
from kapelle.errors import DataError, EpisodeError, OutputError
from kapelle.rollout.outcomes import LONGEST, in_range, plain
from kapelle.rollout.scene import as_message
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.services.http import Call, JsonAnswer, Peer, route
from kapelle.services.policy.agents import Agents, Chat, NewTokens, Sampled
from kapelle.services.policy.chat_form import NAMED, PLAINLY, ChatRequest, MessageReader, response_key
from kapelle.services.policy.speech import ParsedAnswer
from kapelle.services.policy.teams import Spoken, TeamAnswer
from kapelle.services.request_errors import Body, RequestError, busy, read_body, wrong
from kapelle.types import Episode, Json, Message, Task, Turn

# -------- Sessions
# An agent reads its earlier completions as the exact tokens that it sampled, so a call must be matched with the
# conversation that it continues. Callers specify their session in a header or in the URL. Without a session name, the
# conversation itself is matched: the call continues the longest known beginning that ends with a completion of this
# server. A conversation without a match (because the program edited or compacted its history) starts from an empty
# record, and is counted.

MOST_TURNS = 4096
"""The maximum number of turns of one session."""


@dataclass(eq=False, slots=True)
class ReadPrefix:
    """A completion that later calls of a conversation may continue."""

    session: ChatSession
    turn: Turn
    continued: int = 0
    """The number of completions that continue this completion."""
    before: tuple[Message, ...] = ()
    """The conversation up to this completion."""


@dataclass(eq=False, slots=True)
class ChatSession:
    """One run of a caller's program, with the turns of its agents."""

    name: str
    named: bool
    """Whether the caller has named the session. Other sessions are identified by their conversations."""
    task: str | None = None
    """The task that the caller specifies, or None if the program has its own task."""
    turns: list[Turn] = field(default_factory=list)
    responses: dict[str, list[int]] = field(default_factory=dict)
    """Mapping from the `id` of a response to the indices of its turns, one for each choice."""
    nodes: dict[tuple[str, bytes], list[ReadPrefix]] = field(default_factory=dict)
    """Mapping from an agent and the digest of a conversation up to a completion to the completions."""
    counts: Counter[str] = field(default_factory=Counter)
    """The counts of two events. Calls that continue the same completion as another call are counted as `branches`.
    Conversations without a known beginning, although the agent has already taken a turn, are counted as `restarts`."""
    under_way: int = 0
    """The number of completions in progress."""
    called: float = 0.0
    """The time of the last call, in seconds of the monotonic clock."""


Join = Callable[[ChatSession], None]
"""A function that counts the completions of a call in their session."""


@dataclass(frozen=True, slots=True)
class ContinuedAt:
    """The position in a session at which a call continues."""

    session: ChatSession
    agent: str
    after: ReadPrefix | None
    """The completion that the call continues, or None at the start of a conversation."""
    new_messages: tuple[Message, ...]
    """The messages after the completion that the call continues."""
    digest: bytes
    """The digest of the whole conversation."""
    completed_before: int
    """The number of complete turns of the session."""


class Sessions:
    """The open sessions, which may be used by only one thread."""

    def __init__(
        self, most: int = 1024, lifetime: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep at most `most` sessions. If there are more, sessions without a call for `lifetime` seconds are discarded."""
        self._most = most
        self._lifetime = lifetime
        self._clock = clock
        self._open: dict[str, ChatSession] = {}
        self.dropped = 0
        """The number of sessions that were discarded to make room."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[ChatSession]:
        return iter(self._open.values())

    def known(self, name: str | None) -> ChatSession | None:
        """Return the open session with the given name, or None if there is no such session."""
        return None if name is None else self._open.get(name)

    def get(self, name: str) -> ChatSession:
        """Return the open session with the given name. Raises RequestError (404) if there is no such session."""
        if name not in self._open:
            raise RequestError(
                404,
                "No open session has this name. A session begins with the first call of an agent.",
                None,
                "session_not_found",
            )
        return self._open[name]

    def turn(self, session: str | None, name: str) -> tuple[ChatSession, Turn]:
        """Return a turn and its session, identified by the `id` of the response or by the turn's index in a named session.

        Raises RequestError with the status 404 for an unknown turn, and with the status 400 for a response with several
        choices.
        """
        for each in self:
            if session not in (None, each.name):
                continue
            numbers = each.responses.get(response_key(name), ())
            if len(numbers) > 1:
                raise wrong(
                    f"This response has {len(numbers)} choices. Give the number of one of its turns: "
                    f"{', '.join(map(str, numbers))}.",
                    "turn",
                )
            for turn in each.turns:
                if turn.index in numbers or (session is not None and str(turn.index) == name):
                    return each, turn
        raise RequestError(
            404,
            "No open session has this turn. Use the `id` of a response, or a number from GET /v1/sessions/NAME.",
            "turn",
            "turn_not_found",
        )

    def begin(self, name: str | None = None) -> ChatSession:
        """Return a new session, or the session with the given name. Raises RequestError (429) if there is no room for a new session."""
        if (known := self.known(name)) is not None:
            known.called = self._clock()
            return known
        if len(self._open) >= self._most:
            # Drop the sessions that were idle for longer than the lifetime or, if there are none, the longest idle one
            # without a name.
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
                    f"{self._most} sessions are open. Post their rewards, or end them (DELETE /v1/sessions/NAME): {lasting}."
                )
            for each in leaving:
                del self._open[each.name]
            self.dropped += len(leaving)
        session = ChatSession(name or f"s-{secrets.token_hex(8)}", name is not None)
        self._open[session.name] = session
        session.called = self._clock()
        return session

    @contextmanager
    def ending(self, name: str, *, busy: bool = False) -> Iterator[ChatSession]:
        """Return a context manager that ends a session.

        If the block raises an error, the session stays open so that the caller can retry. Raises RequestError (409) if
        the session has completions in progress, unless `busy` is true.
        """
        session = self.get(name)
        if session.under_way and not busy:
            raise RequestError(
                409, "This session has completions in progress. Wait until they finish.", None, "session_busy"
            )
        del self._open[name]
        try:
            yield session
        except BaseException:
            self._open[name] = session
            raise

    def forget(self, over: Callable[[str], bool]) -> None:
        """Discard the sessions for which `over` returns true."""
        for name in [name for name in self._open if over(name)]:
            del self._open[name]

    def find(self, agent: str, request: ChatRequest, name: str | None) -> tuple[ReadPrefix, int] | None:
        """Return the completion that a conversation continues and the number of messages up to it, or None for a new conversation.

        If no name is given, all sessions without a name are searched.
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
        """Return the position at which a call continues, in a new session if necessary. The argument `reader` converts the new messages."""
        found = self.find(agent, request, name)
        session = self.begin(name) if found is None else found[0].session
        session.called = self._clock()
        if len(session.turns) + session.under_way + request.n > MOST_TURNS:
            raise busy(f"The session has reached its maximum of {MOST_TURNS} turns.")
        after, count = found or (None, 0)
        if after is not None:
            session.counts["branches"] += after.continued > 0
            after.continued += 1
        elif any(turn.agent == agent for turn in session.turns):
            session.counts["restarts"] += 1
        new = reader.messages(request.messages, count)
        digest = _digests(agent, request)[-1]
        return ContinuedAt(session, agent, after, new, digest, len(session.turns))

    def keep(
        self, place: ContinuedAt, turn: Turn, answer: ParsedAnswer, conversation: tuple[Message, ...] = ()
    ) -> Turn:
        """Record a turn, and return it with its index.

        The argument `answer` is the turn as the caller receives it, and `conversation` is the conversation up to the
        turn.
        """
        session = place.session
        kept = record(session, turn, place.completed_before)
        words, calls = answer.words, [[call.name, _plain(call.arguments)] for call in answer.calls]
        digest = _extended(place.digest, ["assistant", words.strip() if calls else words, calls])
        session.nodes.setdefault((place.agent, digest), []).append(
            ReadPrefix(session, kept, before=conversation)
        )
        return kept


def record(session: ChatSession, turn: Turn, seen: int) -> Turn:
    """Append a turn to a session, and return it with its index."""
    kept = replace(turn, index=len(session.turns) if turn.index < 0 else turn.index, completed_before=seen)
    session.turns.append(kept)
    return kept


def _digests(agent: str, request: ChatRequest) -> list[bytes]:
    """Return a digest for every prefix of a conversation, including the empty prefix. All digests include the tools."""
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
        # Some clients drop the spaces around content next to calls.
        words = message.text.strip() if calls else message.text
        digests.append(_extended(digests[-1], [role, words, calls, *who]))
    return digests


def _extended(digest: bytes, what: Json) -> bytes:
    text = json.dumps(what, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(digest + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _plain(value: Json) -> Json:
    """Return a JSON value in which numbers are replaced by strings, so that 1 and 1.0 are equal."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    return repr(float(value))


# -------- Rewards


class TurnReward(Body):
    """A request to set the reward of one turn."""

    reward: float


class PostedReward(Body):
    """A request to set the rewards of the agents in a session."""

    reward: float | None = None
    """The reward of every agent that has taken a turn."""
    rewards: dict[str, float] = Field(default={}, max_length=1024)
    """The rewards of agents by name, as an alternative to `reward`."""
    answer: str | None = None
    """The program's answer to its question, as an alternative to a reward. The answer is graded by `environment.questions`."""
    success: float | None = Field(default=None, ge=0.0, le=1.0)
    """The success of the team."""
    info: dict[str, Any] = Field(default={}, max_length=64)
    """Additional facts that are stored in the `info` of the episode."""
    failed: str | None = Field(default=None, max_length=LONGEST)
    """A description of the program's failure, which is stored as `info["program"]`. If a failure is given, calls in progress
    are discarded."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """All values that the request adds to the `info` of the episode."""
        return self.info if self.failed is None else {**self.info, "program": self.failed}

    def by_agent(self, team: Sequence[str]) -> Mapping[str, float]:
        """Return the reward of each agent."""
        shared = {} if self.reward is None else dict.fromkeys(team, self.reward)
        return {**shared, **self.rewards}


def read_reward(
    body: Json,
    team: Sequence[str],
    bounds: tuple[float, float] = (-math.inf, math.inf),
    *,
    grades: bool = False,
) -> PostedReward:
    """Parse a reward. Raises RequestError (400) if no agent receives a reward, or for a value that an episode cannot hold.

    The argument `bounds` contains the minimum and maximum reward of an agent. If `grades` is true, an answer may be
    posted instead of a reward.
    """
    reward = read_body(PostedReward, body)
    if reward.answer is not None and not grades:
        raise wrong(
            "This run has no grader for answers. Set `environment.questions`, or post `reward`.", "answer"
        )
    if reward.answer is not None and (
        reward.reward is not None or reward.rewards or reward.success is not None
    ):
        raise wrong(
            "`answer` is graded, so it cannot be combined with a reward. Post only one of them.", "answer"
        )
    if reward.answer is None and reward.reward is None and not reward.rewards:
        raise wrong("Post `reward`, for all agents with a turn, or `rewards` by agent.", "reward")
    for name in reward.rewards:
        if name not in team:
            raise wrong(f"`rewards` contains an unknown agent. The team has: {', '.join(team)}.", "rewards")
    values = {f"rewards.{name}": value for name, value in reward.rewards.items()}
    if reward.reward is not None:
        values = {"reward": reward.reward, **values}
    for place, value in values.items():
        if not in_range(value, bounds):
            raise wrong(
                f"`{place}` is {value:g}, which is outside the range [{bounds[0]:g}, {bounds[1]:g}] of this "
                "run's rewards (`environment.rewards`). Post a reward in that range; the session is still "
                "open.",
                place,
            )
    try:
        plain(reward.info, "info")
    except EpisodeError as error:
        raise wrong(str(error), "info") from None
    return reward


# -------- The recorder
# A client that receives no response repeats its call; OpenAI's client does so twice. A second sample would be another
# turn of the episode, which would be trained with a reward that belongs to the first sample. A repeated call therefore
# receives its first response.

KEY, COUNT = "idempotency-key", "x-stainless-retry-count"
"""The headers that identify a repeated call, which contain the key of the call or the number of earlier attempts."""
MOST = 4096
"""The maximum number of responses and rewards that are kept for repeated calls."""
K = TypeVar("K")
V = TypeVar("V")


def _remember(known: OrderedDict[K, V], name: K, value: V) -> None:
    known[name] = value
    known.move_to_end(name)
    while len(known) > MOST:
        known.popitem(last=False)


TASK = "x-kapelle-task"
"""The header that contains the name of a program's task. The episodes of one task form a group."""
FILE = "episodes.jsonl"
_BEGINS = b'{"step":'
"""The first bytes of each line of the file."""


class Recorder:
    """Records sessions, and passes them on when their rewards are posted."""

    def __init__(
        self,
        agents: Agents,
        take: Callable[[ChatSession, PostedReward], Mapping[str, object]],
        drop: Callable[[ChatSession], None] | None = None,
        bounds: tuple[float, float] = (-math.inf, math.inf),
        lifetime: float = math.inf,
        called: Callable[[str, Peer | None], None] = lambda _name, _peer: None,
        *,
        grades: bool = False,
    ) -> None:
        """Create the recorder. The function `take` receives each session with its reward, and returns additional fields for the caller.

        The function `drop` receives sessions that end without a reward. The argument `bounds` contains the minimum and
        maximum reward of an agent. The argument `lifetime` is the number of seconds after its last call for which a
        session is kept if other sessions need room. The function `called` receives the session and connection of each
        call that shows or rewards a session. The argument `grades` states whether an answer can be posted instead of a
        reward.
        """
        self._grades = grades
        self.sessions = Sessions(lifetime=lifetime)
        self._answers: OrderedDict[
            tuple[str, str, bytes], tuple[ChatSession, str | None, Chat, Sequence[Sampled]]
        ] = OrderedDict()
        """Mapping from a session, an agent and the digest of a body to the session, the key of the call, and its response."""
        self._rewards: OrderedDict[str, tuple[bytes, Mapping[str, Json]]] = OrderedDict()
        """Mapping from a session to the digest of its reward and the response to the call."""
        self._on_reward, self._on_drop, self._bounds, self._called = take, drop, bounds, called
        self._agents = agents

    def routes(self) -> Sequence[Route]:
        """Return the routes of the recorder."""
        return (
            route("POST", "/v1/sessions", self.open),
            route("GET", "/v1/sessions/{name:path}", self.show),
            route("POST", "/v1/sessions/{name:path}", self.reward),
            route("DELETE", "/v1/sessions/{name:path}", self.drop),
            route("POST", "/v1/reward", self.reward),
            route("POST", "/v1/turns/{name:path}", self.reward_turn),
        )

    async def open(self, call: Call) -> JsonAnswer:
        """Handle a call that begins a session, and return the name of the session."""
        if call.body:
            raise RequestError(
                400, "The body must be an empty object; the task is set in a header.", None, "invalid_request"
            )
        session = self.sessions.begin(call.session)
        session.named = True
        session.task = call.headers.get(TASK, session.task)
        return JsonAnswer({"session": session.name})

    async def show(self, call: Call) -> JsonAnswer:
        """Handle a call that reads the turns of a session so far."""
        self._called(call.path, call.peer)
        session = self.sessions.get(call.path)
        turns = [
            {
                "turn": turn.index,
                "agent": turn.agent,
                "completed_before": turn.completed_before,
                "tokens": len(turn.completion_ids),
                "reward": turn.reward,
            }
            for turn in session.turns
        ]
        return JsonAnswer(
            {"session": session.name, "task": session.task, "turns": turns, **dict(session.counts)}
        )

    async def drop(self, call: Call) -> JsonAnswer:
        """Handle a call that ends a session without a reward."""
        with self.sessions.ending(call.path) as ended:
            if self._on_drop is not None:
                self._on_drop(ended)
        return JsonAnswer({"session": ended.name, "turns": len(ended.turns), "deleted": True})

    async def reward(self, call: Call) -> JsonAnswer:
        """Handle a call that ends a session with a reward."""
        name, slash, rest = call.path.partition("/")
        if slash and rest != "reward":
            raise RequestError(404, "There is no such path on this server.", None, "not_found")
        name = name or call.session or ""
        self._called(name, call.peer)
        reward = read_reward(call.body, self._agents.setup.team.names, self._bounds, grades=self._grades)
        if self.sessions.known(name) is None and name in self._rewards:
            digest, answer = self._rewards[name]
            if digest == _extended(b"", call.body):
                return JsonAnswer(dict(answer))
            raise RequestError(
                404,
                "This session ended with its first reward, which cannot be changed.",
                None,
                "session_not_found",
            )
        if not self.sessions.get(name).turns:
            raise RequestError(409, "This session has no turns yet.", None, "session_empty")
        with self.sessions.ending(name, busy=reward.failed is not None) as ended:
            facts = self._on_reward(ended, reward)
        row: dict[str, Json] = {"session": name, "turns": len(ended.turns), **dict(ended.counts), **facts}
        _remember(self._rewards, name, (_extended(b"", call.body), row))
        return JsonAnswer(row)

    async def reward_turn(self, call: Call) -> JsonAnswer:
        """Handle a call that sets or replaces the reward of a turn. The session of the turn continues."""
        name, _, rest = call.path.partition("/")
        if rest != "reward":
            raise RequestError(404, "There is no such path on this server.", None, "not_found")
        reward = read_body(TurnReward, call.body).reward
        session, turn = self.sessions.turn(call.session, name)
        self._called(session.name, call.peer)
        self._reward_turn(session, turn, reward)
        return JsonAnswer({"session": session.name, "turn": turn.index, "reward": reward})

    def _reward_turn(self, session: ChatSession, turn: Turn, reward: float) -> None:
        """Store the reward of a turn in its session."""
        session.turns[session.turns.index(turn)] = replace(turn, reward=reward)

    async def answers(
        self, chat: Chat, call: Call, join: Join
    ) -> tuple[Chat, AsyncIterator[NewTokens | Sampled]]:
        """Return a chat with its prompt and its session, and its completions.

        Each completion is recorded before the caller receives it.
        """
        session = self.sessions.known(call.session)
        known = session and self._answers.get((session.name, chat.prompt.agent, _extended(b"", call.body)))
        key, count = call.headers.get(KEY), call.headers.get(COUNT, "0")
        if known and known[0] is session:
            _, known_key, known_chat, done = known
            if key == known_key if key is not None else count.isdecimal() and int(count[:9]) > 0:

                async def first_answers() -> AsyncIterator[NewTokens | Sampled]:
                    for each in done:
                        yield each

                return known_chat, first_answers()
        place = await self._place(chat, call)
        join(place.session)
        place.session.task = call.headers.get(TASK, place.session.task)
        chat = replace(chat, head=replace(chat.head, session=place.session.name))
        chat, answers = await self._begin(chat, place)
        return chat, self._recorded(chat, place, answers, call)

    def team_answers(
        self, request: ChatRequest, call: Call, join: Join, answers: AsyncIterator[Spoken | TeamAnswer]
    ) -> tuple[str, AsyncIterator[Spoken | TeamAnswer]]:
        """Return the session of a call to the whole team, and the team's answers. All turns are recorded before the answer is sent.

        Raises RequestError (400) if several answers are requested, because they would belong to one session with one
        reward.
        """
        if request.n > 1:
            raise wrong(
                "The team's answers are recorded one at a time. Set `n` to 1.",
                "n",
            )
        session = self.sessions.begin(call.session)
        join(session)
        session.task = call.headers.get(TASK, session.task)
        before = len(session.turns)

        async def recorded() -> AsyncIterator[Spoken | TeamAnswer]:
            async with aclosing(answers) as coming:  # type: ignore[type-var]
                async for each in coming:
                    if isinstance(each, TeamAnswer):
                        for turn in each.episode.turns:
                            record(session, replace(turn, index=-1), before + turn.completed_before)
                    yield each

        return session.name, recorded()

    async def _place(self, chat: Chat, call: Call) -> ContinuedAt:
        """Return the position in a session at which a call continues."""
        return self.sessions.place(chat.prompt.agent, chat.request, call.session, chat.reader)

    async def _begin(self, chat: Chat, place: ContinuedAt) -> tuple[Chat, AsyncIterator[NewTokens | Sampled]]:
        """Return a chat with its prompt, and its completions.

        A continued conversation keeps the exact tokens of its beginning.
        """
        known = None
        if place.after is not None:
            turn = place.after.turn
            known = partial(
                chat.renderer.extend,
                turn.prompt_ids,
                turn.completion_ids,
                place.new_messages,
                place.after.before,
            )
        chat = await chat.prompted(known)
        return chat, self._agents.answers(chat.prompt, listening=chat.request.listens)

    async def _recorded(
        self, chat: Chat, place: ContinuedAt, answers: AsyncIterator[NewTokens | Sampled], call: Call
    ) -> AsyncIterator[NewTokens | Sampled]:
        done: list[Sampled] = []
        async with aclosing(answers) as coming:  # type: ignore[type-var]
            async for each in coming:
                if isinstance(each, Sampled):
                    completion, renderer = each.completion, chat.renderer
                    policy = self._agents.setup.team.policy(place.agent)
                    new_messages, before = chat.prompt.messages, tuple[Message, ...]()
                    if place.after is not None:
                        before = place.after.before
                        past = place.after.turn.prompt_ids + place.after.turn.completion_ids
                        # A template that removes earlier thoughts results in a new prompt.
                        new_messages = (
                            place.new_messages if chat.prompt.ids[: len(past)] == past else new_messages
                        )
                    turn = Turn(
                        agent=place.agent,
                        policy=policy.name,
                        version=completion.version,
                        weights_hash=completion.weights_hash,
                        index=-1 if each.turn is None else each.turn,
                        completed_before=0,
                        prompt_ids=chat.prompt.ids,
                        completion_ids=completion.ids,
                        logprobs=completion.logprobs,
                        finish_reason=completion.finish_reason,
                        text=completion.text,
                        new_messages=new_messages,
                        trained=policy.trained,
                        constraint=completion.constraint,
                        usage=completion.usage,
                        thoughts=renderer.thoughts(chat.prompt.ids, completion.ids, completion.text)[1],
                    )
                    new = chat.prompt.messages if place.after is None else place.new_messages
                    conversation = (*before, *new, as_message(turn, renderer))
                    answer = chat.parsed(completion)
                    kept = self.sessions.keep(place, turn, answer, conversation)
                    place.session.responses.setdefault(response_key(chat.head.identity), []).append(
                        kept.index
                    )
                    done.append(each)
                    if len(done) == chat.request.n and call.session is not None:
                        name = (place.session.name, place.agent, _extended(b"", call.body))
                        _remember(self._answers, name, (place.session, call.headers.get(KEY), chat, done))
                yield each


class EpisodeFile:
    """Writes sessions that have received a reward to a file of episodes."""

    def __init__(self, folder: Path, team: Sequence[str]) -> None:
        """Open the file in the folder for appending. Raises OutputError if this is impossible or if another server writes to the folder."""
        self._team = tuple(team)
        self._groups: dict[str, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / FILE
            self._file = self.path.open("ab", buffering=0)
            try:
                self._begin(folder)
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise OutputError(
                f"{folder} cannot be written: {error.strerror}. Choose another folder."
            ) from error

    def _begin(self, folder: Path) -> None:
        """Lock the file, read its episodes, and remove an incomplete last line that a killed process has left."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"Another server writes to {self.path}. Stop it, or choose another folder."
            ) from None
        except OSError:  # the disk does not support locks
            pass
        try:
            recorded, end, rest = _read_lines(self.path)
        except DataError as error:
            raise DataError(f"{error} Alternatively, choose a folder other than {folder}.") from None
        if not rest.startswith(_BEGINS[: len(rest)]):
            raise OutputError(
                f"The last line of {self.path} is not an episode. Remove it, or choose another folder."
            )
        self._file.truncate(end)
        for episode in recorded:
            self._groups.setdefault(episode.task.id, len(self._groups))
        self._written = len(recorded)

    def take(self, session: ChatSession, reward: PostedReward) -> Mapping[str, object]:
        """Write the session as an episode, and return the index of the episode."""
        task = Task(session.task or session.name, "")
        acted = {turn.agent for turn in session.turns}  # agents without a turn receive no reward
        info = {"session": session.name, **dict(session.counts), **reward.facts}
        rewards = {agent: value for agent, value in reward.by_agent(self._team).items() if agent in acted}
        episode = Episode(task, 0, self._team, tuple(session.turns), rewards, reward.success, info)
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
            raise RequestError(
                507, f"The episode could not be written: {error.strerror}.", None, "disk"
            ) from None
        self._written += 1
        return {"episode": self._written - 1}

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_recorded(folder: Path | str) -> list[Episode]:
    """Return the episodes that `--record` has written to a folder, in order. An incomplete last line is ignored.

    Raises DataError for a folder without episodes, and for a file with another format.
    """
    try:
        return _read_lines(Path(folder) / FILE)[0]
    except OSError as error:
        raise DataError(
            f"The recorded episodes of {folder} cannot be read ({error.strerror}). Give the folder that was "
            "set with `--record`."
        ) from None


def _read_lines(path: Path) -> tuple[list[Episode], int, bytes]:
    """Return the episodes in the complete lines of a file, the end of the last complete line, and the bytes after it."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(content[:end].splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"Line {number} of {FILE} is not an episode: {error}. Remove that line."
            ) from None
    return [load_episode(row) for row in rows], end, content[end:]
