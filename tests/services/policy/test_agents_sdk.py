"""The unmodified OpenAI Agents SDK (`openai-agents`) with a team, by both of its models; skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from tests.support.tiny import sections

from kapelle.services.binding import Binding
from kapelle.services.policy.service import ServingLimits, serve_policy
from kapelle.training.trainer import Trainer

sdk: Any = pytest.importorskip("agents")
pytest.importorskip("llguidance")


class Way(BaseModel):
    """Where to go."""

    go: Literal["left", "right"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    given = sections()
    model = {**given["model"], "embedded": {**given["model"].get("embedded", {}), "context": 4096}}
    team = {**given["team"], "agents": [{"name": "first"}, {"name": "second"}]}
    with (
        Trainer(**sections(team=team, model=model)) as trainer,
        serve_policy(trainer.play, "duo", Binding(), ServingLimits()) as server,
    ):
        yield f"{server.url}/v1"


@pytest.mark.parametrize("kind", ["responses", "chat"])
async def test_a_handoff_a_tool_and_a_typed_answer(address: str, kind: str) -> None:
    from openai import AsyncOpenAI

    sdk.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=address, api_key="none", max_retries=0)
    models = {
        name: sdk.OpenAIResponsesModel(name, client)
        if kind == "responses"
        else sdk.OpenAIChatCompletionsModel(name, client)
        for name in ("first", "second")
    }

    def look(at: Literal["left", "right"]) -> str:
        """Look somewhere."""
        return f"nothing {at}"

    forced = sdk.ModelSettings(max_tokens=400, tool_choice="required")
    looking = sdk.Agent(
        name="looking",
        instructions="Look.",
        model=models["second"],
        tools=[sdk.function_tool(look)],
        model_settings=forced,
        tool_use_behavior="stop_on_first_tool",
    )
    looked = await sdk.Runner.run(looking, "Which way?")
    assert looked.final_output in ("nothing left", "nothing right")
    going = sdk.Agent(
        name="going",
        instructions="Go.",
        model=models["second"],
        output_type=Way,
        model_settings=sdk.ModelSettings(max_tokens=60),
    )
    first = sdk.Agent(
        name="first",
        instructions="Hand over.",
        model=models["first"],
        handoffs=[going],
        model_settings=forced,
    )
    went = await sdk.Runner.run(first, "Which way?")
    assert went.last_agent.name == "going"
    assert went.final_output.go in ("left", "right")
    streamed = sdk.Runner.run_streamed(first, "Which way?")
    assert [event async for event in streamed.stream_events()]
    assert streamed.final_output.go in ("left", "right")
    await client.close()
