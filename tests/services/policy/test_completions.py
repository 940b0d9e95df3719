"""Plain prompts, by OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from kapelle.engines.rollout.protocol import Request
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.services.binding import Binding
from kapelle.services.policy.service import ServingLimits, serve_policy
from kapelle.types import Message, Sampling, Task

ASKED: dict[str, Any] = {"model": "duo/second", "max_tokens": 6, "seed": 5, "temperature": 0.7}


@pytest.fixture(scope="module")
def plain(setup: RolloutSetup) -> Iterator[OpenAI]:
    """Serve the team without recording."""
    with (
        serve_policy(setup, "duo", Binding(), ServingLimits()) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_prompt_is_not_changed(plain: OpenAI, setup: RolloutSetup) -> None:
    """A prompt as text or ids gives the tokens that the engine samples after it, without a template."""
    policy = setup.team.policy("second").name
    renderer: Any = setup.engine.renderer(policy)
    ids = renderer.plain("2+2=")
    assert renderer.decode(ids).endswith("2+2=")
    sampling = Sampling(max_tokens=6, temperature=0.7)
    request = Request(policy, "second", (Message("user", "2+2="),), ids, sampling, 5, Task("", ""))
    expected = run_async(lambda: setup.engine.generate(request))
    for prompt in ("2+2=", list(ids)):
        answer = plain.completions.create(**ASKED, prompt=prompt, logprobs=0)
        [choice] = answer.choices
        assert choice.text == expected.text
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == list(expected.logprobs)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(expected.ids))


def test_several_prompts_are_answered_each_n_times(plain: OpenAI) -> None:
    query = {**ASKED, "n": 2}
    both = plain.completions.create(**query, prompt=["one", "two"])
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = [plain.completions.create(**query, prompt=each) for each in ("one", "two")]
    assert [c.text for c in both.choices] == [c.text for each in alone for c in each.choices]
    ids = [[4, 5], [6]]
    assert len(plain.completions.create(**query, prompt=ids).choices) == 4
    pieces = list(
        plain.completions.create(
            **query, prompt=["one", "two"], stream=True, stream_options={"include_usage": True}
        )
    )
    texts = ["", "", "", ""]
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in both.choices]
    assert pieces[-1].usage == both.usage


def test_the_likeliest_tokens_come_in_its_own_form(plain: OpenAI) -> None:
    answer = plain.completions.create(**ASKED, prompt="2+2=", logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert all(1 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"model": "duo"}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_an_unsupported_parameter_is_named(plain: OpenAI, extra: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        plain.completions.create(**{**ASKED, "prompt": "x", **extra})
    assert (raised.value.param or "").partition(".")[0] == named


def test_sessions_record_conversations_alone(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="chat/completions"):
        client.completions.create(**ASKED, prompt="x")
