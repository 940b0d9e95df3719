"""Calls that are sent again because their answers were lost: answered as the first time, and counted once.

A client that hears nothing asks again by itself, OpenAI's own does so twice. What an agent would say the second time would be one
more turn of the episode, trained on by a reward that only what was heard has earned.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kapelle.services.http.application import Call
from kapelle.services.policy.agents import Done
from kapelle.services.policy.chats import Chat
from kapelle.services.policy.sessions import Session
from kapelle.types import Json

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
