"""The policy server: its routes, how much it takes on, the page on which people talk with the team, and the port.

with serve_policy(play, "demo", Binding(), ServingLimits()) as server:
    print(server.url)
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from starlette.responses import Response
from starlette.routing import Route

from kapelle.engines.rollout.protocol import ServesCallers
from kapelle.errors import did_you_mean
from kapelle.rollout.play import Play
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import Binding
from kapelle.services.http import SESSION, Application, Call, EventStream, HttpServer, JsonAnswer, route
from kapelle.services.policy.agents import Agents, Done, prompted, read_chat
from kapelle.services.policy.chat_form import ChatRequest, read_request
from kapelle.services.policy.recording import EpisodeFile, Recorder
from kapelle.services.policy.teams import TeamChat, Teams
from kapelle.services.refusals import Refusal, busy
from kapelle.types import Json

T = TypeVar("T")

# -------- How many answers are under way at once, and how long each may take


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What a policy server takes on."""

    calls: int = 1024
    """Answers under way at once, each of `n` choices counted; further calls are refused for now (429)."""
    seconds: float = 600.0
    """Longest duration of one call, its time in the queue included."""
    idle: float = 3600.0
    """Seconds after its last call for which a recorded session keeps its place when others need one."""


class Admission:
    """Counts answers under way; used by one thread."""

    def __init__(self, limits: ServingLimits) -> None:
        self.limits = limits
        self.under_way = 0

    def admit(self, answers: int) -> Ticket:
        """Return a ticket for `answers` answers; Refusal (429) if there is no room for them."""
        if self.under_way + answers > self.limits.calls:
            raise busy(
                f"{self.under_way} answers are under way, of {self.limits.calls} at most. Try again later."
            )
        self.under_way += answers
        return Ticket(self, answers)


class Ticket:
    """Room for the answers of one call, until `release`; releasing it twice does nothing more."""

    def __init__(self, admission: Admission, answers: int) -> None:
        self._admission, self._answers = admission, answers
        self._then: list[Callable[[], None]] = []
        seconds = admission.limits.seconds
        self.until = asyncio.get_running_loop().time() + seconds
        self.late = Refusal(504, f"No answer within {seconds:g} s.", None, "timeout")

    def then(self, work: Callable[[], None]) -> None:
        """Call `work` when the room is given back."""
        self._then.append(work)

    def release(self) -> None:
        """Give the room back."""
        self._admission.under_way -= self._answers
        self._answers = 0
        while self._then:
            self._then.pop()()

    async def bounded(self, pieces: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """Yield pieces within the call's time, then give the room back; Refusal (504) when it takes longer."""
        async with AsyncExitStack() as closing:
            closing.callback(self.release)
            await closing.enter_async_context(aclosing(pieces))  # type: ignore[type-var]
            while True:
                try:
                    async with asyncio.timeout_at(self.until):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise self.late from None
                yield piece


# -------- The page on which people talk with the team: nothing inline, and nothing from elsewhere

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The page may load and call its own server alone."""
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/chat.css": ("chat.css", "text/css; charset=utf-8"),
}


def page_routes() -> Sequence[Route]:
    """Return the routes of the page."""

    def shown(path: str, name: str, kind: str) -> Route:
        content = files("kapelle.services.policy").joinpath("page", name).read_bytes()

        async def show(_call: Call) -> Response:
            return Response(content, headers={"content-type": kind, "content-security-policy": PAGE_POLICY})

        return route("GET", path, show)

    return [shown(path, *file) for path, file in PAGE_FILES.items()]


# -------- The routes


class PolicyService:
    """Answers chat completions by the agents of a team."""

    def __init__(
        self, name: str, agents: Agents, limits: ServingLimits, started: int, recorder: Recorder | None = None
    ) -> None:
        """Serve a team under a name; `started` is the time that clients are told its models are from, in Unix seconds."""
        self.name = name
        self._agents = agents
        self._teams = Teams(agents)
        self._admission = Admission(limits)
        self._started = started
        self._recorder = recorder

    def routes(self) -> Sequence[Route]:
        """Return its routes."""
        recording = () if self._recorder is None else self._recorder.routes()
        return (
            route("GET", "/health", self.health),
            route("GET", "/v1/models", self.models),
            route("GET", "/v1/models/{name:path}", self.model),
            route("POST", "/v1/chat/completions", self.chat),
            *recording,
            *page_routes(),
        )

    async def health(self, call: Call) -> JsonAnswer:
        """Return that it serves, and how much room is left."""
        busy, most = self.under_way, self._admission.limits.calls
        return JsonAnswer({"status": "ok", "under_way": busy, "room": most - busy})

    async def models(self, call: Call) -> JsonAnswer:
        """Return the team and its agents as models."""
        return JsonAnswer({"object": "list", "data": [self._row(name) for name in self.names]})

    async def model(self, call: Call) -> JsonAnswer:
        """Return one of them."""
        return JsonAnswer(self._row(self._known(call.path)))

    async def chat(self, call: Call) -> Response:
        """Return what an agent, or the team, answers."""
        request = read_request(call.body)
        model = self._known(request.model)
        ticket = self._admission.admit(request.n)
        try:
            ask = self._ask_team if model == self.name else self._ask_agent
            async with asyncio.timeout_at(ticket.until):
                answer = await ask(model, request, call, ticket)
        except TimeoutError:
            ticket.release()
            raise ticket.late from None
        except BaseException:
            ticket.release()
            raise
        if not isinstance(answer, EventStream):  # which releases it when it ends
            ticket.release()
        return answer

    async def _ask_agent(self, model: str, request: ChatRequest, call: Call, ticket: Ticket) -> Response:
        chat, messages = read_chat(self._agents, model, model.rpartition("/")[2], request)
        if self._recorder is not None:
            chat, answers = await self._recorder.answers(chat, messages, call, ticket)
        else:
            chat = await prompted(chat, self._agents, messages, None)
            answers = self._agents.answers(chat.prompt, listening=request.stream)
        headers = {} if chat.session is None else {SESSION: chat.session}
        if request.stream:
            return await _stream(ticket.bounded(chat.chunks(answers)), headers)
        async with aclosing(answers) as told:  # type: ignore[type-var]
            done = [each async for each in told if isinstance(each, Done)]
        count = request.top_logprobs
        others = [await self._agents.alternatives(chat.prompt, d.completion.ids, count) for d in done]
        return JsonAnswer(chat.whole(done, others), headers=headers)

    async def _ask_team(self, model: str, request: ChatRequest, call: Call, ticket: Ticket) -> Response:
        self._teams.check(request)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        answers = self._teams.answers(request, seed, listening=request.stream)
        session = None
        if self._recorder is not None:
            session, answers = self._recorder.team_answers(request, call, ticket, answers)
        chat = TeamChat(model, request, session)
        headers = {} if session is None else {SESSION: session}
        if request.stream:
            return await _stream(ticket.bounded(chat.chunks(answers)), headers)
        return JsonAnswer(await chat.whole(answers), headers=headers)

    @property
    def under_way(self) -> int:
        """How many answers are being made."""
        return self._admission.under_way

    @property
    def names(self) -> list[str]:
        """What clients may name as `model`."""
        return [self.name, *(f"{self.name}/{agent}" for agent in self._agents.play.team.names)]

    def _known(self, model: str) -> str:
        if model not in self.names:
            hint = did_you_mean(model[:200], self.names)
            raise Refusal(404, f"There is no such model here.{hint}", "model", "model_not_found")
        return model

    def _row(self, model: str) -> Json:
        return {"id": model, "object": "model", "created": self._started, "owned_by": "kapelle"}


async def _stream(pieces: AsyncGenerator[Json | str, None], headers: Mapping[str, str]) -> EventStream:
    # Its first piece is taken here: closing an async generator that was never begun would not release what it holds.
    return EventStream(pieces, headers, [await anext(pieces)])


# -------- The server: the engine's event loop, the routes, and the port


@dataclass(frozen=True, slots=True)
class PolicyServer:
    """A policy server that listens."""

    url: str
    models: Sequence[str]
    """What clients may name as `model`."""
    service: PolicyService
    http: HttpServer

    def drain(self, seconds: float) -> bool:
        """Accept no more calls, answer those that were accepted, and return whether all were within `seconds`."""
        return self.http.drain(seconds)


@contextmanager
def serve_policy(
    play: Play, name: str, binding: Binding, limits: ServingLimits, record: Path | None = None
) -> Iterator[PolicyServer]:
    """Serve a team while the block runs; `record` is the folder of rewarded episodes, None to record nothing.

    Raises ConfigError if the port is taken, OutputError for a folder that cannot be written.
    """
    if isinstance(play.engine, ServesCallers):
        play.engine.serve()
    with ExitStack() as closing:
        agents = Agents(play, closing.enter_context(LoopThread()))
        recorder = None
        if record is not None:
            file = EpisodeFile(record, play.team.names)
            closing.callback(file.close)
            recorder = Recorder(file, agents, limits.idle)
        service = PolicyService(name, agents, limits, int(time.time()), recorder)
        with HttpServer(binding, Application(binding, service.routes())) as http:
            yield PolicyServer(http.url, service.names, service, http)
