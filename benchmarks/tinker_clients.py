"""Eight clients of the Tinker server at once, against the same work of one client after another.

Each client repeats a step of reinforcement learning: save weights, sample, pass, optimiser step. At once, the server
mixes the clients' adapters in each decoding batch and in each pass. CPU-seconds are those of this process, in which both
the server and the clients run. The clients speak plain HTTP, so that the published client's own work is not measured.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from benchmarks.measure import cpu_seconds, single_thread
from benchmarks.subjects import prompt_ids, subject
from kapelle.runtime.wire import tinker_v1_pb2 as wire
from kapelle.services.binding import Binding
from kapelle.services.tinker.service import TinkerLimits, serve_tinker

CLIENTS, STEPS, ROUNDS = 8, 3, 3
PROMPT, COMPLETION, SAMPLES = 64, 32, 4


class Client:
    """A client with one adapter."""

    def __init__(self, url: str, number: int) -> None:
        self._url, self._headers = url, {"x-api-key": f"tml-{number}"}
        session = self._call("create_session", {})["session_id"]
        lora = {"rank": 8, "seed": number}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": lora}
        self._model = self._result(self._call("create_model", body))["model_id"]
        self._number = 0
        self._prompt = prompt_ids(number, PROMPT)

    def step(self) -> None:
        """Sample completions of the prompt with the current weights, and take an optimiser step on them."""
        save = {**self._next(), "sampling_session_seq_id": self._number}
        sampler = self._result(self._call("save_weights_for_sampler", save))["sampling_session_id"]
        body = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "num_samples": SAMPLES,
            "prompt": {"chunks": [{"tokens": self._prompt, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": COMPLETION, "seed": 1},
        }
        found = wire.SampleResponse.FromString(self._result(self._call("asample", body)))
        request = wire.ForwardBackwardRequest(
            model_id=self._model, seq_id=self._next()["seq_id"], loss_fn="importance_sampling"
        )
        for number, each in enumerate(found.sequences):
            text = np.concatenate([self._prompt, np.frombuffer(each.tokens, "<i4")]).astype("<i8")
            zeros = np.zeros(PROMPT - 1, "<f4")
            behaviour = np.concatenate([zeros, np.frombuffer(each.logprobs, "<f4")])
            advantages = np.concatenate([zeros, np.full(len(text) - PROMPT, number - 1.5, "<f4")])
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = text[:-1].astype("<i4").tobytes()
            for name, values, dtype in (
                ("target_tokens", text[1:], wire.INT64),
                ("logprobs", behaviour, wire.FLOAT32),
                ("advantages", advantages, wire.FLOAT32),
            ):
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = values.tobytes(), dtype
        passes = self._call("forward_backward", request.SerializeToString())
        adam = {**self._next(), "adam_params": {"learning_rate": 1e-4}}
        step = self._call("optim_step", adam)
        self._result(passes)
        self._result(step)

    def _next(self) -> dict[str, Any]:
        self._number += 1
        return {"model_id": self._model, "seq_id": self._number}

    def _call(self, path: str, body: dict[str, Any] | bytes) -> Any:
        binary = isinstance(body, bytes)
        kind = "application/x-protobuf" if binary else "application/json"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**self._headers, "content-type": kind}
        with urlopen(Request(f"{self._url}/api/v1/{path}", data, headers)) as answer:  # noqa: S310 - own server
            content = answer.read()
        return content if "protobuf" in answer.headers["content-type"] else json.loads(content)

    def _result(self, begun: dict[str, Any]) -> Any:
        found = self._call("retrieve_future", {"request_id": begun["request_id"]})
        assert isinstance(found, bytes) or "error" not in found, found
        return found


def run() -> dict[str, Any]:
    """Return CPU-seconds of the same work at once and one after another, and their ratio, for two sizes of the model."""
    single_thread()
    return {size: clients(size) for size in ("1M", "10M")}


def clients(size: str) -> dict[str, Any]:
    """Return the comparison on a base model of this size."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_tinker(subject(size), "base", Path(folder), Binding(), TinkerLimits()) as server,
    ):
        every = [Client(server.url, number) for number in range(CLIENTS)]

        def together() -> None:
            threads = [threading.Thread(target=_steps, args=(client,)) for client in every]
            for each in threads:
                each.start()
            for each in threads:
                each.join()

        def apart() -> None:
            for client in every:
                _steps(client)

        training = server.service.training
        pairs, passes = [], 0
        for _ in range(ROUNDS + 1):  # the first round does not count
            before = training.passes
            at_once = cpu_seconds(together)
            passes = training.passes - before
            pairs.append((at_once, cpu_seconds(apart)))
        return {
            "ratio": statistics.median(one / all_ for all_, one in pairs[1:]),
            "at_once_cpu_s": statistics.median(all_ for all_, _ in pairs[1:]),
            "one_after_another_cpu_s": statistics.median(one for _, one in pairs[1:]),
            "passes_at_once": passes,
            "passes_one_after_another": CLIENTS * STEPS,
        }


def _steps(client: Client) -> None:
    for _ in range(STEPS):
        client.step()
