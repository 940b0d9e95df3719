"""Calls a server with Anthropic's client, and raises AssertionError if the client does not get what it expects.

The agent `first` answers `<think>` Hm. `</think>` and a call of the tool `add`, and after the tool's result the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic, beta_async_tool, beta_tool

ASKED: dict[str, Any] = {
    "model": "duo/first",
    "max_tokens": 256,
    "system": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "1+2?"}],
}
OFFERED: dict[str, Any] = {
    "tools": [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


def check_whole_and_streamed(client: Anthropic) -> None:
    whole = client.messages.create(**ASKED, **OFFERED)
    assert [block.type for block in whole.content] == ["thinking", "tool_use"]
    assert whole.content[0].thinking == "Hm."
    assert (whole.content[1].name, whole.content[1].input) == ("add", {"a": 1, "b": 2})
    assert (whole.stop_reason, whole.model, whole.role) == ("tool_use", "duo/first", "assistant")
    counted = client.messages.count_tokens(
        **{k: v for k, v in {**ASKED, **OFFERED}.items() if k != "max_tokens"}
    )
    assert counted.input_tokens == whole.usage.input_tokens > 0
    assert whole.usage.output_tokens > 0

    with client.messages.stream(**ASKED, **OFFERED) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_message()
    assert {"thinking", "signature", "input_json"} <= kinds
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    assert [block.to_dict() | {"id": ""} for block in streamed.content] == [
        block.to_dict() | {"id": ""} for block in whole.content
    ]

    # The client returns its own objects, including the thoughts.
    result = {"type": "tool_result", "tool_use_id": streamed.content[1].id, "content": "3"}
    again = [*ASKED["messages"], streamed.to_param(), {"role": "user", "content": [result]}]
    with client.messages.stream(**{**ASKED, **OFFERED, "messages": again}) as stream:
        assert "".join(stream.text_stream) == "It is 3."
        assert stream.get_final_message().stop_reason == "end_turn"


def check_tool_runner(client: Anthropic) -> None:
    @beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    final = client.beta.messages.tool_runner(**ASKED, tools=[add]).until_done()
    assert [block.text for block in final.content if block.type == "text"] == ["It is 3."]


async def check_async() -> None:
    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    async with AsyncAnthropic() as client:
        final = await client.beta.messages.tool_runner(**ASKED, tools=[add], stream=False).until_done()
        assert final.content[-1].text == "It is 3."
        async with client.messages.stream(**ASKED, **OFFERED) as stream:
            assert (await stream.get_final_message()).stop_reason == "tool_use"


def error_of(call: Callable[[], object]) -> Any:
    try:
        call()
    except anthropic.APIStatusError as error:
        return error
    raise RuntimeError("the server accepted the call")


def check_errors(client: Anthropic) -> None:
    error = error_of(lambda: client.messages.create(**ASKED, extra_body={"container": "c"}))
    assert isinstance(error, anthropic.BadRequestError)
    assert error.api_message == "The parameter `container` is not supported."
    assert (error.type, error.error_code) == ("invalid_request_error", "unsupported_parameter")
    error = error_of(lambda: client.with_options(api_key="none").messages.create(**ASKED))
    assert isinstance(error, anthropic.AuthenticationError)
    assert error.api_message.startswith("The token is missing or incorrect.")
    error = error_of(lambda: client.messages.create(**{**ASKED, "model": "duo/third"}))
    assert isinstance(error, anthropic.NotFoundError)


def main() -> None:
    with Anthropic(max_retries=0) as client:
        assert "duo/first" in [model.id for model in client.models.list()]
        check_whole_and_streamed(client)
        check_tool_runner(client)
        check_errors(client)
    asyncio.run(check_async())


if __name__ == "__main__":
    main()
