"""A server that speaks as vLLM's does about adapters and completions, over the substitute; one request at a time.

Or as SGLang's documentation says that SGLang does: no SGLang was ever asked.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.engines.rollout.vllm.stand_in import Substitute

from kapelle.engines.rollout.vllm.sampler import AdapterFile, BaseModel, Row
from kapelle.engines.rollout.vllm.served import ServedModel
from kapelle.runtime.constraints import HEADER
from kapelle.runtime.tensors import load_tensors
from kapelle.types import Constraint, Sampling


class StandInServer(ThreadingHTTPServer):
    """Answers on a port of its own until it is closed."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, about: BaseModel, *, sglang: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sglang = sglang
        self.sampler = Substitute(about)
        self.lock = threading.Lock()
        self.adapters: dict[str, AdapterFile] = {}
        self.asked: list[tuple[str, Any]] = []
        """Path and body of every request."""
        self.keys: set[str | None] = set()
        """What requests carried as `Authorization`."""
        self.broken = False
        self.in_place = True
        """Whether its workers take weights while it runs."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def complete(self, body: Any) -> tuple[int, Any]:
        if self.broken:
            return 500, {"error": "out of memory"}
        if body["model"] not in (*self.adapters, "their-base"):
            return 404, {"error": f"no model {body['model']}"}
        form = body.get("structured_outputs")
        sampling = Sampling(
            body["max_tokens"],
            body["temperature"],
            body["top_p"],
            body["top_k"],
            tuple(body["stop"]),
            None if form is None else Constraint.grammar(form["grammar"].removeprefix(HEADER)),
        )
        try:
            self.sampler.add(
                Row("0", tuple(body["prompt"]), sampling, body["seed"], self.adapters.get(body["model"]))
            )
        except ValueError as error:
            return 400, {"error": str(error)}
        found = list(self.sampler.step())
        while not found:
            found = list(self.sampler.step())
        choice = {
            "token_ids": found[0].ids,
            "logprobs": {"token_logprobs": found[0].logprobs},
            "finish_reason": "stop" if found[0].stopped else "length",
        }
        return 200, {"choices": [choice]}

    def generate(self, body: Any) -> tuple[int, Any]:
        """Answer as SGLang: log-probs, ids and texts of the tokens in one list, a finish reason with a type."""
        asked = body["sampling_params"]
        status, found = self.complete(
            {
                "model": body["lora_path"] or "their-base",
                "prompt": body["input_ids"],
                "max_tokens": asked["max_new_tokens"],
                "temperature": asked["temperature"],
                "top_p": asked.get("top_p", 1.0),
                "top_k": max(0, asked.get("top_k", -1)),
                "seed": asked["sampling_seed"],
                "stop": asked["stop"],
            }
        )
        if status != 200:
            return status, found
        (choice,) = found["choices"]
        tokens = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
        listed = [[logp, token, None] for logp, token in tokens] if body["return_logprob"] else None
        about = {"output_token_logprobs": listed, "finish_reason": {"type": choice["finish_reason"]}}
        return 200, {"text": "", "output_ids": choice["token_ids"], "meta_info": about}

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        with self.lock:
            self.asked.append((path, body))
            return self.as_sglang(path, body) if self.sglang else self.as_vllm(path, body)

    def as_sglang(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/get_model_info":
            return 200, {"model_path": "their-base"}
        if path == "/generate":
            return self.generate(body)
        if path == "/flush_cache":
            return 200, {}
        known = {
            "/v1/models": path,
            **{f"/{do}_lora_adapter": f"/v1/{do}_lora_adapter" for do in ("load", "unload")},
        }
        return self.as_vllm(known[path], body) if path in known else (404, {})

    def as_vllm(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "their-base"}]}
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"error": "it has been loaded already"}
            number = len(self.asked)
            self.adapters[body["lora_name"]] = AdapterFile(body["lora_name"], number, Path(body["lora_path"]))
            return 200, {}
        if path == "/collective_rpc" and self.in_place:
            assert body["method"] == "take_weights"
            (folder,) = body["args"]
            self.sampler.overwrite(load_tensors(Path(folder) / "model.safetensors"))
            return 200, {"results": [None]}
        if path.startswith(("/sleep", "/wake_up")):
            return 200, {}
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, {}
        return 404, {}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        assert isinstance(self.server, StandInServer)
        self.server.keys.add(self.headers["Authorization"])
        status, found = self.server.answer(self.path, body)
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Serving:
    """Starts a substitute server for each base, as `start_server` does, and ends the one before."""

    def __init__(self, *, sglang: bool = False) -> None:
        self.sglang = sglang
        self.servers: list[StandInServer] = []

    def __call__(self, about: BaseModel) -> ServedModel:
        self.close()
        self.servers.append(StandInServer(about, sglang=self.sglang))
        return ServedModel(self.servers[-1].url, about)

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()
        self.servers = []
