"""The policy server, by OpenAI's client."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from kapelle.engines.rollout.protocol import Request
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.types import Message, Sampling, Task


def test_the_team_and_its_agents_are_models(client: OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["duo", "duo/first", "duo/second"]
    assert client.models.retrieve("duo/second").id == "duo/second"
    with pytest.raises(NotFoundError, match="Did you mean 'duo/first'"):
        client.models.retrieve("duo/frist")


@pytest.mark.parametrize(
    ("called", "known"),
    [("second", "duo/second"), ("team/second", "duo/second"), ("team", "duo"), ("duo", "duo")],
)
def test_an_agents_own_name_is_enough(client: OpenAI, called: str, known: str) -> None:
    """Some clients remove the part before a slash as a provider; in training the team is called `team`."""
    assert client.models.retrieve(called).id == known
    with pytest.raises(NotFoundError):
        client.models.retrieve(f"other/{called}")


def test_an_agent_answers_with_tokens_of_its_own_weights(client: OpenAI, setup: RolloutSetup) -> None:
    """The server and the engine return the same for one prompt, seed and settings."""
    messages = (Message("system", "You speak first."), Message("user", "2+2?"))
    for agent, given in (("first", messages), ("second", messages[1:])):
        policy = setup.team.policy(agent).name
        ids = setup.engine.renderer(policy).start(given)
        request = Request(
            policy, agent, given, ids, Sampling(max_tokens=6, temperature=0.7, top_p=0.9), 5, Task("", "")
        )
        known = run_async(lambda request=request: setup.engine.generate(request))  # type: ignore[misc]
        answer = client.chat.completions.create(
            model=f"duo/{agent}",
            messages=[{"role": "user", "content": "2+2?"}],
            max_tokens=6,
            temperature=0.7,
            top_p=0.9,
            seed=5,
            logprobs=True,
        )
        [choice] = answer.choices
        assert choice.message.content == known.text
        assert choice.finish_reason == known.finish_reason
        assert choice.logprobs is not None
        assert [each.logprob for each in choice.logprobs.content or []] == list(known.logprobs)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(known.ids))
        assert answer.system_fingerprint == known.weights_hash
        assert answer.model_extra is not None
        assert answer.model_extra["kapelle"]["version"] == 7


def test_choices_differ_and_repeat_with_their_seed(client: OpenAI) -> None:
    def drawn(n: int, seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="duo/second", messages=[{"role": "user", "content": "x"}], n=n, seed=seed, max_tokens=8
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.message.content for choice in answer.choices]

    three = drawn(3, 11)
    assert len(set(three)) == 3
    assert drawn(3, 11) == three
    assert drawn(1, 11) == three[:1]
    assert drawn(3, 12) != three


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 1.5, "top_p": 0.6}]
)
def test_top_logprobs_fit_the_sampled_token(client: OpenAI, sampling: dict[str, Any]) -> None:
    """They are from the sampled distribution: with temperature, top-p and the agent's adapter."""
    answer = client.chat.completions.create(
        model="duo/second",
        messages=[{"role": "user", "content": "2+2?"}],
        max_tokens=12,
        n=2,
        seed=3,
        logprobs=True,
        top_logprobs=20,
        **sampling,
    )
    found = 0
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        for place in choice.logprobs.content:
            likely = [each.logprob for each in place.top_logprobs]
            assert 1 <= len(likely) <= 20
            assert likely == sorted(likely, reverse=True)
            assert sum(map(math.exp, likely)) <= 1 + 1e-5
            assert place.logprob <= likely[0] + 1e-4
            if sampling["temperature"] == 0.0:
                assert place.token == place.top_logprobs[0].token
            same = [each for each in place.top_logprobs if abs(each.logprob - place.logprob) < 1e-4]
            if place.logprob > likely[-1] + 1e-4:
                assert place.token in [each.token for each in same]
                found += 1
    assert found >= 4


def test_parameters_without_effect_are_accepted(client: OpenAI) -> None:
    """Clients and frameworks send them with every call; the tokens stay the same."""

    def asked(messages: list[Any], **extra: Any) -> str:
        answer = client.chat.completions.create(
            model="duo/first", messages=messages, max_tokens=8, seed=1, **extra
        )
        return str(answer.choices[0].message.content)

    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    plain: list[Any] = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    kept: list[Any] = [
        plain[0],
        {**plain[1], "refusal": "", "annotations": [], "tool_calls": [{**call, "index": 0}]},
        plain[2],
    ]
    expected = asked(plain)
    assert asked(kept) == expected
    for extra in (
        {"store": True},
        {"service_tier": "flex"},
        {"prediction": {"type": "content", "content": "x"}},
        {"extra_body": {"chat_template_kwargs": {"unread": True}, "skip_special_tokens": True}},
        {"prompt_cache_key": "mine"},
        {"modalities": ["text"]},
        {"extra_body": {"repetition_penalty": 1.0, "min_p": 0.0, "top_k": -1}},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0},
    ):
        assert asked(plain, **extra) == expected


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"extra_body": {"repetition_penalty": -1}}, "repetition_penalty"),
        ({"extra_body": {"stop_token_ids": [3]}}, "stop_token_ids"),
        ({"logit_bias": {"500000": 1.0}}, "logit_bias"),
        ({"logit_bias": {"word": 1.0}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1e-40}, "temperature"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ],
)
def test_an_unsupported_parameter_is_named(client: OpenAI, extra: dict[str, object], named: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        client.chat.completions.create(  # type: ignore[call-overload]
            model="duo/first", messages=[{"role": "user", "content": "x"}], **extra
        )
    assert raised.value.param == named
    assert f"`{named}`" in raised.value.message


def test_a_prompt_longer_than_the_context_is_an_error(client: OpenAI) -> None:
    for letters in (300, 100_000):
        with pytest.raises(BadRequestError) as raised:
            client.chat.completions.create(
                model="duo/first", messages=[{"role": "user", "content": "x" * letters}]
            )
        assert raised.value.code == "context_length_exceeded"


def test_sampling_parameters_of_openai_and_vllm_are_honoured(client: OpenAI) -> None:
    """The most biased token is sampled until a penalty or a limit excludes it, over all APIs and in streams."""
    bias: Any = {"38": 100, "39": 60}
    plain: Any = {"model": "duo/first", "messages": [{"role": "user", "content": "x"}], "max_tokens": 6}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "AAAAAA"),
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, "AAAAAA"),
        ({"extra_body": {"repetition_penalty": 10.0}}, "AB"),
        ({"extra_body": {"top_k": 1}, "temperature": 2.0}, "AAAAAA"),
    ]
    for extra, begins in cases:
        answer = client.chat.completions.create(**plain, logit_bias=bias, **extra).choices[0]
        assert (answer.message.content or "").startswith(begins)
        stream = client.chat.completions.create(**plain, logit_bias=bias, **extra, stream=True)
        words = "".join(each.delta.content or "" for piece in stream for each in piece.choices)
        assert words.startswith(begins)
    whole = client.chat.completions.create(**plain, extra_body={"min_p": 1.0}, seed=1).choices[0]
    greedy = client.chat.completions.create(**plain, temperature=0, seed=2).choices[0]
    assert whole.message.content == greedy.message.content
    response = client.responses.create(
        model="duo/first", input="x", max_output_tokens=6, extra_body={"logit_bias": bias}
    )
    assert response.output_text == "AAAAAA"
    endless = client.chat.completions.create(**plain, extra_body={"ignore_eos": True}).choices[0]
    assert endless.finish_reason == "length"
