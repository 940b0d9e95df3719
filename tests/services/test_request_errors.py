"""The error of a body names the field, in the form that matched furthest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kapelle.services.policy.chat_form import read_request
from kapelle.services.policy.completions import CompletionForm
from kapelle.services.policy.responses_form import read_response_request
from kapelle.services.request_errors import RequestError

PICTURE = {"type": "image_url", "image_url": {"url": "data:x"}}
NOT_READ = "Input should be"


def chat(**extra: Any) -> None:
    read_request({"model": "m", "messages": [{"role": "user", "content": "x"}], **extra})


def spoken(content: Any, **extra: Any) -> None:
    chat(messages=[{"role": "user", "content": content, **extra}])


def completion(prompt: Any) -> None:
    CompletionForm.read({"model": "m", "prompt": prompt})


def response(given: Any, **extra: Any) -> None:
    read_response_request({"model": "m", "input": given, **extra})


@pytest.mark.parametrize(
    ("asks", "named", "told"),
    [
        (lambda: chat(stop=3), "stop", "a valid string or a valid list"),
        (lambda: chat(stop=["a", 3]), "stop.1", "a valid string"),
        (lambda: chat(stop=[""]), "stop", "`stop`: at most"),
        (lambda: chat(metadata={"str": 3}), "metadata.str", "a valid string"),
        (lambda: chat(metadata={"a[b]": 3}), "metadata.a[b]", "a valid string"),
        (lambda: chat(tool_choice="any"), "tool_choice", "'auto', 'none' or 'required' or a valid dictionary"),
        (lambda: chat(tools=[{"type": "function"}]), "tools.0.function", "Field required"),
        (lambda: spoken(7), "messages.0.content", "a valid string or a valid list"),
        (lambda: spoken([{"type": "text", "text": "x"}, PICTURE]), "messages.0.content.1.type", NOT_READ),
        (lambda: spoken([{"type": "text"}]), "messages.0.content.0.text", "Field required"),
        (lambda: spoken([{"text": "x"}]), "messages.0.content.0.type", "Field required"),
        (lambda: spoken([{"type": "text", "text": "x", "str": 1}]), "messages.0.content.0.str", "not supported"),
        (lambda: spoken("x", audio={}), "messages.0.audio", "not supported"),
        (lambda: read_request({"model": "m"}), "messages", "Field required"),
        (lambda: completion(3), "prompt", "a valid string or a valid list"),
        (lambda: response("x", tool_choice=3), "tool_choice", "or a valid dictionary"),
        (lambda: response([{"type": "message", "role": "user", "content": [{"type": "refusal"}]}]), "input.0.content.0.refusal", "Field required"),
        (lambda: response("x", text={"format": {"type": "json_schema", "schema": {}, "extra": 1}}), "text.format.extra", "not supported"),
        (lambda: response([{"role": "user", "content": [{"type": "input_image"}]}]), "input.0.content.0.type", NOT_READ),
        (lambda: response([{"role": "user", "content": 7}]), "input.0.content", "a valid string or a valid list"),
    ],
)  # fmt: skip
def test_it_names_what_its_sender_wrote(asks: Callable[[], None], named: str, told: str) -> None:
    with pytest.raises(RequestError) as raised:
        asks()
    assert raised.value.status == 400
    assert raised.value.parameter == named
    assert f"`{named}`" in raised.value.message
    assert told in raised.value.message


@pytest.mark.parametrize(
    "asks", [lambda: chat(stop=[1] * 2000), lambda: chat(**{f"a{k}": 1 for k in range(2000)})]
)
def test_many_errors_are_counted_only(asks: Callable[[], None]) -> None:
    """Each further error would take time in the event loop of the server."""
    with pytest.raises(RequestError, match=r"2,00\d incorrect") as raised:
        asks()
    assert raised.value.status == 400
