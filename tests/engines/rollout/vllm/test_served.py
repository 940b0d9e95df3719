"""vLLM's server: what is sent to it, what it may answer, and what goes wrong; the contract is asked of it too."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.rollout.subjects import POLICIES, base, own_weights
from tests.engines.rollout.test_contract import ask, ask_for, assert_true
from tests.engines.rollout.vllm.stand_in_server import Serving

from kapelle.engines.rollout.vllm import served
from kapelle.engines.rollout.vllm.engine import VllmEngine, WeightFiles, base_model
from kapelle.engines.rollout.vllm.sampler import BaseModel, Row
from kapelle.engines.rollout.vllm.served import VLLM
from kapelle.errors import EngineError
from kapelle.models.weights import weights_hash
from kapelle.types import Sampling

ABOUT = BaseModel("some/model", "float32", 64, (1,), 2, 2)


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.close()


@pytest.fixture
def engine(serving: Serving, tmp_path: Path) -> Iterator[VllmEngine]:
    made = VllmEngine({"base": base()}, POLICIES, serving, tmp_path / "files", restarts=False)
    yield made
    made.close()


def bodies(serving: Serving, path: str) -> list[Any]:
    return [body for asked, body in serving.servers[-1].asked if asked == path]


class TestRequests:
    def test_ids_go_in_and_the_ends_of_turns_are_ours(self, engine: VllmEngine, serving: Serving) -> None:
        request = ask_for("still", 5)
        asyncio.run(ask(engine, [request]))
        (body,) = bodies(serving, "/v1/completions")
        assert (body["model"], tuple(body["prompt"]), body["seed"]) == ("their-base", request.prompt_ids, 5)
        assert body["stop_token_ids"] == sorted(base().end_ids)
        assert body["ignore_eos"] is True
        assert body["return_token_ids"] is True

    def test_an_adapter_is_loaded_once_and_forgotten_after_the_next(
        self, engine: VllmEngine, serving: Serving
    ) -> None:
        asyncio.run(ask(engine, [ask_for("a", k) for k in range(3)]))
        engine.load("a", own_weights()["a"], 1)
        asyncio.run(ask(engine, [ask_for("a")]))
        loaded = [body["lora_name"] for body in bodies(serving, "/v1/load_lora_adapter")]
        assert len(set(loaded)) == len(loaded) == 2
        assert [body["lora_name"] for body in bodies(serving, "/v1/unload_lora_adapter")] == loaded[:1]
        assert bodies(serving, "/reset_prefix_cache")


class TestWholeModels:
    @pytest.fixture
    def whole(self, serving: Serving, tmp_path: Path) -> Iterator[VllmEngine]:
        made = VllmEngine({"base": base()}, POLICIES, serving, tmp_path / "files")
        yield made
        made.close()

    def test_a_server_reads_them_while_it_runs(self, whole: VllmEngine, serving: Serving) -> None:
        new = {name: 0.5 * tensor.detach() for name, tensor in own_weights()["still"].items()}
        whole.load("still", new, 4)
        (answer,) = asyncio.run(ask(whole, [ask_for("still")]))
        assert_true({**own_weights(), "still": new}, ask_for("still"), answer)
        assert (answer.version, answer.weights_hash) == (4, weights_hash(new))
        assert len(serving.servers) == 1
        paths = [path for path, _ in serving.servers[0].asked]
        assert (
            paths.index("/collective_rpc")
            < paths.index("/reset_prefix_cache")
            < paths.index("/v1/completions")
        )

    def test_one_without_the_method_is_started_again(
        self, whole: VllmEngine, serving: Serving, caplog: pytest.LogCaptureFixture
    ) -> None:
        serving.servers[0].in_place = False
        new = {name: 0.5 * tensor.detach() for name, tensor in own_weights()["still"].items()}
        whole.load("still", new, 1)
        (answer,) = asyncio.run(ask(whole, [ask_for("still")]))
        assert_true({**own_weights(), "still": new}, ask_for("still"), answer)
        (said,) = caplog.messages
        assert "restarted" in said
        assert "/collective_rpc (HTTP 404)" in said
        whole.load("still", own_weights()["still"], 2)
        assert bodies(serving, "/collective_rpc") == []
        assert len(caplog.messages) == 1

    def test_the_kv_cache_continues_sleeping_while_they_are_read(
        self, serving: Serving, tmp_path: Path
    ) -> None:
        files, model = WeightFiles(tmp_path / "files"), base()
        folder = files.model(model, model.base_parameters())
        serving(base_model(model, str(folder), list(POLICIES))).close()
        server = serving.servers[0]
        sampler = served.ServedModel(server.url, ABOUT, sleeps=True)
        sampler.sleep()
        sampler.sleep()
        assert sampler.take({}, lambda: folder)
        sampler.add(Row("0", (7, 8, 9), Sampling(max_tokens=2), 0, None))
        sampler.step()
        sampler.take({}, lambda: folder)
        paths = [
            path for path, _ in server.asked if path.startswith(("/sleep", "/wake_up", "/coll", "/v1/comp"))
        ]
        assert paths == [
            "/sleep?level=1",
            "/wake_up?tags=weights",
            "/collective_rpc",
            "/wake_up?tags=kv_cache",
            "/v1/completions",
            "/collective_rpc",
        ]
        sampler.close()


class TestFaults:
    def test_a_rejected_row_fails_alone(self, engine: VllmEngine, serving: Serving) -> None:
        long = replace(ask_for("a", 1), prompt_ids=tuple(range(6, 250)) * 2)

        async def both() -> list[Any]:
            requests = [long, ask_for("a")]
            return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

        refused, answered = asyncio.run(both())
        assert isinstance(refused, EngineError)
        assert "HTTP 400" in str(refused)
        assert answered.ids
        assert len(serving.servers) == 1

    def test_a_server_that_ends_at_once_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(served, "_flags", lambda given: [])
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(EngineError, match="ended with code 1"):
            served.start_server(1.0, 8, {}, ABOUT)

    def test_sglang_requests_use_its_format(self) -> None:
        serving = Serving(sglang=True)
        engine = VllmEngine({"base": base()}, POLICIES, serving, Path(tempfile.mkdtemp()))
        try:
            request = ask_for("a", 7, Sampling(max_tokens=5, temperature=0.7, stop=("x",)))
            (answer,) = asyncio.run(ask(engine, [request]))
            asked = serving.servers[0].asked
            (generate,) = [body for path, body in asked if path == "/generate"]
            (loaded,) = [body for path, body in asked if path == "/load_lora_adapter"]
            assert (generate["input_ids"], generate["return_logprob"]) == (list(request.prompt_ids), True)
            assert generate["lora_path"] == loaded["lora_name"]
            # It ignores `stop_token_ids` where it ignores the end of a text.
            assert "ignore_eos" not in generate["sampling_params"]
            assert generate["sampling_params"]["sampling_seed"] == 7
            assert len(answer.ids) == len(answer.logprobs) > 0
        finally:
            engine.close()
            serving.close()

    @pytest.mark.parametrize(
        "choice",
        [
            {},
            {"finish_reason": "stop", "text": "words"},
            {"finish_reason": "stop", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}},
            {"finish_reason": "abort", "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}},
            {"finish_reason": "stop", "token_ids": [1], "logprobs": None},
        ],
    )
    def test_text_without_ids_and_log_probs_is_no_answer(self, choice: dict[str, Any]) -> None:
        found = VLLM.read("0", 200, json.dumps({"choices": [choice]}).encode())
        assert found.error is not None
        assert "return_token_ids" in found.error
