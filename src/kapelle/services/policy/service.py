"""Implements the policy server: its routes, its limits, its chat page, and its port.

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
from kapelle.environment import DrivenByPrograms, offers
from kapelle.environments.grading.text.tool_call import Form
from kapelle.errors import did_you_mean
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import Binding
from kapelle.services.http import SESSION, Application, Call, EventStream, HttpServer, JsonAnswer, route
from kapelle.services.policy.agents import Agents, read_chat
from kapelle.services.policy.chat_form import Answering, ChatForm, ChatRequest, Head, read_request
from kapelle.services.policy.completions import CompletionForm
from kapelle.services.policy.embeddings import Embedder
from kapelle.services.policy.messages import MessageForm, error_row, in_words, read_messages
from kapelle.services.policy.recording import ChatSession, EpisodeFile, Recorder
from kapelle.services.policy.responses import ResponseForm, StoredResponses
from kapelle.services.policy.responses_form import renamed
from kapelle.services.policy.service_metrics import KIND as METRICS_KIND
from kapelle.services.policy.teams import TeamChat, team_answers
from kapelle.services.request_errors import RequestError, busy, wrong
from kapelle.team import ANY_TEAM, own_name
from kapelle.types import Json

T = TypeVar("T")

# -------- Limits


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The limits of a policy server."""

    calls: int = 1024
    """The maximum number of completions in progress, where each of the `n` choices of a call counts. Further calls receive the
    status 429."""
    seconds: float = 600.0
    """The maximum duration of one call in seconds, including the time in the queue."""
    idle: float = 3600.0
    """The number of seconds after its last call for which a recorded session is kept, if other sessions need room."""


class Ticket:
    """A reservation for the completions of one call, which lasts until `release` is called. A second release has no effect."""

    def __init__(self, service: PolicyService, answers: int) -> None:
        """Make the reservation. Raises RequestError (429) if the limit is exceeded."""
        limits = service.limits
        if service.under_way + answers > limits.calls:
            raise busy(
                f"{service.under_way} of at most {limits.calls} completions are in progress. Try again later."
            )
        service.under_way += answers
        self._service, self._answers = service, answers
        self._session: ChatSession | None = None
        self.until = asyncio.get_running_loop().time() + limits.seconds
        self.late = RequestError(504, f"There was no response within {limits.seconds:g} s.", None, "timeout")

    def join(self, session: ChatSession) -> None:
        """Also count the completions in the given session."""
        self._session = session
        session.under_way += self._answers

    def release(self) -> None:
        """End the reservation."""
        for counts in (self._service, self._session):
            if counts is not None:
                counts.under_way -= self._answers
        self._answers = 0

    async def bounded(self, pieces: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """Yield pieces within the time limit of the call, and then end the reservation. Raises RequestError (504) after the time limit."""
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


# -------- The chat page, which has no inline code and loads nothing from other sites

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The content security policy of the chat page, which may use only resources of its own server."""
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/chat.css": ("chat.css", "text/css; charset=utf-8"),
}


async def show_file(content: bytes, kind: str, _call: Call) -> Response:
    """Return a file of the chat page."""
    return Response(content, headers={"content-type": kind, "content-security-policy": PAGE_POLICY})


# -------- The routes


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """A call in progress."""

    whole: Callable[[], Awaitable[Json]]
    events: Callable[[], AsyncIterator[Json | str]]
    failed: Callable[[RequestError], Json]
    """A function that returns the last event of a stream that fails."""
    headers: Mapping[str, str] = field(default_factory=dict)
    named: bool = False
    """Whether the events of the stream have names."""


class PolicyService:
    """A service that provides chat completions by the agents of a team."""

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
        """Create the service for a team under the given name.

        The argument `started` is the creation time of its models, in seconds since the Unix epoch. In training, where
        every team has the same name, `run` is a second name of the team. If outside programs run the team, so that
        there is no workflow, the agent `spokesman` handles calls of the team.
        """
        self.name, self.limits = name, limits
        self._spokesman, self._embedder = spokesman, embedder
        self._run = run.replace("/", "-") or name
        self.under_way = 0
        """The number of completions in progress, which may be changed by only one thread."""
        self._agents = agents
        self._started = started
        self._recorder = recorder
        self._kept = StoredResponses(
            lambda session: recorder is None or recorder.sessions.known(session) is not None
        )

    def routes(self) -> Sequence[Route]:
        """Return the routes of the service."""
        page = files("kapelle.services.policy").joinpath("page")
        return (
            route("GET", "/health", self.health),
            route("GET", "/v1/models", self.models),
            route("GET", "/v1/models/{name:path}", self.model),
            route("POST", "/v1/chat/completions", self.chat),
            route("POST", "/v1/responses", self.respond),
            route("POST", "/v1/messages", self.message, error_row),
            route("POST", "/v1/messages/count_tokens", self.count_tokens, error_row),
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
        """Return the status of the service, and the number of additional completions that it accepts."""
        room = self.limits.calls - self.under_way
        return JsonAnswer({"status": "ok", "under_way": self.under_way, "room": room})

    async def models(self, call: Call) -> JsonAnswer:
        """Return the list of models, which are the team and its agents."""
        beside = [] if self._embedder is None else [self._embedder.name]
        return JsonAnswer({"object": "list", "data": [self._row(name) for name in (*self.names, *beside)]})

    async def model(self, call: Call) -> JsonAnswer:
        """Return the description of one model."""
        if self._embedder is not None and call.path == self._embedder.name:
            return JsonAnswer(self._row(call.path))
        return JsonAnswer(self._row(self._known(call.path)))

    async def chat(self, call: Call) -> Response:
        """Return the response of an agent or of the team in the format of the chat completions API."""
        return await self._answer(call, ChatForm(read_request(call.body)))

    async def respond(self, call: Call) -> Response:
        """Return the response of an agent or of the team in the format of the Responses API."""
        form = ResponseForm(call, self._kept)
        try:
            return await self._answer(form.call, form, named=True)
        except RequestError as error:
            raise renamed(error) from None

    async def message(self, call: Call) -> Response:
        """Return the response of an agent or of the team in the format of Anthropic's Messages API."""
        try:
            return await self._answer(call, MessageForm(call.body), named=True)
        except RequestError as error:
            raise in_words(error) from None

    async def count_tokens(self, call: Call) -> Response:
        """Return the number of prompt tokens that a call of the Messages API would have."""
        request = read_messages(call.body, counts=True)
        model = self._answering(request.model)
        if model == self.name:
            raise wrong("A team has no prompt of its own. Set `model` to an agent.", "model")
        agent = model.rpartition("/")[2]
        if self._agents.setup.team.policy(agent).endpoint is not None:
            raise wrong(f"The tokens of '{agent}' are known only to its endpoint's server.", "model")

        async def count() -> Json:
            return {"input_tokens": await read_chat(self._agents, model, agent, request).prompt_tokens()}

        try:
            return JsonAnswer(await self._in_time(count))
        except RequestError as error:
            raise in_words(error) from None

    async def complete(self, call: Call) -> Response:
        """Return an agent's continuation of a plain prompt."""
        form = CompletionForm.read(call.body)
        model = self._answering(form.given.model)
        if self._recorder is not None:
            raise RequestError(
                400,
                "A server that records sessions accepts only conversations. Use `/v1/chat/completions`.",
                None,
                "not_recorded",
            )
        if model == self.name:
            raise wrong("A team cannot continue a plain prompt. Set `model` to an agent.", "model")

        async def begin(_ticket: Ticket) -> BegunAnswer:
            begun = await form.begin(self._agents, model)
            return BegunAnswer(partial(form.whole, begun), partial(form.events, begun), form.failed)

        return await self._within(form.answers, begin, stream=form.given.stream)

    async def embed(self, call: Call) -> Response:
        """Return the embeddings of texts. Without an embedder, the status is 404, after which OpenAI's client does not retry."""
        named = call.body.get("model") if isinstance(call.body, dict) else None
        if self._embedder is None:
            raise RequestError(
                404,
                "This server has no embedding model. Start it with `--embedder MODEL`, or set another `base_url` for your program's "
                "embedder.",
                "model",
                "model_not_found",
            )
        if isinstance(named, str) and named != self._embedder.name:
            raise RequestError(
                404,
                f"The embedding model of this server is '{self._embedder.name}'.",
                "model",
                "model_not_found",
            )
        return JsonAnswer(await self._in_time(partial(self._embedder.answer, call.body)))

    async def _in_time(self, work: Callable[[], Awaitable[Json]]) -> Json:
        """Return the result of `work`, which counts as one completion within the limits of the server."""
        ticket = Ticket(self, 1)
        try:
            async with asyncio.timeout_at(ticket.until):
                return await work()
        except TimeoutError:
            raise ticket.late from None
        finally:
            ticket.release()

    async def metrics(self, call: Call) -> Response:
        """Return the metrics in the format of Prometheus."""
        engine = self._agents.setup.engine
        gauges: dict[str, tuple[str, float]] = {
            "kapelle_answers_in_flight": ("Completions in progress.", self.under_way),
            "kapelle_answers_most": (
                "Maximum number of completions in progress (`--calls`).",
                self.limits.calls,
            ),
            "kapelle_responses_kept": ("Responses that calls may continue.", len(self._kept)),
        }
        if self._recorder is not None:
            sessions = len(self._recorder.sessions)
            gauges["kapelle_sessions"] = ("Recorded sessions in progress.", sessions)
        if isinstance(engine, HasQueue):
            gauges["kapelle_requests_waiting"] = (
                "Requests that wait for a row of the engine's batch.",
                engine.waiting,
            )
        return Response(self._agents.metrics.text(gauges), headers={"content-type": METRICS_KIND})

    async def _answer(
        self, call: Call, form: ChatForm | ResponseForm | MessageForm, *, named: bool = False
    ) -> Response:
        request = form.request
        model = self._answering(request.model)

        async def begin(ticket: Ticket) -> BegunAnswer:
            of = self._begin_team if model == self.name else self._begin_agent
            answering, answers = await of(model, request, call, ticket)
            headers = {} if answering.head.session is None else {SESSION: answering.head.session}
            given = answering, answers
            whole, events = partial(form.whole, *given), partial(form.events, *given)
            return BegunAnswer(whole, events, form.failed, headers, named)

        return await self._within(request.n, begin, stream=request.stream)

    async def _within(
        self, answers: int, begin: Callable[[Ticket], Awaitable[BegunAnswer]], *, stream: bool
    ) -> Response:
        """Return the response to a call within the limits of the server, either as a whole or as a stream."""
        ticket = Ticket(self, answers)
        try:
            async with asyncio.timeout_at(ticket.until):
                begun = await begin(ticket)
                if not stream:
                    answer = JsonAnswer(await begun.whole(), headers=begun.headers)
                    ticket.release()
                    return answer
                # The first piece is taken here, because closing an async generator that never began would not release
                # the ticket.
                pieces = ticket.bounded(begun.events())
                first = await anext(pieces)
                return EventStream(pieces, begun.headers, [first], begun.failed, named=begun.named)
        except TimeoutError:
            ticket.release()
            raise ticket.late from None
        except BaseException:
            ticket.release()
            raise

    async def _begin_agent(
        self, model: str, request: ChatRequest, call: Call, ticket: Ticket
    ) -> tuple[Answering, AsyncIterator[Any]]:
        chat = read_chat(self._agents, model, model.rpartition("/")[2], request)
        if self._recorder is not None:
            return await self._recorder.answers(chat, call, ticket.join)
        chat = await chat.prompted()
        return chat, self._agents.answers(chat.prompt, listening=request.listens)

    async def _begin_team(
        self, model: str, request: ChatRequest, call: Call, ticket: Ticket
    ) -> tuple[Answering, AsyncIterator[Any]]:
        answers, session = team_answers(self._agents, request, listening=request.stream), None
        if self._recorder is not None:
            session, answers = self._recorder.team_answers(request, call, ticket.join, answers)
        return TeamChat(Head(model, session)), answers

    @property
    def names(self) -> list[str]:
        """The names that the parameter `model` may have."""
        return [self.name, *(f"{self.name}/{agent}" for agent in self._agents.setup.team.names)]

    def _known(self, model: str) -> str:
        """Return the name in `names` that a caller means.

        The agent's own name is sufficient for an agent, and `team` or the name of the run stands for the team.
        """
        agent = f"{self.name}/{own_name(own_name(model, self.name), self._run)}"
        for name in (model, agent, self.name if model in (ANY_TEAM, self._run) else ""):
            if name in self.names:
                return name
        hint = did_you_mean(model[:200], [*self.names, *self._agents.setup.team.names])
        raise RequestError(404, f"Unknown model.{hint}", "model", "model_not_found")

    def _answering(self, model: str) -> str:
        """Return the name in `names` of the model that responds. For the whole team, the model is the team's spokesman, if there is one."""
        known = self._known(model)
        return f"{self.name}/{self._spokesman}" if known == self.name and self._spokesman else known

    def _row(self, model: str) -> Json:
        return {"id": model, "object": "model", "created": self._started, "owned_by": "kapelle"}


def spokesman(setup: RolloutSetup) -> str | None:
    """Return the first agent of a team that is run by outside programs, which responds for the whole team.

    The result is None for a team with a workflow.
    """
    return setup.team.names[0] if offers(setup.environment, DrivenByPrograms) else None


# -------- The server: the engine's event loop, the routes, and the port


@dataclass(frozen=True, slots=True)
class PolicyServer:
    """A running policy server."""

    url: str
    models: Sequence[str]
    """The names that the parameter `model` may have."""
    service: PolicyService
    http: HttpServer

    def drain(self, seconds: float) -> bool:
        """Stop accepting calls, finish the accepted calls, and return whether this took at most `seconds`."""
        return self.http.drain(seconds)


@contextmanager
def serve_policy(
    setup: RolloutSetup,
    name: str,
    binding: Binding,
    limits: ServingLimits,
    record: Path | None = None,
    tool_form: Form | None = None,
    embedder: Embedder | None = None,
) -> Iterator[PolicyServer]:
    """Serve a team while the block runs. If `record` is given, episodes with rewards are written to this folder.

    Agents call tools in the format `tool_form`, which is the format of their chat templates by default. The model
    `embedder` handles calls of `/v1/embeddings`.

    Raises ConfigError if the port is in use, and OutputError for a folder that cannot be written.
    """
    if isinstance(setup.engine, ServesCallers):
        setup.engine.serve()
    with ExitStack() as closing:
        agents = Agents(setup, closing.enter_context(LoopThread()), tool_form)
        recorder = None
        if record is not None:
            file = EpisodeFile(record, setup.team.names)
            closing.callback(file.close)
            recorder = Recorder(agents, file.take, lifetime=limits.idle)
        service = PolicyService(
            name, agents, limits, int(time.time()), recorder, spokesman(setup), embedder=embedder
        )
        with HttpServer(binding, Application(binding, service.routes(), agents.metrics.called)) as http:
            yield PolicyServer(http.url, service.names, service, http)
