"""Agents behind an OpenAI-compatible URL: what is sent, what comes back, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.support.episodes import TASK

from kapelle.engines.rollout.compose import ComposedEngine
from kapelle.engines.rollout.endpoint import EndpointEngine
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.grading.text.tool_call import ReadCall
from kapelle.errors import EngineError, EpisodeError, RequestRefused
from kapelle.services.policy.speech import SpeechForm
from kapelle.team import Endpoint
from kapelle.types import Constraint, Message, Sampling

ENDPOINT = Endpoint("https://example.test/v1/", "their-model", "THEIR_KEY")
ASKED = Request(
    "judge",
    "critic",
    (Message("system", "Be strict."), Message("user", "2+2=5?", speaker="a")),
    (1, 2),
    Sampling(max_tokens=9, temperature=0.3, top_p=0.8, stop=("\n",)),
    seed=(1 << 62) + 5,
    task=TASK,
)


def engine(answer: Callable[[httpx.Request], httpx.Response], retries: int = 2) -> EndpointEngine:
    return EndpointEngine({"judge": ENDPOINT}, retries=retries, transport=httpx.MockTransport(answer))


def reply(content: Any = "No.", finish: str = "stop") -> httpx.Response:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": finish}
    return httpx.Response(200, json={"choices": [choice]})


class TestRequest:
    async def test_it_is_openais(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("THEIR_KEY", "secret")
        seen: list[httpx.Request] = []

        def answer(request: httpx.Request) -> httpx.Response:
            seen.append(request)
            return reply()

        await engine(answer).generate(ASKED)
        (request,) = seen
        assert str(request.url) == "https://example.test/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer secret"
        assert json.loads(request.content) == {
            "model": "their-model",
            "messages": [
                {"role": "system", "content": "Be strict."},
                {"role": "user", "content": "2+2=5?"},
            ],
            "max_tokens": 9,
            "temperature": 0.3,
            "top_p": 0.8,
            "seed": 5,
            "stop": ["\n"],
        }

    async def test_calls_and_their_results_are_openais(self) -> None:
        """Tools of a caller are fields of the request; an earlier answer's calls get the ids of their results."""
        seen: list[Any] = []

        def answer(request: httpx.Request) -> httpx.Response:
            seen.append(json.loads(request.content))
            call = {"id": "theirs", "function": {"name": "look", "arguments": '{"at": 2}'}}
            return httpx.Response(
                200, json={"choices": [{"message": {"content": None, "tool_calls": [call]}}]}
            )

        tools = [{"type": "function", "function": {"name": "look"}}]
        fields = {"tools": tools, "tool_choice": "required"}
        sampling = replace(ASKED.sampling, constraint=Constraint.endpoint(fields))
        first = await engine(answer).generate(replace(ASKED, sampling=sampling))
        result = {"role": "tool", "content": "7", "tool_call_id": "call_1", "name": "look"}
        messages = (
            *ASKED.messages,
            Message("assistant", f"I look.\n{first.text}"),
            Message("tool", "7", structured=json.dumps(result)),
        )
        await engine(answer).generate(replace(ASKED, sampling=sampling, messages=messages))
        assert seen[0]["tools"] == tools
        assert seen[0]["tool_choice"] == "required"
        assert seen[1]["messages"][2:] == [
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"at": 2}'},
                    }
                ],
            },
            {"role": "tool", "content": "7", "tool_call_id": "call_1"},
        ]


class TestAnswer:
    async def test_its_text_is_unchanged(self) -> None:
        found = await engine(lambda _: reply("Nein — 4.")).generate(ASKED)
        assert found.text == "Nein — 4."
        assert bytes(found.ids).decode() == "Nein — 4."
        assert len(found.logprobs) == len(found.ids)
        assert (found.finish_reason, found.version, found.weights_hash) == ("stop", 0, "their-model")

    @pytest.mark.parametrize(
        ("usage", "counted"),
        [
            ({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}, (7, 3)),
            (None, None),
            ({"prompt_tokens": 7}, None),
            ({"prompt_tokens": -1, "completion_tokens": 3}, None),
            ({"prompt_tokens": "7", "completion_tokens": 1e9}, None),
            ({"prompt_tokens": True, "completion_tokens": 1 << 70}, None),
            ([7, 3], None),
        ],
    )
    async def test_its_server_counts_the_tokens(self, usage: Any, counted: tuple[int, int] | None) -> None:
        choice = {"message": {"content": "No."}, "finish_reason": "stop"}
        said = httpx.Response(200, json={"choices": [choice], "usage": usage})
        assert (await engine(lambda _: said).generate(ASKED)).usage == counted

    async def test_a_call_that_its_limit_cut_has_no_end(self) -> None:
        """The server's complete calls before it are read as such."""
        calls = [{"id": k, "function": {"name": "look", "arguments": k}} for k in ('{"at": 2}', '{"at')]
        choice = {"message": {"content": "I look.", "tool_calls": calls}, "finish_reason": "length"}
        found = await engine(lambda _: httpx.Response(200, json={"choices": [choice]})).generate(ASKED)
        answer = SpeechForm("hermes").read(found.text, is_cut=found.finish_reason == "length")
        assert answer == ("", "I look.", (ReadCall("look", {"at": 2}),))

    @pytest.mark.parametrize("why", ["content_filter", "error"])
    async def test_a_withheld_text_is_not_an_answer(self, why: str) -> None:
        choice = {"message": {"content": None}, "finish_reason": why}
        with pytest.raises(EpisodeError, match=f"returned no text; `finish_reason` is {why}"):
            await engine(lambda _: httpx.Response(200, json={"choices": [choice]})).generate(ASKED)

    @pytest.mark.parametrize(
        "answer",
        [
            httpx.Response(200, json=[]),
            httpx.Response(200, json={"choices": []}),
            httpx.Response(200, json={"choices": [{"message": "hm"}]}),
            httpx.Response(200, json={"choices": [{"message": {"content": ["part"]}}]}),
        ],
    )
    async def test_another_form_fails_the_episode(self, answer: httpx.Response) -> None:
        with pytest.raises(EpisodeError, match="chat completions"):
            await engine(lambda _: answer).generate(ASKED)


class TestFaults:
    @pytest.mark.parametrize("status", [500, 503, 429])
    async def test_a_busy_server_is_requested_again(self, status: int) -> None:
        answers = iter([httpx.Response(status), httpx.Response(status), reply("now")])
        assert (await engine(lambda _: next(answers)).generate(ASKED)).text == "now"

    async def test_a_lost_connection_is_retried(self) -> None:
        tries = []

        def answer(request: httpx.Request) -> httpx.Response:
            tries.append(request)
            if len(tries) < 2:
                raise httpx.ConnectError("refused")
            return reply("now")

        assert (await engine(answer).generate(ASKED)).text == "now"

    async def test_after_the_last_try_the_episode_fails_with_the_reason(self) -> None:
        tries = []

        def answer(request: httpx.Request) -> httpx.Response:
            tries.append(request)
            return httpx.Response(503)

        with pytest.raises(EpisodeError, match=r"'judge' \(https://example\.test/v1/\).*HTTP 503"):
            await engine(answer, retries=1).generate(ASKED)
        assert len(tries) == 2

    async def test_a_field_that_the_server_does_not_support_is_replaced(self) -> None:
        """As with OpenAI's reasoning models; the replacement is remembered."""
        bodies: list[Any] = []

        def answer(request: httpx.Request) -> httpx.Response:
            bodies.append(json.loads(request.content))
            for name in ("max_tokens", "temperature"):
                if name in bodies[-1]:
                    error = {"message": f"Unsupported: {name}", "param": name, "code": "unsupported_value"}
                    return httpx.Response(400, json={"error": error})
            return reply("now")

        sampling = replace(ASKED.sampling, temperature=1.0)
        made = engine(answer)
        for _ in range(2):
            assert (await made.generate(replace(ASKED, sampling=sampling))).text == "now"
        assert len(bodies) == 4
        assert bodies[-1]["max_completion_tokens"] == 9
        with pytest.raises(RequestRefused, match="Unsupported: temperature"):
            await made.generate(ASKED)


class TestComposed:
    async def test_each_policy_is_sampled_by_its_engine(self) -> None:
        loaded: list[str] = []

        class Learner(ScriptedEngine):
            def load(self, policy: str, weights: object, version: int) -> None:
                loaded.append(f"{policy}@{version}")

        script = Learner({"solver": lambda _: "4"})
        remote = engine(lambda _: reply("5"))
        both = ComposedEngine([script, remote])
        assert tuple(both.policies) == ("solver", "judge")
        assert (await both.generate(ASKED)).text == "5"
        solver = Request("solver", "a", (), (), Sampling(), 0, TASK)
        assert (await both.generate(solver)).text == "4"
        assert both.renderer("judge") is remote.renderer("judge")
        both.load("solver", {}, 3)
        assert loaded == ["solver@3"]
        with pytest.raises(EngineError):
            both.load("judge", {}, 3)
        both.close()
