"""The server that outside programs call while a run trains on what its agents do for them.

Calls go to the episodes of the run's own loop (`environments.external`), which samples, trains and publishes as with any
other environment. This module handles no weights.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kapelle.engines.rollout.protocol import Completion, ServesCallers
from kapelle.environment import Outcome
from kapelle.environments.external import (
    External,
    Over,
    ProgramEnded,
    Switchboard,
    WaitingEpisode,
    switched_on,
)
from kapelle.errors import EpisodeError
from kapelle.rollout.play import Play
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import TOKEN, Binding
from kapelle.services.http import (
    SESSION,
    Application,
    Call,
    HttpServer,
    JsonAnswer,
    Peer,
    answer_refusal,
    route,
)
from kapelle.services.policy.agents import Agents, Chat, Done, News, ends_of_one_call, too_long
from kapelle.services.policy.asked_forms import form_asked
from kapelle.services.policy.recording import ChatSession, ContinuedAt, PostedReward, Recorder
from kapelle.services.policy.service import PolicyService, ServingLimits
from kapelle.services.refusals import Refusal
from kapelle.team import ANY_TEAM
from kapelle.types import Json


@contextmanager
def serve_outside(
    environment: External,
    play: Play,
    say: Callable[[str, str], None],
    key: str | None = None,
    door: Path | None = None,
) -> Iterator[None]:
    """Let outside programs play the episodes of a run while the block runs; ConfigError if the port is taken.

    Its worlds find the server by `key`, or the environment's own. Programs in sandboxes call by a Unix socket, the `door`, and
    get answers of the agents only. `say` tells the run's user where programs call (`serving`), and later what has happened to them (`program`).
    """
    if isinstance(play.engine, ServesCallers):
        play.engine.serve()  # programs wait for each answer; their runs do not repeat to the bit anyway
    environment.check_server()
    binding = Binding(
        environment.host,
        environment.port,
        os.environ.get(TOKEN),
        certificate=None if environment.tls_cert is None else Path(environment.tls_cert),
        key=None if environment.tls_key is None else Path(environment.tls_key),
        address=environment.address,
    )
    board = Switchboard("", binding.token, partial(say, "program"))
    agents = Agents(play, LoopThread(), environment.tool_form)
    desk = OutsideDesk(board, agents, environment.absence)
    limits = ServingLimits(calls=65_536, seconds=play.patience.episode)
    # Of several agents a program names the one that it means: a guess would train the wrong one.
    alone = play.team.names[0] if len(play.team.names) == 1 else None
    service = PolicyService(ANY_TEAM, agents, limits, int(time.time()), desk, alone, play.run)
    # An open connection shows that a program lives, so the server keeps those that a program may still use.
    idle = play.patience.environment
    watched = (desk.presence.opened, desk.presence.closed)
    application: ASGIApp = Application(binding, service.routes(), agents.metrics.called)
    if door is not None:
        application, board.door = at_the_door(application, binding.token), str(door)
    with HttpServer(binding, application, idle, *watched, door=door) as server:
        board.url = server.url
        with switched_on(key or environment.key, board):
            say("serving", f"outside programs call {server.url}/v1, agents as {', '.join(service.names[1:])}")
            yield


CALLED_FROM_SANDBOXES = re.compile(
    r"/sessions/([^/]+)/v1/(chat/completions|completions|responses(/[^/]+)?|models(/.+)?)"
)
"""What a program in a sandbox may ask: answers of the agents, in its own session. Not tasks, and not its reward."""
MOST_AT_ONCE = 64
"""Calls of one such program at once; a further one is told to wait."""


def at_the_door(application: ASGIApp, token: str | None) -> ASGIApp:
    """Return an application that answers all that comes over TCP, and what is in `CALLED_FROM_SANDBOXES` where it comes by a Unix socket.

    The token, which programs in sandboxes do not learn, is added to what they ask.
    """
    under_way: Counter[str] = Counter()

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["client"] is not None:
            await application(scope, receive, send)
            return
        found = CALLED_FROM_SANDBOXES.fullmatch(scope["path"])
        if found is None:
            refusal = Refusal(
                404, "A program in a sandbox can call its agents, and nothing else.", None, "not_found"
            )
            await answer_refusal(refusal)(scope, receive, send)
            return
        session = found[1]
        if under_way[session] >= MOST_AT_ONCE:
            refusal = Refusal(
                429, f"{MOST_AT_ONCE} calls are under way. Wait for one.", None, "rate_limit_exceeded"
            )
            await answer_refusal(refusal)(scope, receive, send)
            return
        kept = [
            (name, value)
            for name, value in scope["headers"]
            if name not in (b"authorization", SESSION.encode())
        ]
        if token is not None:
            kept.append((b"authorization", f"Bearer {token}".encode()))
        under_way[session] += 1
        try:
            await application({**scope, "headers": kept}, receive, send)
        finally:
            under_way[session] -= 1
            if not under_way[session]:
                del under_way[session]

    return answered


class OutsideDesk(Recorder):
    """Records sessions whose turns are taken in episodes of the run."""

    def __init__(self, board: Switchboard, agents: Agents, absence: float = math.inf) -> None:
        self._board = board
        self.presence = Presence(self._dead, absence)
        bounds = agents.play.environment.reward_range
        super().__init__(agents, self._finish, self._give_up, bounds, called=self.presence.called)

    def routes(self) -> Sequence[Route]:
        """Return its routes."""
        return (*super().routes(), route("POST", "/v1/task", self.task))

    async def task(self, call: Call) -> JsonAnswer:
        """Wait for an episode to play, and return its task and session."""
        if call.body:
            raise Refusal(400, "Ask for a task with an empty object.", None, "invalid_request")
        seat = await self._take(call)
        data = seat.task.data
        task = {"id": seat.task.id, "split": data["split"], "index": data["index"]}
        return JsonAnswer({"session": seat.name, "task": task, "seed": seat.seed})

    def _dead(self, name: str, seconds: float) -> None:
        seat = self._board.seat(name)
        if seat is not None:
            with suppress(Over):
                why = (
                    f"Its program closed its last connection {seconds:g} s ago, posted no reward and has not called since "
                    "(`environment.absence`). One that works on for longer keeps a connection open (one client for the whole "
                    f"episode), asks GET /v1/sessions/{name} meanwhile, or has a greater `environment.absence`."
                )
                seat.fail(ProgramEnded(why))

    async def _take(self, call: Call) -> WaitingEpisode:
        taken = self._board.take()
        try:
            seat = await asyncio.wrap_future(taken)
            seat.take()
        except Over:
            raise _over() from None
        except asyncio.CancelledError:
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                self._board.offer(taken.result())
            raise
        self.sessions.begin(seat.name).named = False
        self.presence.begin(seat.name, call.peer)
        return seat

    async def _place(self, chat: Chat, call: Call) -> ContinuedAt:
        for each in (self.sessions, self.presence):
            each.forget(lambda session: self._board.seat(session) is None)
        name = call.session
        if name is None:
            found = self.sessions.find(chat.prompt.agent, chat.request, None)
            name = (await self._take(call)).name if found is None else found[0].session.name
        if self._board.seat(name) is None:
            raise _over(self._board.why_over(name))
        self.presence.called(name, call.peer)
        return self.sessions.place(chat.prompt.agent, chat.request, name, chat.reader)

    async def _asked(self, chat: Chat, place: ContinuedAt) -> tuple[Chat, AsyncIterator[News | Done]]:
        return chat, self._answered(chat, place)  # the episode makes the prompt

    async def _answered(self, chat: Chat, place: ContinuedAt) -> AsyncIterator[News | Done]:
        seat = self._board.seat(place.session.name)
        if seat is None:
            raise _over()
        heard = chat.prompt.messages if place.after is None else place.heard
        limits = (chat.request.max_tokens, chat.request.max_completion_tokens)
        asked_form = form_asked(chat.request, chat.reader, self._agents.play, place.agent)
        asked: Mapping[str, Json] = {
            "messages": [[message.role, message.content, message.structured] for message in heard],
            "after": None if place.after is None else place.after.turn.index,
            "max_tokens": min((limit for limit in limits if limit is not None), default=None),
            "stop": _stops(chat),
            "constraint": None if asked_form is None else [asked_form.kind, asked_form.text],
        }
        calls: list[asyncio.Future[Mapping[str, Json]]] = []
        try:
            calls += (asyncio.wrap_future(seat.call(place.agent, asked)) for _ in range(chat.request.n))
            for choice, coming in enumerate(calls):
                said = await coming
                if "too_long" in said:
                    raise too_long(said["too_long"])
                completion = Completion(
                    tuple(said["ids"]),
                    tuple(said["logprobs"]),
                    said["finish_reason"],
                    said["text"],
                    said["version"],
                    said["weights_hash"],
                )
                self._agents.metrics.spoke(place.agent, said["prompt_tokens"], len(completion.ids))
                yield Done(choice, completion, said["prompt_tokens"], said["turn"])
        except Over:
            raise _over() from None
        finally:
            for left in calls:
                left.cancel()  # the caller went away

    def _finish(self, session: ChatSession, reward: PostedReward) -> Mapping[str, object]:
        """Take a rewarded session back to its episode."""
        seat = self._board.seat(session.name)
        if seat is None:
            raise _over()
        spoke = {turn.agent for turn in session.turns}
        rewards = {name: paid for name, paid in reward.by_agent(seat.agents).items() if name in spoke}
        info = {**reward.info, "session": session.name, **dict(session.counts)}
        try:
            seat.finish(Outcome(rewards, reward.success, info))
        except Over:
            raise _over() from None
        return {}

    def _give_up(self, session: ChatSession) -> None:
        seat = self._board.seat(session.name)
        if seat is None:
            raise _over()
        with suppress(Over):
            seat.fail(EpisodeError("Its program has given it up, by DELETE of its session."))


class Presence:
    """Which programs with an episode have a connection open; lives in the server's event loop.

    When a program ends, however it does, its connections close. A program that works on without one shows that it lives by
    calling again in time.
    """

    def __init__(self, dead: Callable[[str, float], None], seconds: float) -> None:
        """Call `dead` with a session that has had no connection for `seconds`."""
        self._dead, self._seconds = dead, seconds
        self._carried: dict[Peer, set[str]] = {}
        """Open connection → the sessions whose calls came by it."""
        self._open: dict[str, set[Peer]] = {}
        """Session → the open connections by which its calls came."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Sessions without an open connection."""
        self._asked: dict[str, Peer] = {}
        """Session → the connection that has asked for its task and not called in it since."""

    def opened(self, peer: Peer) -> None:
        """Learn of a new connection."""
        self._carried[peer] = set()

    def closed(self, peer: Peer) -> None:
        """Learn that a connection is gone."""
        for name in self._carried.pop(peer, ()):
            if name in self._open:
                self._open[name].discard(peer)
                self._wait(name)

    def begin(self, name: str, peer: Peer | None) -> None:
        """Watch a session from now on; `peer` asked for its task."""
        if peer is not None:
            self._open[name] = set()
            self.called(name, peer)
            self._asked[name] = peer

    def called(self, name: str, peer: Peer | None) -> None:
        """Learn of a call in a session; one that is not watched is ignored."""
        if name not in self._open or peer is None:
            return
        self._stop(name)
        asked = self._asked.pop(name, peer)
        if asked != peer and asked in self._carried:
            # The program that asked has handed its task on, as a launcher does to its workers: their connections count from now on.
            self._carried[asked].discard(name)
            self._open[name].discard(asked)
        if peer in self._carried:  # else it is gone already
            self._carried[peer].add(name)
            self._open[name].add(peer)
        self._wait(name)

    def forget(self, over: Callable[[str], bool]) -> None:
        """Stop watching the sessions whose names are `over`."""
        for name in [name for name in self._open if over(name)]:
            self._stop(name)
            self._asked.pop(name, None)
            for peer in self._open.pop(name):
                self._carried[peer].discard(name)

    def _wait(self, name: str) -> None:
        if not self._open[name] and name not in self._timers and not math.isinf(self._seconds):
            self._timers[name] = asyncio.get_running_loop().call_later(self._seconds, self._over, name)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _over(self, name: str) -> None:
        del self._timers[name], self._open[name]
        self._dead(name, self._seconds)


def _stops(chat: Chat) -> tuple[str, ...]:
    """Return what ends the answer beside the agent's own strings."""
    held = chat.prompt.sampling.constraint is not None
    return (*chat.request.stops, *(() if held else ends_of_one_call(chat.request, chat.reader.form)))


def _over(why: str | None = None) -> Refusal:
    said = (
        "This session is over, or training is; it gets no more answers."
        if why is None
        else f"This session is over. {why}"
    )
    return Refusal(410, said, None, "session_over")
