"""Which conversation a call continues, so that an agent reads its own earlier words as the very tokens it sampled.

A caller names its session by a header or by the address that it calls; else the conversation itself tells: the one
whose beginning, up to an answer given here, is the longest. A conversation that begins otherwise than all that are
known (its history was edited or compacted) starts anew, and is counted.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kapelle.services.http.refusals import Refusal, busy
from kapelle.services.policy.chat_form import NAMED, ChatMessage, ChatRequest, parse_answer
from kapelle.types import Json, Turn

MOST_TURNS = 4096
"""Of one session."""


@dataclass(eq=False, slots=True)
class Node:
    """An answer that conversations may continue from."""

    session: Session
    turn: Turn
    continued: int = 0
    """How many answers continue from it."""


@dataclass(eq=False, slots=True)
class Session:
    """One run of somebody's program: the turns that its agents have taken."""

    name: str
    named: bool
    """Whether the caller named it; others are found by their conversations."""
    task: str | None = None
    """The task that the caller says it works at; None for one of its own."""
    turns: list[Turn] = field(default_factory=list)
    nodes: dict[tuple[str, bytes], list[Node]] = field(default_factory=dict)
    """(agent, digest of a conversation up to an answer) → such answers."""
    counts: Counter[str] = field(default_factory=Counter)
    """`branches`: continued from an answer that was continued before; `restarts`: began anew, though the agent had
    spoken before."""
    under_way: int = 0
    """Answers that are being sampled."""
    called: float = 0.0
    """When it was last called, by the clock of `Sessions`, in seconds."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call continues."""

    session: Session
    agent: str
    after: Node | None
    """The answer that it continues from; None where it begins."""
    heard: tuple[ChatMessage, ...]
    """The messages since."""
    digest: bytes
    """Of the whole conversation."""
    seen: int
    """How many turns of the session were complete."""
    tools: bool
    """Whether calls are looked for in the answer."""


class Sessions:
    """All sessions under way; used by one thread."""

    def __init__(
        self, most: int = 1024, lifetime: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep at most `most` sessions, each for `lifetime` seconds after its last call.

        Where there are more, the one that was called longest ago and was not named makes room for a new one.
        """
        self._most = most
        self._lifetime = lifetime
        self._clock = clock
        self._open: dict[str, Session] = {}
        self.dropped = 0
        """How many ended without a reward because nobody called them, or to make room."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._open.values())

    def get(self, name: str) -> Session:
        """Return a session; Refusal (404) for one that is not under way."""
        if name not in self._open:
            raise Refusal(404, "There is no such session under way.", None, "session_not_found")
        return self._open[name]

    def known(self, name: str | None) -> Session | None:
        """Return the session of that name, where it is under way."""
        return None if name is None else self._open.get(name)

    def begin(self, name: str | None = None) -> Session:
        """Return a new session, or the one of that name; Refusal (429) where there is no room."""
        if name is not None and name in self._open:
            return self._called(self._open[name])
        if len(self._open) >= self._most:
            self._make_room()
        session = Session(name or f"s-{secrets.token_hex(8)}", name is not None)
        self._open[session.name] = session
        return self._called(session)

    def _called(self, session: Session) -> Session:
        session.called = self._clock()
        return session

    def _make_room(self) -> None:
        now = self._clock()
        idle = [each for each in self._open.values() if not each.under_way]
        leaving = [each for each in idle if now - each.called > self._lifetime]
        if not leaving:
            leaving = sorted((each for each in idle if not each.named), key=lambda each: each.called)[:1]
        if not leaving:
            raise busy(
                f"{self._most} sessions are under way. Post their rewards, end those that will get none (DELETE "
                f"/v1/sessions/NAME), or try again later: {_lasting(self._lifetime)}."
            )
        for each in leaving:
            del self._open[each.name]
        self.dropped += len(leaving)

    def end(self, name: str) -> Session:
        """Return a session that is over."""
        session = self.get(name)
        if session.under_way:
            raise Refusal(
                409, "Answers of this session are under way. Wait for them first.", None, "session_busy"
            )
        return self._open.pop(name)

    def open_again(self, session: Session) -> None:
        """Take back a session that was ended for nothing."""
        self._open[session.name] = session

    def forget(self, over: Callable[[str], bool]) -> None:
        """Drop the sessions that are over without a reward, told by their names."""
        for name in [name for name in self._open if over(name)]:
            del self._open[name]

    def find(self, agent: str, request: ChatRequest, name: str | None) -> tuple[Node, int] | None:
        """Return the answer that a conversation continues, and how many messages end with it; None where it begins.

        Without a name all sessions are searched that were not named either.
        """
        digests = _digests(agent, request)
        searched = [s for s in self if (s.name == name if name is not None else not s.named)]
        for count in range(len(request.messages), 0, -1):
            if request.messages[count - 1].role == "assistant":
                nodes = [node for s in searched for node in s.nodes.get((agent, digests[count]), ())]
                if nodes:
                    return min(reversed(nodes), key=lambda node: node.continued), count
        return None

    def place(self, agent: str, request: ChatRequest, name: str | None) -> Place:
        """Return where a call continues; it may begin a session."""
        found = self.find(agent, request, name)
        session = self.begin(name) if found is None else self._called(found[0].session)
        if len(session.turns) + session.under_way + request.n > MOST_TURNS:
            raise busy(f"The session has {MOST_TURNS} turns, and takes no more.")
        after, count = found or (None, 0)
        if after is not None:
            session.counts["branches"] += after.continued > 0
            after.continued += 1
        elif any(turn.agent == agent for turn in session.turns):
            session.counts["restarts"] += 1
        heard, digest = tuple(request.messages[count:]), _digests(agent, request)[-1]
        return Place(session, agent, after, heard, digest, len(session.turns), request.calls_tools)

    def keep(self, place: Place, turn: Turn) -> Turn:
        """Record an answer and return it with its number."""
        session = place.session
        kept = record(session, turn, place.seen)
        said = parse_answer(turn.text) if place.tools else None
        words = turn.text if said is None else said.content or ""
        calls = [] if said is None else [[call.name, _plain(call.arguments)] for call in said.calls]
        digest = _extended(place.digest, ["assistant", words.strip() if calls else words, calls])
        session.nodes.setdefault((place.agent, digest), []).append(Node(session, kept))
        return kept


def _lasting(lifetime: float) -> str:
    return (
        "a session lasts until its reward"
        if math.isinf(lifetime)
        else f"one that nobody calls is dropped after {lifetime:g} s"
    )


def record(session: Session, turn: Turn, seen: int) -> Turn:
    """Append a turn to a session and return it with its number."""
    kept = replace(turn, index=len(session.turns) if turn.index < 0 else turn.index, seen=seen)
    session.turns.append(kept)
    return kept


def _digests(agent: str, request: ChatRequest) -> list[bytes]:
    """Return a digest of every beginning of a conversation, the empty one first; tools are part of all."""
    tools = [tool.model_dump() for tool in request.tools] if request.calls_tools else []
    digests = [_extended(b"", [agent, tools])]
    for message in request.messages:
        calls = [[call.function.name, _read(call.function.arguments)] for call in message.tool_calls or ()]
        role = "system" if message.role == "developer" else message.role
        who = [message.name] if message.name is not None and role in NAMED else []
        # Clients keep the spaces around words beside calls, or drop them.
        words = message.text.strip() if calls else message.text
        digests.append(_extended(digests[-1], [role, words, calls, *who]))
    return digests


def _extended(digest: bytes, what: Json) -> bytes:
    text = json.dumps(what, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(digest + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _read(arguments: str) -> Json:
    try:
        return _plain(json.loads(arguments))
    except (ValueError, RecursionError, OverflowError):
        return arguments


def _plain(value: Json) -> Json:
    """Return a value with numbers as texts, so that 1.0 read in two ways is the same."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    return repr(float(value))
