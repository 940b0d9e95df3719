"""Implements the server that outside programs call while a run trains on their episodes.

The calls are handled by the episodes of the run's loop (`environments.external`). The loop samples, trains and
publishes weights as with any other environment.
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
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kapelle.engines.rollout.protocol import Completion, ServesCallers
from kapelle.environment import Outcome
from kapelle.environments.external import (
    ANSWER,
    External,
    Over,
    Switchboard,
    WaitingEpisode,
    switched_on,
)
from kapelle.environments.programs.processes import ProgramEnded
from kapelle.errors import EpisodeError
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.credentials import without_secrets
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import TOKEN, Binding
from kapelle.services.http import (
    SESSION,
    Application,
    Call,
    HttpServer,
    JsonAnswer,
    Peer,
    error_response,
    plain_path,
    route,
)
from kapelle.services.policy.agents import (
    Agents,
    Chat,
    NewTokens,
    Sampled,
    endpoint_failed,
    ends_of_one_call,
    too_long,
)
from kapelle.services.policy.chat_form import SamplingBody
from kapelle.services.policy.recording import ChatSession, ContinuedAt, PostedReward, Recorder
from kapelle.services.policy.requested_forms import check_length, constraint_of
from kapelle.services.policy.service import PolicyService, ServingLimits
from kapelle.services.request_errors import RequestError
from kapelle.team import ANY_TEAM
from kapelle.types import Json, Turn


@contextmanager
def serve_outside(
    environment: External,
    setup: RolloutSetup,
    say: Callable[[str, str], None],
    key: str | None = None,
    door: Path | None = None,
) -> Iterator[None]:
    """Let outside programs run the episodes of a run while the block runs. Raises ConfigError if the port is in use.

    Episodes find the server by `key`, which is the key of the environment by default. Programs in sandboxes call the
    server through the Unix socket `door`. These programs can only call agents. The function `say` reports the URL that
    programs call (`serving`) and failures of programs (`program`) to the user.
    """
    if isinstance(setup.engine, ServesCallers):
        setup.engine.serve()  # respond immediately: runs with outside programs are not reproducible anyway
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
    agents = Agents(setup, LoopThread(), environment.tool_form)
    desk = OutsideDesk(board, agents, environment.absence, grades=environment.questions is not None)
    limits = ServingLimits(calls=65_536, seconds=setup.patience.episode)
    # If there are several agents, a program must specify one, because a guess could train the wrong agent.
    alone = setup.team.names[0] if len(setup.team.names) == 1 else None
    service = PolicyService(ANY_TEAM, agents, limits, int(time.time()), desk, alone, setup.run)
    # An open connection shows that its program is alive, so the server keeps idle ones open.
    idle = setup.patience.environment
    watched = (desk.presence.opened, desk.presence.closed)
    inner = Application(binding, service.routes(), agents.metrics.called)
    application: ASGIApp = inner
    if door is not None:
        application, board.door = at_the_door(inner, binding.token), str(door)
    with HttpServer(binding, application, idle, *watched, door=door) as server:
        board.url = server.url
        with switched_on(key or environment.key, board), environment.forking(board):
            say(
                "serving",
                f"outside programs call {server.url}/v1; the agents are {', '.join(service.names[1:])}",
            )
            yield


CALLED_FROM_SANDBOXES = re.compile(
    r"/sessions/([^/]+)/v1/"
    r"(chat/completions|completions|responses(/[^/]+)?|messages(/count_tokens)?|models(/.+)?)"
)
"""A regular expression for the calls that a program in a sandbox may make. Such a program can call the agents in its own
session, but cannot get tasks or post rewards."""
MOST_AT_ONCE = 64
"""The maximum number of simultaneous calls of one program in a sandbox. A further call receives the status 429."""


def at_the_door(application: Application, token: str | None) -> ASGIApp:
    """Return an application that accepts all calls over TCP, but only `CALLED_FROM_SANDBOXES` over a Unix socket.

    Programs in sandboxes have no token, so the token is added to their calls.
    """
    under_way: Counter[str] = Counter()

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["client"] is not None:
            await application(scope, receive, send)
            return
        found = CALLED_FROM_SANDBOXES.fullmatch(plain_path(scope["path"]))
        if found is None:
            why = "A program in a sandbox can only call its agents."
            await error_response(RequestError(404, why, None, "not_found"))(scope, receive, send)
            return
        session = found[1]
        if under_way[session] >= MOST_AT_ONCE:
            why = f"{MOST_AT_ONCE} calls are in progress. Wait until one of them finishes."
            full = RequestError(429, why, None, "rate_limit_exceeded")
            await application.refused(full, scope)(scope, receive, send)
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
    """Records sessions that are episodes of the run."""

    def __init__(
        self, board: Switchboard, agents: Agents, absence: float = math.inf, *, grades: bool = False
    ) -> None:
        """Create the desk.

        The argument `absence` is the number of seconds for which a program may be disconnected. The argument `grades`
        states whether answers are graded.
        """
        self._board = board
        self.presence = Presence(self._dead, absence)
        bounds = agents.setup.environment.reward_range
        super().__init__(
            agents, self._finish, self._give_up, bounds, called=self.presence.called, grades=grades
        )

    def routes(self) -> Sequence[Route]:
        """Return the routes of the recorder and the routes for tasks."""
        return (*super().routes(), route("POST", "/v1/task", self.task))

    async def task(self, call: Call) -> JsonAnswer:
        """Wait for an episode, and return its task and its session."""
        if call.body:
            raise RequestError(400, "The body must be an empty object.", None, "invalid_request")
        episode = await self._take(call)
        return JsonAnswer({"session": episode.name, "task": episode.given, "seed": episode.seed})

    def _dead(self, name: str, seconds: float) -> None:
        episode = self._board.running(name)
        if episode is not None:
            with suppress(Over):
                why = (
                    f"Its program closed its last connection {seconds:g} s ago without posting a reward "
                    "(`environment.absence`). Use one client for the whole episode, call GET "
                    f"/v1/sessions/{name} while the program does other work, or set a greater "
                    "`environment.absence`."
                )
                episode.fail(ProgramEnded(why))

    async def _take(self, call: Call) -> WaitingEpisode:
        taken = self._board.take()
        try:
            episode = await asyncio.wrap_future(taken)
            episode.take()
        except Over:
            raise _over() from None
        except asyncio.CancelledError:
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                self._board.offer(taken.result())
            raise
        self.sessions.begin(episode.name).named = False
        self.presence.begin(episode.name, call.peer)
        return episode

    async def _place(self, chat: Chat, call: Call) -> ContinuedAt:
        for each in (self.sessions, self.presence):
            each.forget(lambda session: self._board.running(session) is None)
        name = call.session
        if name is None:
            found = self.sessions.find(chat.prompt.agent, chat.request, None)
            name = (await self._take(call)).name if found is None else found[0].session.name
        if self._board.running(name) is None:
            raise _over(self._board.why_over(name))
        self.presence.called(name, call.peer)
        return self.sessions.place(chat.prompt.agent, chat.request, name, chat.reader)

    async def _begin(self, chat: Chat, place: ContinuedAt) -> tuple[Chat, AsyncIterator[NewTokens | Sampled]]:
        for name in sorted(_IGNORED & chat.request.model_fields_set):
            self._agents.warn_once(
                f"A program has set `{name}`, which has no effect: in training, sampling follows the recipe."
            )
        request = chat.request.model_copy(update={"chat_template_kwargs": {}})
        chat = replace(chat, request=request)
        return chat, self._answers_of_episode(chat, place)  # the episode creates the prompt

    async def _answers_of_episode(self, chat: Chat, place: ContinuedAt) -> AsyncIterator[NewTokens | Sampled]:
        episode = self._board.running(place.session.name)
        if episode is None:
            raise _over()
        messages = chat.prompt.messages if place.after is None else place.new_messages
        limits = (chat.request.max_tokens, chat.request.max_completion_tokens)
        constraint = constraint_of(chat.request, chat.reader, self._agents.setup, place.agent, training=True)
        own = self._agents.setup.team[place.agent].sampling
        sampling = replace(chat.request.sampling(own), constraint=constraint or own.constraint)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, own.max_tokens))
        await check_length(chat.request, sampling, self._agents.setup, place.agent)
        request: Mapping[str, Json] = {
            "messages": [[message.role, message.content, message.structured] for message in messages],
            "after": None if place.after is None else place.after.turn.index,
            "max_tokens": min((limit for limit in limits if limit is not None), default=None),
            "stop": _stops(chat),
            "constraint": None if constraint is None else [constraint.kind, constraint.text],
        }
        calls: list[asyncio.Future[Mapping[str, Json]]] = []
        try:
            calls += (asyncio.wrap_future(episode.call(place.agent, request)) for _ in range(chat.request.n))
            for choice, coming in enumerate(calls):
                row = await coming
                if "too_long" in row:
                    raise too_long(row["too_long"])
                if "refused" in row:
                    raise endpoint_failed(row["refused"], refused=True)
                if "failed" in row:
                    raise _over(without_secrets(row["failed"]))
                completion = Completion(
                    tuple(row["ids"]),
                    tuple(row["logprobs"]),
                    row["finish_reason"],
                    row["text"],
                    row["version"],
                    row["weights_hash"],
                    usage=None if row["usage"] is None else tuple(row["usage"]),
                )
                sampled = Sampled(choice, completion, row["prompt_tokens"], row["turn"])
                self._agents.metrics.answered(place.agent, *sampled.usage)
                yield sampled
        except Over:
            raise _over() from None
        finally:
            for left in calls:
                left.cancel()  # the caller has disconnected

    def _finish(self, session: ChatSession, reward: PostedReward) -> Mapping[str, object]:
        """Finish the episode of a session that has received its reward."""
        episode = self._board.running(session.name)
        if episode is None:
            raise _over()
        acted = {turn.agent for turn in session.turns}
        rewards = {name: value for name, value in reward.by_agent(episode.agents).items() if name in acted}
        answer = {} if reward.answer is None else {ANSWER: reward.answer}
        info = {**reward.facts, **answer, "session": session.name, **dict(session.counts)}
        try:
            episode.finish(Outcome(rewards, reward.success, info))
        except Over:
            raise _over() from None
        return {}

    def _reward_turn(self, session: ChatSession, turn: Turn, reward: float) -> None:
        episode = self._board.running(session.name)
        if episode is None:
            raise _over(self._board.why_over(session.name))
        super()._reward_turn(session, turn, reward)
        episode.turn_rewards[turn.index] = reward

    def _give_up(self, session: ChatSession) -> None:
        episode = self._board.running(session.name)
        if episode is None:
            raise _over()
        with suppress(Over):
            episode.fail(EpisodeError("Its program has deleted its session."))


_IGNORED = {"temperature", "top_p", "chat_template_kwargs", *SamplingBody.model_fields} - {"stop"}
"""Parameters that would make the log-probs differ from those of the recipe's sampling distribution."""


class Presence:
    """Keeps track of the open connections of programs that run episodes. The object is used in the event loop of the server.

    When a program terminates, its connections are closed. A program that continues without a connection must make a
    call before the deadline.
    """

    def __init__(self, dead: Callable[[str, float], None], seconds: float) -> None:
        """Call `dead` for each session that has had no open connection for `seconds`."""
        self._dead, self._seconds = dead, seconds
        self._carried: dict[Peer, set[str]] = {}
        """Mapping from an open connection to the sessions that have used it."""
        self._open: dict[str, set[Peer]] = {}
        """Mapping from a session to the open connections that it has used."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """The timers of the sessions without an open connection."""
        self._fetched: dict[str, Peer] = {}
        """Mapping from a session to the connection that has fetched its task, until the first call of the session."""

    def opened(self, peer: Peer) -> None:
        """Register a new connection."""
        self._carried[peer] = set()

    def closed(self, peer: Peer) -> None:
        """Register that a connection was closed."""
        for name in self._carried.pop(peer, ()):
            if name in self._open:
                self._open[name].discard(peer)
                self._wait(name)

    def begin(self, name: str, peer: Peer | None) -> None:
        """Start watching a session whose task was fetched by `peer`."""
        if peer is not None:
            self._open[name] = set()
            self.called(name, peer)
            self._fetched[name] = peer

    def called(self, name: str, peer: Peer | None) -> None:
        """Register a call in a session, if the session is watched."""
        if name not in self._open or peer is None:
            return
        self._stop(name)
        fetcher = self._fetched.pop(name, peer)
        if fetcher != peer and fetcher in self._carried:
            # The program that fetched the task was a launcher: from now on, the connections of its workers count.
            self._carried[fetcher].discard(name)
            self._open[name].discard(fetcher)
        if peer in self._carried:  # otherwise the connection is already closed
            self._carried[peer].add(name)
            self._open[name].add(peer)
        self._wait(name)

    def forget(self, over: Callable[[str], bool]) -> None:
        """Stop watching the sessions for which `over` returns true."""
        for name in [name for name in self._open if over(name)]:
            self._stop(name)
            self._fetched.pop(name, None)
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
    """Return the stop strings of a completion in addition to the agent's own stop strings."""
    constrained = chat.prompt.sampling.constraint is not None
    return (*chat.request.stops, *(() if constrained else ends_of_one_call(chat.request, chat.reader.form)))


def _over(why: str | None = None) -> RequestError:
    message = (
        "This session, or the training run, has ended." if why is None else f"This session has ended. {why}"
    )
    return RequestError(410, message, None, "session_over")
