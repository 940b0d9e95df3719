"""Implements the server of the Tinker protocol: its routes, its clients with their quotas, and its port.

with serve_tinker(model, "demo", folder, Binding(), TinkerLimits()) as server:
    print(server.url)
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
import re
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kapelle.errors import ConfigError
from kapelle.models.adapters import read_lora
from kapelle.models.language_model import LanguageModel
from kapelle.runtime.credentials import LEAST_TOKEN, is_loopback
from kapelle.runtime.event_loop import LoopThread
from kapelle.services.binding import Binding, log_failure
from kapelle.services.http import Application, Call, HttpServer, JsonAnswer, headers_of, route
from kapelle.services.request_errors import RequestError, busy, read_body, wrong
from kapelle.services.tinker import forms
from kapelle.services.tinker.messages import (
    check_tokens,
    examples_of,
    passes_answer,
    read_passes,
    sampled_answer,
)
from kapelle.services.tinker.passes import Example, Scored
from kapelle.services.tinker.sampling import Samplers
from kapelle.services.tinker.training import OPTIMIZER, Adapter, Training, Work, lora_of
from kapelle.team import Lora
from kapelle.types import Adjustments, Json, Sampling

CLIENT = "x-kapelle-client"
"""The header in which the name of the client is passed to the routes."""
POLL_SECONDS = 25.0
"""Maximum time in seconds that a call waits for a result. The client then asks again."""
CHUNK_BYTES = 2_000_000
"""The number of bytes of examples that the client sends in one call."""
MOST_BYTES = 32 << 20
"""The maximum number of bytes of a body with examples. One example is never divided."""
SNAPSHOTS = 64
"""The number of unnamed snapshots of a model that are kept for sampling."""


@dataclass(frozen=True, slots=True)
class TinkerLimits:
    """The limits of a server of the Tinker protocol. The first three are quotas of each client."""

    requests: int = 1024
    """The maximum number of requests of a client in progress. Further requests receive the status 429."""
    adapters: int = 16
    """The maximum number of adapters that a client trains at a time."""
    tokens: int = 1 << 20
    """The maximum number of tokens of one request, including those that may be sampled."""
    idle: float = 3600.0
    """The number of seconds after which a session without a sign of life loses its adapters, if others need room."""
    pass_tokens: int = 4096
    """The maximum number of tokens in one forward and backward pass."""
    sampled: int = 64
    """The maximum number of adapters in memory for sampling, of all clients together."""
    results: int = 4096
    """The number of results that are kept for each client."""
    gather: float = 0.01
    """The number of seconds that a pass waits, after a pause, for requests of other clients."""


@dataclass(slots=True)
class Session:
    """A session of a client."""

    seen: float
    """The time of the last sign of life."""
    models: dict[str, Adapter] = field(default_factory=dict)
    finished: bool = False


@dataclass(slots=True)
class Sampler:
    """A sampling session: the folder of its weights, or None for the base model."""

    folder: Path | None
    path: str | None
    inflight: str | None = None
    """The model whose newest in-flight weights are sampled, or None for fixed weights."""


@dataclass(slots=True)
class Client:
    """What belongs to one client: sessions, models, sampling sessions and results."""

    name: str
    folder: Path
    sessions: dict[str, Session] = field(default_factory=dict)
    models: dict[str, Adapter] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    inflight: dict[str, Path] = field(default_factory=dict)
    """The folder of the newest in-flight weights of each model."""
    results: OrderedDict[str, Future[Any]] = field(default_factory=OrderedDict)
    running: int = 0


class TinkerService:
    """A service that trains and samples adapters of one base model for several clients."""

    def __init__(
        self,
        model: LanguageModel,
        name: str,
        folder: Path,
        tokenizer: str,
        limits: TinkerLimits,
        training: Training,
        samplers: Samplers,
        loop: LoopThread,
    ) -> None:
        """Create the service. Clients know the base model as `name`, and load its tokeniser from `tokenizer`.

        States and weights are saved below `folder`. The loop thread runs all work on the model.
        """
        self.model, self.name, self.limits = model, name, limits
        self.training, self.samplers = training, samplers
        self._folder, self._tokenizer, self._loop = folder, tokenizer, loop
        self._clients: dict[str, Client] = {}

    def routes(self) -> Sequence[Route]:
        """Return the routes of the service."""

        def post(name: str, handler: Callable[[Client, Json], Awaitable[Json] | Json]) -> Route:
            async def answer(call: Call) -> Response:
                found = handler(self._client(call.headers), call.body)
                return JsonAnswer(found if isinstance(found, dict) else await found)

            return route("POST", f"/api/v1/{name}", answer)

        return (
            route("GET", "/api/v1/healthz", self._healthy),
            route("GET", "/api/v1/get_server_capabilities", self._capabilities),
            route("GET", "/api/v1/samplers/{name:path}", self._sampler),
            Route("/api/v1/forward_backward", self._passes, methods=["POST"]),
            route("POST", "/api/v1/retrieve_future", self._retrieve),
            post("client/config", self._configure),
            post("client/dynamic_config", lambda _client, _body: {"sample_cancel_enabled": False}),
            post("telemetry", lambda _client, _body: {"status": "accepted"}),
            post("create_session", self._create_session),
            post("session_heartbeat", self._heartbeat),
            route("POST", "/api/v1/sessions/{name:path}", self._finish_session),
            post("create_model", self._create_model),
            post("get_info", self._info),
            post("optim_step", self._step),
            post("save_weights", partial(self._save, sampled=False)),
            post("save_weights_for_sampler", partial(self._save, sampled=True)),
            post("load_weights", self._load),
            post("weights_info", self._weights_info),
            post("create_sampling_session", self._create_sampler),
            post("asample", self._sample),
        )

    # -------- Clients and their requests

    def _client(self, headers: Mapping[str, str]) -> Client:
        name = headers[CLIENT]
        if name not in self._clients:
            self._clients[name] = Client(name, self._folder / name)
        return self._clients[name]

    def _begin(self, client: Client, request_id: str, tokens: int, start: Callable[[], Future[Any]]) -> Json:
        """Start a request unless it was started before, and return the name of its result. A repeated call starts nothing."""
        if request_id not in client.results:
            if client.running >= self.limits.requests:
                raise busy(f"{client.running} of at most {self.limits.requests} requests are in progress.")
            if tokens > self.limits.tokens:
                raise wrong(
                    f"The request has up to {tokens} tokens, but this server allows {self.limits.tokens}. Divide it."
                )
            client.running += 1
            future = client.results[request_id] = start()
            loop = asyncio.get_running_loop()

            def ended(_future: Future[Any]) -> None:
                loop.call_soon_threadsafe(self._ended, client)

            future.add_done_callback(ended)
        return {"request_id": request_id}

    def _ended(self, client: Client) -> None:
        client.running -= 1
        for request_id, future in list(client.results.items()):
            if len(client.results) <= self.limits.results:
                break
            if future.done():
                del client.results[request_id]

    def _run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        """Run a coroutine on the thread of the model. Errors are logged, except for those of the caller."""

        async def contained() -> Any:
            try:
                return await work()
            except RequestError:
                raise
            except Exception as error:  # noqa: BLE001 - only this request fails
                log_failure("A request of a client failed.", error)
                raise RequestError(500, "The request failed; see the service's log.") from None

        return self._loop.begin(contained)

    def _queue(self, adapter: Adapter, sequence: int, work: Work) -> Future[Any]:
        """Queue a request of a model, and return the future of its result."""

        async def submit() -> None:
            self.training.submit(adapter, sequence, work)

        self._loop.begin(submit)
        return work.future

    def _now(self, work: Callable[[], Any]) -> Coroutine[Any, Any, Any]:
        """Run a short function on the thread of the model and return its result."""

        async def running() -> Any:
            return work()

        return self._loop.ask(running)

    def _session(self, client: Client, session_id: str) -> Session:
        session = client.sessions.get(session_id)
        if session is None or session.finished:
            raise RequestError(404, "Unknown or finished session.", "session_id")
        session.seen = time.monotonic()
        return session

    def _adapter(self, client: Client, model_id: str) -> Adapter:
        if model_id not in client.models:
            raise RequestError(404, "Unknown model. Its session may have ended.", "model_id")
        return client.models[model_id]

    async def _retrieve(self, call: Call) -> Response:
        """Return a result, or the status 408 if it is not available yet."""
        client = self._client(call.headers)
        request_id = read_body(forms.Retrieve, call.body).request_id
        future = client.results.get(request_id)
        if future is None:
            raise RequestError(410, "The result is unknown or no longer kept.", "request_id")
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(lambda done: done.exception())  # it may end when nobody waits any more
        await asyncio.wait((waiting,), timeout=POLL_SECONDS)
        if not waiting.done():
            later = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JsonAnswer(later, 408)
        try:
            found = waiting.result()
        except RequestError as error:
            category = "user" if error.status < 500 else "server"
            return JsonAnswer({"error": error.message, "category": category})
        if isinstance(found, bytes):
            return Response(found, media_type="application/x-protobuf")
        return JsonAnswer(found)

    # -------- The server and its sessions

    async def _healthy(self, _call: Call) -> JsonAnswer:
        return JsonAnswer({"status": "ok"})

    async def _capabilities(self, _call: Call) -> JsonAnswer:
        about = {"model_name": self.name, "max_context_length": self._context, "trainable": True}
        return JsonAnswer({"supported_models": [{**about, "sampleable": True}]})

    def _configure(self, _client: Client, _body: Json) -> Json:
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": False,
            "fwdbwd_max_chunk_bytes_count": CHUNK_BYTES,
            "sample_use_retrieve_futures": False,
            "use_pyqwest_transport": False,
        }

    def _create_session(self, client: Client, _body: Json) -> Json:
        session_id = str(uuid.uuid4())
        client.sessions[session_id] = Session(time.monotonic())
        return {"session_id": session_id, "type": "create_session"}

    def _heartbeat(self, client: Client, body: Json) -> Json:
        self._session(client, str(body.get("session_id")))
        return {"type": "session_heartbeat"}

    async def _finish_session(self, call: Call) -> Response:
        client = self._client(call.headers)
        session_id, _, action = call.path.partition("/")
        if action != "finish":
            raise RequestError(404, "There is no such path on this server.", None, "not_found")
        self._session(client, session_id)
        await self._now(partial(self._end_session, client, session_id))
        return Response(status_code=204)

    def _end_session(self, client: Client, session_id: str) -> None:
        """Free the adapters of a session. Saved weights remain."""
        session = client.sessions[session_id]
        session.finished = True
        for model_id, adapter in session.models.items():
            client.models.pop(model_id, None)
            self.training.remove(adapter.name)
        session.models.clear()

    @property
    def _context(self) -> int:
        return self.model.renderer.context

    # -------- Models

    async def _create_model(self, client: Client, body: Json) -> Json:
        given = read_body(forms.CreateModel, body)
        self._check_base(given.base_model)
        size = given.lora_config
        if size is None:
            raise wrong("Only adapters can be trained. Set `lora_config`.", "lora_config")
        lora = lora_of(self.model, size.rank, attention=size.train_attn, mlp=size.train_mlp)
        seed = secrets.randbits(62) if size.seed is None else size.seed

        async def create() -> Json:
            model_id = self._add(client, given.session_id, given.model_seq_id, lora, seed)
            return {"model_id": model_id, "type": "create_model"}

        self._session(client, given.session_id)
        return self._begin(
            client, f"{given.session_id}:train:{given.model_seq_id}:0", 0, partial(self._run, create)
        )

    def _add(self, client: Client, session_id: str, number: int, lora: Lora, seed: int) -> str:
        """Add an adapter to a session, and return its name in the protocol. Raises RequestError (403) over the quota."""
        session, model_id = self._session(client, session_id), f"{session_id}:train:{number}"
        latest = time.monotonic() - self.limits.idle
        for other, each in list(client.sessions.items()):
            if len(client.models) >= self.limits.adapters and each.seen < latest and not each.finished:
                self._end_session(client, other)
        if len(client.models) >= self.limits.adapters:
            raise RequestError(
                403,
                f"{self.limits.adapters} adapters are in training, which is the quota. Finish a session first.",
            )
        name = hashlib.blake2b(f"{client.name}/{model_id}".encode(), digest_size=12).hexdigest()
        client.models[model_id] = session.models[model_id] = self.training.create(name, lora, seed)
        return model_id

    def _check_base(self, name: str) -> None:
        if name != self.name:
            raise wrong(f"This server has only the base model '{self.name}'.", "base_model")

    def _info(self, client: Client, body: Json) -> Json:
        model_id = read_body(forms.OfModel, body).model_id
        adapter = self._adapter(client, model_id)
        arch = type(self.model.model).__name__
        return {
            "type": "get_info",
            "model_data": {"arch": arch, "model_name": self.name, "tokenizer_id": self._tokenizer},
            "model_id": model_id,
            "is_lora": True,
            "lora_rank": adapter.lora.rank,
            "model_name": self.name,
        }

    async def _passes(self, call: HttpRequest) -> Response:
        """Queue a forward pass, with or without a backward pass. The body is binary, unlike those of other routes."""
        headers = headers_of(call.scope)
        client = self._client(headers)
        if headers.get("content-type") != "application/x-protobuf" or "content-encoding" in headers:
            raise RequestError(415, "Send the body as `application/x-protobuf`, without compression.")
        body = bytearray()
        async for piece in call.stream():
            body += piece
            if len(body) > MOST_BYTES:
                raise RequestError(
                    413, f"The body has more than {MOST_BYTES:,} bytes.", None, "body_too_long"
                )
        request = read_passes(bytes(body))
        adapter = self._adapter(client, request.model_id)
        if request.seq_id < 1:
            raise wrong("`seq_id` must be at least 1.", "seq_id")
        examples = examples_of(request, adapter.name, self.model.vocabulary, self._context)
        shapes = [len(each.loss_fn_inputs["target_tokens"].shape) for each in request.data]
        work = Work(lambda scored: passes_answer(scored, shapes), examples)
        return JsonAnswer(
            self._begin(
                client,
                f"{request.model_id}:{request.seq_id}",
                sum(len(each.tokens) for each in examples),
                partial(self._queue, adapter, request.seq_id, work),
            )
        )

    def _step(self, client: Client, body: Json) -> Json:
        given = read_body(forms.OptimStep, body)
        adapter, adam = self._adapter(client, given.model_id), given.adam_params

        def step(_scored: Sequence[Scored]) -> Json:
            norm = adapter.step(
                adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm
            )
            return {"metrics": {"grad_norm": norm}}

        return self._ordered(client, given.model_id, given.seq_id, step)

    def _ordered(
        self, client: Client, model_id: str, sequence: int, work: Callable[[Sequence[Scored]], Json]
    ) -> Json:
        adapter = self._adapter(client, model_id)
        start = partial(self._queue, adapter, sequence, Work(work))
        return self._begin(client, f"{model_id}:{sequence}", 0, start)

    # -------- Saved weights, whose paths are tinker://MODEL/weights/NAME and tinker://MODEL/sampler_weights/NAME

    def _save(self, client: Client, body: Json, *, sampled: bool) -> Json:
        given = read_body(forms.Save, body)
        adapter = self._adapter(client, given.model_id)
        kind = "sampler_weights" if sampled else "weights"
        name = given.path or f"snapshot-{given.seq_id}"
        folder = client.folder / _plain(given.model_id) / kind / name
        path = f"tinker://{given.model_id}/{kind}/{name}"

        def save(_scored: Sequence[Scored]) -> Json:
            if folder.exists() and given.path is not None and not given.overwrite and not sampled:
                raise wrong(
                    f"There is already a state '{name}'. Set `overwrite`, or choose another name.", "path"
                )
            folder.parent.mkdir(parents=True, exist_ok=True)
            adapter.save(folder, self.name, optimizer=not sampled)
            self.samplers.forget(folder)
            if not sampled:
                return {"path": path, "type": "save_weights"}
            if given.path is not None:
                return {"path": path, "type": "save_weights_for_sampler"}
            session, number = given.model_id.split(":train:")[0], given.sampling_session_seq_id
            sampler_id = f"{session}:sample:{number}"
            inflight = given.model_id if given.kind == "inflight" else None
            client.samplers[sampler_id] = Sampler(folder, path, inflight)
            if inflight is not None:
                client.inflight[inflight] = folder
            self._trim(folder.parent)
            return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

        return self._ordered(client, given.model_id, given.seq_id, save)

    def _trim(self, folder: Path) -> None:
        """Delete the oldest unnamed snapshots of a model."""
        import shutil

        numbers = sorted(int(each.name[9:]) for each in folder.glob("snapshot-*") if each.name[9:].isdigit())
        for number in numbers[:-SNAPSHOTS]:
            shutil.rmtree(folder / f"snapshot-{number}", ignore_errors=True)

    def _saved(self, client: Client, path: str) -> Path:
        """Return the folder of saved weights of a client. Raises RequestError (404) if there is none."""
        found = re.fullmatch(r"tinker://([A-Za-z0-9:-]{1,128})/(weights|sampler_weights)/(.*)", path)
        if found is not None and re.fullmatch(forms.NAME, found[3]):
            folder = client.folder / _plain(found[1]) / found[2] / found[3]
            if folder.is_dir():
                return folder
        raise RequestError(404, "There are no saved weights at this path.", "path")

    async def _load(self, client: Client, body: Json) -> Json:
        given = read_body(forms.Load, body)
        folder = self._saved(client, given.path)
        if given.model_id is not None and given.seq_id is not None:
            adapter = self._adapter(client, given.model_id)

            def load(_scored: Sequence[Scored]) -> Json:
                adapter.load(folder, optimizer=given.optimizer)
                return {"path": given.path, "model_id": given.model_id, "type": "load_weights"}

            return self._ordered(client, given.model_id, given.seq_id, load)
        if given.session_id is None or given.model_seq_id is None:
            raise wrong("Give either `model_id` and `seq_id`, or `session_id` and `model_seq_id`.")
        self._check_base(given.base_model or self.name)
        if given.optimizer and not (folder / OPTIMIZER).is_file():
            raise wrong("These weights were saved without the optimiser. Load them without it.", "optimizer")
        session_id, number = given.session_id, given.model_seq_id
        self._session(client, session_id)

        async def create() -> Json:
            model_id = self._add(client, session_id, number, read_lora(folder), 0)
            client.models[model_id].load(folder, optimizer=given.optimizer)
            return {"path": given.path, "model_id": model_id, "type": "load_weights"}

        return self._begin(client, f"{session_id}:train:{number}:0", 0, partial(self._run, create))

    def _weights_info(self, client: Client, body: Json) -> Json:
        folder = self._saved(client, read_body(forms.WeightsInfo, body).tinker_path)
        return {"base_model": self.name, "is_lora": True, "lora_rank": read_lora(folder).rank}

    # -------- Sampling

    def _create_sampler(self, client: Client, body: Json) -> Json:
        given = read_body(forms.CreateSampler, body)
        self._session(client, given.session_id)
        folder = None if given.model_path is None else self._saved(client, given.model_path)
        if folder is None:
            self._check_base(given.base_model or "")
        sampler_id = f"{given.session_id}:sample:{given.sampling_session_seq_id}"
        client.samplers[sampler_id] = Sampler(folder, given.model_path)
        return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}

    def _sampler_of(self, client: Client, sampler_id: str) -> Sampler:
        if sampler_id not in client.samplers:
            raise RequestError(404, "Unknown sampling session.", "sampling_session_id")
        return client.samplers[sampler_id]

    async def _sampler(self, call: Call) -> JsonAnswer:
        sampler = self._sampler_of(self._client(call.headers), call.path)
        return JsonAnswer({"sampler_id": call.path, "base_model": self.name, "model_path": sampler.path})

    def _sample(self, client: Client, body: Json) -> Json:
        # An empty list of stops differs from no list, and a list of strings from a list of token ids.
        given = read_body(forms.Sample, body)
        sampler = self._sampler_of(client, given.sampling_session_id)
        prompt = [token for chunk in given.prompt.chunks for token in chunk.tokens]
        check_tokens(prompt, self.model.vocabulary, self._context - 1, "prompt")
        settings = given.sampling_params
        most = min(settings.max_tokens or self._context, self._context - len(prompt))
        stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop or []
        endless = settings.stop is not None and not stop
        sampling = Sampling(
            max_tokens=most,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=max(0, settings.top_k),
            stop=tuple(each for each in stop if isinstance(each, str)),
            adjusted=Adjustments(min_tokens=most) if endless else None,
        )
        ends = frozenset(each for each in stop if isinstance(each, int))
        seed = random.getrandbits(62) if settings.seed is None else settings.seed

        async def sample() -> bytes:
            folder = sampler.folder if sampler.inflight is None else client.inflight[sampler.inflight]
            if folder is not None and not folder.is_dir():
                raise RequestError(404, "The snapshot is no longer kept. Save the weights again.")
            async with self.samplers.using(folder) as adapter:
                scored = asyncio.ensure_future(self._scored(adapter, prompt, given))
                sequences = await self.samplers.sample(
                    adapter, prompt, sampling, ends, seed, given.num_samples
                )
                return sampled_answer(sequences, await scored)

        request_id = f"{given.sampling_session_id}:{given.seq_id}"
        tokens = len(prompt) + given.num_samples * most
        begun = self._begin(client, request_id, tokens, partial(self._run, sample))
        return {**begun, "sample_sequence_ids": [f"{request_id}:{k}" for k in range(given.num_samples)]}

    async def _scored(self, adapter: str | None, prompt: Sequence[int], given: forms.Sample) -> Scored | None:
        """Return the log-probs of the tokens of a prompt after the first, or None if they are not requested."""
        import torch

        if not (given.prompt_logprobs or given.topk_prompt_logprobs):
            return None
        if len(prompt) == 1:
            nothing = torch.zeros(0, 1)
            return Scored(nothing, 0.0)
        targets_NK = torch.tensor(prompt[1:])[:, None]
        top = min(given.topk_prompt_logprobs, self.model.vocabulary)
        return await self.training.score(Example(adapter, tuple(prompt[:-1]), targets_NK, top=top))


def _plain(model_id: str) -> str:
    """Return the name of a model's folder."""
    return model_id.replace(":", "-")


# -------- Who calls


class Keyed:
    """Identifies the client of each call by the key in the header `X-API-Key`, before the guard of kapelle's servers."""

    def __init__(self, inner: ASGIApp, binding: Binding, keys: Mapping[str, str]) -> None:
        """Accept the keys of the clients by name. Without keys, the binding's token is the key of all clients, if it is set."""
        self._inner, self._binding, self._keys = inner, binding, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one call. A call without a valid key is left to the guard, which rejects it."""
        if scope["type"] == "http":
            headers = headers_of(scope)
            key = headers.get("x-api-key", "")
            own = (b"authorization", CLIENT.encode())
            kept = [(name, value) for name, value in scope["headers"] if name.lower() not in own]
            client = self._client(key)
            if client is not None:
                kept.append((CLIENT.encode(), client.encode()))
                if self._binding.token is not None:
                    kept.append((b"authorization", f"Bearer {self._binding.token}".encode()))
            scope = {**scope, "headers": kept}
        await self._inner(scope, receive, send)

    def _client(self, key: str) -> str | None:
        """Return the name of the client with a key, or None if the key is not valid. Comparisons take constant time."""
        given = key.encode("utf-8", "surrogatepass")
        if self._keys:
            found = [name for name, own in self._keys.items() if hmac.compare_digest(given, own.encode())]
            return found[0] if found else None
        if not self._binding.admits(key):
            return None
        return f"key-{hashlib.blake2b(given, digest_size=8).hexdigest()}"


def read_keys(file: Path, host: str) -> dict[str, str]:
    """Read the names and the keys of clients from a file with lines `NAME KEY`. Raises ConfigError if a line is wrong."""
    try:
        lines = file.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file of keys {file} cannot be read: {error}.") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # The client package requires the beginning of a key.
        fits = len(words) == 2 and re.fullmatch(forms.NAME, words[0]) and words[1].startswith("tml-")
        short = not is_loopback(host) and len(words[-1]) < LEAST_TOKEN
        if not fits or short or words[0] in keys or words[1] in keys.values():
            raise ConfigError(
                f"{file}, line {number}: write `NAME KEY` with different names and keys. Keys begin with `tml-` and, for "
                f"hosts other than this machine, have at least {LEAST_TOKEN} characters."
            )
        keys[words[0]] = words[1]
    if not keys:
        raise ConfigError(f"The file of keys {file} has no line `NAME KEY`.")
    return keys


@dataclass(frozen=True, slots=True)
class TinkerServer:
    """A running server of the Tinker protocol."""

    url: str
    service: TinkerService
    http: HttpServer

    def drain(self, seconds: float) -> bool:
        """Stop accepting calls, finish the accepted calls, and return whether this took at most `seconds`."""
        return self.http.drain(seconds)


@contextmanager
def serve_tinker(
    model: LanguageModel,
    name: str,
    folder: Path,
    binding: Binding,
    limits: TinkerLimits = TinkerLimits(),
    keys: Mapping[str, str] | None = None,
) -> Iterator[TinkerServer]:
    """Serve a base model under a name while the block runs. States and weights are saved below `folder`.

    With `keys`, only these clients (by name) may call the server. Raises ConfigError if the port is in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer"
    model.tokenizer.save_pretrained(tokenizer)
    if keys and binding.token is None:
        binding = replace(binding, token=secrets.token_hex(32))  # only `Keyed` knows it
    with ExitStack() as closing:
        loop = closing.enter_context(LoopThread())

        async def prepare() -> tuple[Training, Samplers]:
            training = Training(model, limits.pass_tokens, limits.gather)
            closing.callback(loop.begin(training.work).cancel)
            return training, Samplers(model, limits.sampled)

        training, samplers = loop.begin(prepare).result()
        service = TinkerService(
            model, name, folder, str(tokenizer.resolve()), limits, training, samplers, loop
        )
        application = Keyed(Application(binding, service.routes()), binding, keys or {})
        with HttpServer(binding, application) as http:
            yield TinkerServer(http.url, service, http)
