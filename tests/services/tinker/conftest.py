"""A server of the Tinker protocol on a tiny model, and a caller that speaks the protocol by plain HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.tiny import tiny_model

from kapelle.runtime.wire import tinker_v1_pb2 as wire
from kapelle.services.binding import Binding
from kapelle.services.tinker.service import TinkerLimits, TinkerServer, serve_tinker
from kapelle.types import Json

KEYS = {"ann": "tml-aaaaaaaaaaaaaaaa", "bob": "tml-bbbbbbbbbbbbbbbb"}
LIMITS = TinkerLimits(adapters=3, tokens=2000, gather=0.05)


@dataclass
class Caller:
    """One client with a session, whose requests are numbered."""

    web: httpx.Client
    key: str
    session: str = ""
    numbers: dict[str, int] = field(default_factory=dict)

    def post(self, path: str, body: Json, status: int = 200) -> Json:
        """Return the answer to a call, which must have this status."""
        found = self.web.post(f"/api/v1/{path}", json=body, headers={"x-api-key": self.key})
        assert found.status_code == status, found.text
        return found.json() if found.content else None

    def result(self, begun: Json) -> Any:
        """Wait for the result of a request: a JSON value, or the bytes of a message."""
        found = self.web.post("/api/v1/retrieve_future", json=begun, headers={"x-api-key": self.key})
        assert found.status_code == 200, found.text
        binary = found.headers["content-type"] == "application/x-protobuf"
        return found.content if binary else found.json()

    def open(self) -> Caller:
        """Open a session."""
        self.session = self.post("create_session", {"tags": [], "sdk_version": "0"})["session_id"]
        return self

    def create(self, number: int = 0, **lora: Any) -> str:
        """Create a model and return its name."""
        lora = {"rank": 2, "seed": 7, **lora}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny", "lora_config": lora}
        return str(self.result(self.post("create_model", body))["model_id"])

    def number(self, model: str) -> int:
        """Return the next sequence number of a model."""
        self.numbers[model] = self.numbers.get(model, 0) + 1
        return self.numbers[model]

    def begin_passes(
        self,
        model: str,
        data: Sequence[tuple[Sequence[int], Mapping[str, Sequence[float]]]],
        loss: str = "cross_entropy",
        forward_only: bool = False,
        status: int = 200,
        **config: float,
    ) -> Json:
        """Send examples (token ids, inputs of the loss) and return the name of the result."""
        number = self.number(model) if status == 200 else 1
        request = wire.ForwardBackwardRequest(
            model_id=model, seq_id=number, loss_fn=loss, forward_only=forward_only
        )
        for name, value in config.items():
            request.loss_fn_config_v2[name].number = value
        for tokens, inputs in data:
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
            for name, values in inputs.items():
                whole = name == "target_tokens"
                tensor = datum.loss_fn_inputs[name]
                tensor.dtype = wire.INT64 if whole else wire.FLOAT32
                tensor.dense = np.array(values, "<i8" if whole else "<f4").tobytes()
                tensor.shape.append(len(values))
        headers = {"x-api-key": self.key, "content-type": "application/x-protobuf"}
        found = self.web.post(
            "/api/v1/forward_backward", content=request.SerializeToString(), headers=headers
        )
        assert found.status_code == status, found.text
        return found.json()

    def passes(self, begun: Json) -> tuple[float, list[list[float]]]:
        """Return the sum of the loss and the log-probs of each example."""
        output = wire.ForwardBackwardOutput.FromString(self.result(begun))
        logps = [
            np.frombuffer(each.fields["logprobs"].data, "<f4").tolist() for each in output.loss_fn_outputs
        ]
        return output.metrics["loss:sum"], logps

    def step(self, model: str, **adam: float) -> Json:
        """Take an optimiser step."""
        body = {"model_id": model, "seq_id": self.number(model), "adam_params": adam}
        return self.result(self.post("optim_step", body))

    def save(self, model: str, name: str | None, route: str = "save_weights", **more: Any) -> Json:
        """Save the weights of a model and return the answer."""
        body = {"model_id": model, "seq_id": self.number(model), "path": name, **more}
        return self.result(self.post(route, body))

    def sampler(self, path: str | None, number: int = 1000) -> str:
        """Open a sampling session on saved weights or the base model."""
        of = {"base_model": "tiny"} if path is None else {"model_path": path}
        body = {"session_id": self.session, "sampling_session_seq_id": number, **of}
        return str(self.post("create_sampling_session", body)["sampling_session_id"])

    def begin_samples(self, sampler: str, prompt: Sequence[int], **more: Any) -> Json:
        """Send a request for samples and return the name of the result."""
        settings = {name: more.pop(name) for name in SETTINGS if name in more}
        body = {
            "sampling_session_id": sampler,
            "seq_id": self.number(sampler),
            "prompt": {"chunks": [{"tokens": list(prompt), "type": "encoded_text"}]},
            "sampling_params": settings,
            **more,
        }
        return self.post("asample", body)

    def samples(self, begun: Json) -> wire.SampleResponse:
        """Return samples."""
        answer = wire.SampleResponse()
        answer.ParseFromString(self.result({"request_id": begun["request_id"]}))
        return answer


SETTINGS = ("max_tokens", "temperature", "seed", "stop", "top_k", "top_p")


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with serve_tinker(
        tiny_model(), "tiny", tmp_path_factory.mktemp("tinker"), Binding(), LIMITS, KEYS
    ) as made:
        yield made


@pytest.fixture
def callers(server: TinkerServer) -> Iterator[Mapping[str, Caller]]:
    """Return a caller for each client; their sessions end with the test."""
    with httpx.Client(base_url=server.url, timeout=60.0) as web:
        made = {name: Caller(web, key).open() for name, key in KEYS.items()}
        yield made
        for each in made.values():
            each.post(f"sessions/{each.session}/finish", {"reason": {"type": "success"}}, 204)
