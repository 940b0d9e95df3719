"""The policy server: its routes, an engine's thread behind them, and the port.

with serve_policy(play, "demo", Binding(), Limits()) as server:
print(server.url)
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kapelle.engines.rollout.protocol import ServesCallers
from kapelle.errors import did_you_mean
from kapelle.rollout.play import Play
from kapelle.services.binding import Binding
from kapelle.services.http.application import SESSION, Answer, Application, Call, Route, Stream
from kapelle.services.http.refusals import Refusal
from kapelle.services.http.server import HttpServer
from kapelle.services.policy.admission import Admission, Limits, Ticket
from kapelle.services.policy.agents import Agents, Done, prompted, read_chat
from kapelle.services.policy.chat_form import ChatRequest, read_request
from kapelle.services.policy.engine_thread import EngineThread
from kapelle.services.policy.page import page_routes
from kapelle.services.policy.recording import EpisodeFile, Recorder
from kapelle.services.policy.teams import TeamChat, Teams
from kapelle.types import Json


class PolicyService:
    """Answers chat completions by the agents of a team."""

    def __init__(
        self, name: str, agents: Agents, limits: Limits, started: int, recorder: Recorder | None = None
    ) -> None:
        """Serve a team under a name; `started` is the time that clients are told its models are from, in Unix seconds."""
        self.name = name
        self._agents = agents
        self._teams = Teams(agents)
        self._admission = Admission(limits)
        self._started = started
        self._recorder = recorder

    def routes(self) -> Sequence[Route]:
        """Return what it answers."""
        recording = () if self._recorder is None else self._recorder.routes()
        return (
            Route("GET", "/health", self.health),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/", self.model),
            Route("POST", "/v1/chat/completions", self.chat),
            *recording,
            *page_routes(),
        )

    async def health(self, call: Call) -> Answer:
        """Return that it serves, and how much."""
        busy, most = self.under_way, self._admission.limits.calls
        return Answer({"status": "ok", "under_way": busy, "room": most - busy})

    async def models(self, call: Call) -> Answer:
        """Return the team and its agents as models."""
        return Answer({"object": "list", "data": [self._row(name) for name in self.names]})

    async def model(self, call: Call) -> Answer:
        """Return one of them."""
        return Answer(self._row(self._known(call.path)))

    async def chat(self, call: Call) -> Answer | Stream:
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
        if isinstance(answer, Answer):
            ticket.release()
        return answer

    async def _ask_agent(
        self, model: str, request: ChatRequest, call: Call, ticket: Ticket
    ) -> Answer | Stream:
        chat, messages = read_chat(self._agents, model, model.rpartition("/")[2], request)
        if self._recorder is not None:
            chat, answers = await self._recorder.answers(chat, messages, call, ticket)
        else:
            chat = await prompted(chat, self._agents, messages, None)
            answers = self._agents.answers(chat.prompt, listening=request.stream)
        headers = {} if chat.session is None else {SESSION: chat.session}
        if request.stream:
            return await _begun(ticket.bounded(chat.chunks(answers)), headers)
        async with aclosing(answers) as told:  # type: ignore[type-var]
            done = [each async for each in told if isinstance(each, Done)]
        count = request.top_logprobs
        others = [await self._agents.alternatives(chat.prompt, d.completion.ids, count) for d in done]
        return Answer(chat.whole(done, others), headers=headers)

    async def _ask_team(
        self, model: str, request: ChatRequest, call: Call, ticket: Ticket
    ) -> Answer | Stream:
        self._teams.check(request)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        answers = self._teams.answers(request, seed, listening=request.stream)
        session = None
        if self._recorder is not None:
            session, answers = self._recorder.team_answers(request, call, ticket, answers)
        chat = TeamChat(model, request, session)
        headers = {} if session is None else {SESSION: session}
        if request.stream:
            return await _begun(ticket.bounded(chat.chunks(answers)), headers)
        return Answer(await chat.whole(answers), headers=headers)

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


async def _begun(pieces: AsyncIterator[Json | str], headers: Mapping[str, str]) -> Stream:
    """Return a stream that has begun, so that closing it gives back what it holds."""
    first = await anext(pieces)

    async def all_of_it() -> AsyncIterator[Json | str]:
        async with aclosing(pieces) as rest:  # type: ignore[type-var]
            yield first
            async for piece in rest:
                yield piece

    events = all_of_it()
    return Stream(events, headers, pieces)


# -------- The policy server as a whole: an engine's thread, the routes, and the port


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
    play: Play, name: str, binding: Binding, limits: Limits, record: Path | None = None
) -> Iterator[PolicyServer]:
    """Serve a team while the block runs; `record` is the folder of rewarded episodes, None to record nothing.

    Raises ConfigError when the port is taken or an extra is missing, OutputError for a folder that cannot be written.
    """
    if isinstance(play.engine, ServesCallers):
        play.engine.serve()
    with ExitStack() as closing:
        agents = Agents(play, closing.enter_context(EngineThread()))
        recorder = None
        if record is not None:
            file = EpisodeFile(record, play.team.names)
            closing.callback(file.close)
            recorder = Recorder(file, agents, limits.idle)
        service = PolicyService(name, agents, limits, int(time.time()), recorder)
        with HttpServer(binding, Application(binding, service.routes())) as http:
            yield PolicyServer(http.url, service.names, service, http)
