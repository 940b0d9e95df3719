"""The policy server: its routes, how much it takes on, the page on which people talk with the team, and the port.

with serve_policy(play, "demo", Binding(), ServingLimits()) as server:
    print(server.url)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.routing import Route

from kapelle.engines.rollout.protocol import HasQueue, ServesCallers
from kapelle.environment import PlayedFromOutside, offers
from kapelle.environments.grading.text.tool_call import Form
from kapelle.errors import did_you_mean
from kapelle.rollout.play import Play
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import Binding
from kapelle.services.http import SESSION, Application, Call, EventStream, HttpServer, JsonAnswer, route
from kapelle.services.policy.agents import Agents, Chat, read_chat
from kapelle.services.policy.chat_form import ChatRequest, Head, read_request
from kapelle.services.policy.completions import CompletionForm
from kapelle.services.policy.embeddings import Embedder
from kapelle.services.policy.recording import ChatSession, EpisodeFile, Recorder
from kapelle.services.policy.responses import KeptResponses, ResponseForm
from kapelle.services.policy.responses_form import renamed
from kapelle.services.policy.service_metrics import KIND as METRICS_KIND
from kapelle.services.policy.teams import TeamChat, team_answers
from kapelle.services.refusals import Refusal, busy, wrong
from kapelle.team import ANY_TEAM, own_name
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


class Ticket:
    """Room for the answers of one call, until `release`; further releases have no effect."""

    def __init__(self, service: PolicyService, answers: int) -> None:
        """Take the room; Refusal (429) if there is none."""
        limits = service.limits
        if service.under_way + answers > limits.calls:
            raise busy(
                f"{service.under_way} answers are under way, of {limits.calls} at most. Try again later."
            )
        service.under_way += answers
        self._service, self._answers = service, answers
        self._session: ChatSession | None = None
        self.until = asyncio.get_running_loop().time() + limits.seconds
        self.late = Refusal(504, f"No answer within {limits.seconds:g} s.", None, "timeout")

    def join(self, session: ChatSession) -> None:
        """Count the answers as under way in a session too."""
        self._session = session
        session.under_way += self._answers

    def release(self) -> None:
        """Give the room back."""
        for counts in (self._service, self._session):
            if counts is not None:
                counts.under_way -= self._answers
        self._answers = 0

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


async def show_file(content: bytes, kind: str, _call: Call) -> Response:
    """Return a file of the page."""
    return Response(content, headers={"content-type": kind, "content-security-policy": PAGE_POLICY})


# -------- The routes


@dataclass(frozen=True, slots=True)
class Asked:
    """A call that is being answered."""

    whole: Callable[[], Awaitable[Json]]
    events: Callable[[], AsyncIterator[Json | str]]
    failed: Callable[[Refusal], Json]
    """What a stream ends with that fails on the way."""
    headers: Mapping[str, str] = field(default_factory=dict)
    named: bool = False
    """Whether events are named."""


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The form of a call of chat completions."""

    request: ChatRequest
    failed = staticmethod(Refusal.row)

    async def whole(self, asked: Chat | TeamChat, answers: AsyncIterator[Any]) -> Json:
        """Return the answer."""
        return await asked.whole(answers)

    def events(self, asked: Chat | TeamChat, answers: AsyncIterator[Any]) -> AsyncIterator[Json | str]:
        """Yield the answer in pieces."""
        return asked.chunks(answers)


class PolicyService:
    """Answers chat completions by the agents of a team."""

    def __init__(
        self,
        name: str,
        agents: Agents,
        limits: ServingLimits,
        started: int,
        recorder: Recorder | None = None,
        spokesman: str | None = None,
        run: str = "",
        embedder: Embedder | None = None,
    ) -> None:
        """Serve a team under a name; `started` is the time that clients are told its models are from, in Unix seconds.

        In training, where every team has one name, `run` is a second one: the run's, by which the team is known where it is served.

        Of a team that outside programs play, which has no workflow here, `spokesman` is the agent that answers calls of the team.
        """
        self.name, self.limits = name, limits
        self._spokesman, self._embedder = spokesman, embedder
        self._run = run.replace("/", "-") or name
        self.under_way = 0
        """How many answers are being made; used by one thread."""
        self._agents = agents
        self._started = started
        self._recorder = recorder
        self._kept = KeptResponses(
            lambda session: recorder is None or recorder.sessions.known(session) is not None
        )

    def routes(self) -> Sequence[Route]:
        """Return its routes."""
        page = files("kapelle.services.policy").joinpath("page")
        return (
            route("GET", "/health", self.health),
            route("GET", "/v1/models", self.models),
            route("GET", "/v1/models/{name:path}", self.model),
            route("POST", "/v1/chat/completions", self.chat),
            route("POST", "/v1/responses", self.respond),
            route("POST", "/v1/completions", self.complete),
            route("POST", "/v1/embeddings", self.embed),
            route("GET", "/metrics", self.metrics),
            *self._kept.routes(),
            *(() if self._recorder is None else self._recorder.routes()),
            *(
                route("GET", path, partial(show_file, page.joinpath(name).read_bytes(), kind))
                for path, (name, kind) in PAGE_FILES.items()
            ),
        )

    async def health(self, call: Call) -> JsonAnswer:
        """Return that it serves, and how much room is left."""
        room = self.limits.calls - self.under_way
        return JsonAnswer({"status": "ok", "under_way": self.under_way, "room": room})

    async def models(self, call: Call) -> JsonAnswer:
        """Return the team and its agents as models."""
        beside = [] if self._embedder is None else [self._embedder.name]
        return JsonAnswer({"object": "list", "data": [self._row(name) for name in (*self.names, *beside)]})

    async def model(self, call: Call) -> JsonAnswer:
        """Return one of them."""
        if self._embedder is not None and call.path == self._embedder.name:
            return JsonAnswer(self._row(call.path))
        return JsonAnswer(self._row(self._known(call.path)))

    async def chat(self, call: Call) -> Response:
        """Return what an agent, or the team, answers."""
        return await self._answer(call, ChatForm(read_request(call.body)))

    async def respond(self, call: Call) -> Response:
        """Return the same in the form of the Responses API."""
        form = ResponseForm(call, self._kept)
        try:
            return await self._answer(form.call, form, named=True)
        except Refusal as refusal:
            raise renamed(refusal) from None

    async def complete(self, call: Call) -> Response:
        """Return what an agent writes behind a plain prompt."""
        form = CompletionForm.read(call.body)
        model = self._asked(form.given.model)
        if self._recorder is not None:
            raise Refusal(
                400,
                "Sessions record conversations, and a plain prompt is none. Ask for a chat completion here.",
                None,
                "not_recorded",
            )
        if model == self.name:
            raise wrong("A team answers questions. Name an agent in `model`.", "model")

        async def ask(_ticket: Ticket) -> Asked:
            asked = await form.ask(self._agents, model)
            return Asked(partial(form.whole, asked), partial(form.events, asked), form.failed)

        return await self._within(form.answers, ask, stream=form.given.stream)

    async def embed(self, call: Call) -> Response:
        """Return texts as vectors. Without an embedder OpenAI's client raises NotFoundError at once, without a retry."""
        asked = call.body.get("model") if isinstance(call.body, dict) else None
        if self._embedder is None:
            raise Refusal(
                404,
                "There is no embedding model here: the models of this server are the agents of a team, which answer in words. Start it "
                "with `--embedder MODEL`, or give the embedder of your program a `base_url` and a key of its own.",
                "model",
                "model_not_found",
            )
        if isinstance(asked, str) and asked != self._embedder.name:
            raise Refusal(
                404, f"The embedding model here is '{self._embedder.name}'.", "model", "model_not_found"
            )
        ticket = Ticket(self, 1)
        try:
            async with asyncio.timeout_at(ticket.until):
                return JsonAnswer(await self._embedder.answer(call.body))
        except TimeoutError:
            raise ticket.late from None
        finally:
            ticket.release()

    async def metrics(self, call: Call) -> Response:
        """Return what Prometheus reads."""
        engine = self._agents.play.engine
        gauges: dict[str, tuple[str, float]] = {
            "kapelle_answers_in_flight": ("Answers that are being made.", self.under_way),
            "kapelle_answers_most": ("Answers that may be made at once (`--calls`).", self.limits.calls),
            "kapelle_responses_kept": ("Responses from which calls may continue.", len(self._kept)),
        }
        if self._recorder is not None:
            sessions = len(self._recorder.sessions)
            gauges["kapelle_sessions"] = ("Recorded sessions that are under way.", sessions)
        if isinstance(engine, HasQueue):
            gauges["kapelle_requests_waiting"] = (
                "Requests that wait for a row of the engine's batch.",
                engine.waiting,
            )
        return Response(self._agents.metrics.text(gauges), headers={"content-type": METRICS_KIND})

    async def _answer(self, call: Call, form: ChatForm | ResponseForm, *, named: bool = False) -> Response:
        request = form.request
        model = self._asked(request.model)

        async def ask(ticket: Ticket) -> Asked:
            of = self._ask_team if model == self.name else self._ask_agent
            asked, answers = await of(model, request, call, ticket)
            headers = {} if asked.head.session is None else {SESSION: asked.head.session}
            whole, events = partial(form.whole, asked, answers), partial(form.events, asked, answers)
            return Asked(whole, events, form.failed, headers, named)

        return await self._within(request.n, ask, stream=request.stream)

    async def _within(
        self, answers: int, ask: Callable[[Ticket], Awaitable[Asked]], *, stream: bool
    ) -> Response:
        """Return the answer to a call that asks for so many, whole or as a stream, in the room and the time that it may take."""
        ticket = Ticket(self, answers)
        try:
            async with asyncio.timeout_at(ticket.until):
                asked = await ask(ticket)
                if not stream:
                    answer = JsonAnswer(await asked.whole(), headers=asked.headers)
                    ticket.release()
                    return answer
                # Its first piece is taken here: closing an async generator that was never begun would not release what it holds.
                pieces = ticket.bounded(asked.events())
                first = await anext(pieces)
                return EventStream(pieces, asked.headers, [first], asked.failed, named=asked.named)
        except TimeoutError:
            ticket.release()
            raise ticket.late from None
        except BaseException:
            ticket.release()
            raise

    async def _ask_agent(
        self, model: str, request: ChatRequest, call: Call, ticket: Ticket
    ) -> tuple[Chat, AsyncIterator[Any]]:
        chat = read_chat(self._agents, model, model.rpartition("/")[2], request)
        if self._recorder is not None:
            return await self._recorder.answers(chat, call, ticket.join)
        chat = await chat.prompted()
        return chat, self._agents.answers(chat.prompt, listening=request.stream)

    async def _ask_team(
        self, model: str, request: ChatRequest, call: Call, ticket: Ticket
    ) -> tuple[TeamChat, AsyncIterator[Any]]:
        answers, session = team_answers(self._agents, request, listening=request.stream), None
        if self._recorder is not None:
            session, answers = self._recorder.team_answers(request, call, ticket.join, answers)
        return TeamChat(request, Head(model, session)), answers

    @property
    def names(self) -> list[str]:
        """What clients may name as `model`."""
        return [self.name, *(f"{self.name}/{agent}" for agent in self._agents.play.team.names)]

    def _known(self, model: str) -> str:
        """Return one of `names` for what a caller calls it: an agent's own name will do, and `team` or the run's name for the team."""
        agent = f"{self.name}/{own_name(own_name(model, self.name), self._run)}"
        for name in (model, agent, self.name if model in (ANY_TEAM, self._run) else ""):
            if name in self.names:
                return name
        hint = did_you_mean(model[:200], [*self.names, *self._agents.play.team.names])
        raise Refusal(404, f"There is no such model here.{hint}", "model", "model_not_found")

    def _asked(self, model: str) -> str:
        """Return which of `names` answers: for the team its spokesman, if it has one."""
        known = self._known(model)
        return f"{self.name}/{self._spokesman}" if known == self.name and self._spokesman else known

    def _row(self, model: str) -> Json:
        return {"id": model, "object": "model", "created": self._started, "owned_by": "kapelle"}


def spokesman(play: Play) -> str | None:
    """Return the agent that answers for a team that outside programs play, its first one; None for a team with a workflow."""
    return play.team.names[0] if offers(play.environment, PlayedFromOutside) else None


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
        """Stop accepting calls, answer those that were accepted, and return whether all were within `seconds`."""
        return self.http.drain(seconds)


@contextmanager
def serve_policy(
    play: Play,
    name: str,
    binding: Binding,
    limits: ServingLimits,
    record: Path | None = None,
    tool_form: Form | None = None,
    embedder: Embedder | None = None,
) -> Iterator[PolicyServer]:
    """Serve a team while the block runs; `record` is the folder of rewarded episodes, None to record nothing.

    Agents call tools in the `tool_form`, or as their chat templates do. Texts become vectors by the `embedder`.

    Raises ConfigError if the port is taken, OutputError for a folder that cannot be written.
    """
    if isinstance(play.engine, ServesCallers):
        play.engine.serve()
    with ExitStack() as closing:
        agents = Agents(play, closing.enter_context(LoopThread()), tool_form)
        recorder = None
        if record is not None:
            file = EpisodeFile(record, play.team.names)
            closing.callback(file.close)
            recorder = Recorder(agents, file.take, lifetime=limits.idle)
        service = PolicyService(
            name, agents, limits, int(time.time()), recorder, spokesman(play), embedder=embedder
        )
        with HttpServer(binding, Application(binding, service.routes(), agents.metrics.called)) as http:
            yield PolicyServer(http.url, service.names, service, http)
