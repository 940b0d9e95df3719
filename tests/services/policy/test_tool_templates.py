"""Chat templates that render tools in their own forms (`FAMILIES`), over chat completions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.support.serving import Reciting
from tests.support.tool_templates import FAMILIES, Family

from kapelle.engines.rollout.protocol import Request
from kapelle.environments.grading.text.tool_call import ReadCall, write_calls
from kapelle.models.renderer import ChatRenderer
from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.recording import read_recorded
from kapelle.services.policy.service import ServingLimits, serve_policy
from kapelle.services.policy.speech import writes_calls

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
CALL = ReadCall("look", {"at": "é"})
IDS = [pytest.param(each, id=each.name or each.form) for each in FAMILIES]


class Speaking(Reciting):
    """Returns texts whose family markers are tokens, which the text omits if they are special."""

    def __init__(self, family: Family, *texts: str) -> None:
        self.rendering: ChatRenderer = family.renderer()
        self._left = list(texts)
        super().__init__(lambda _: "")

    def renderer(self, policy: str) -> Any:
        return self.rendering

    async def stream(self, request: Request, on_tokens: Any) -> Any:
        ids = self.rendering.plain(self._left.pop(0))
        self.asked.append(request)
        if on_tokens is not None:
            for token in ids[:-1]:
                on_tokens((token,), (0.0,))
        from kapelle.engines.rollout.protocol import Completion

        return Completion(ids, (0.0,) * len(ids), "stop", self.rendering.spoken(ids), 0, "recited")


@pytest.mark.parametrize("family", IDS)
def test_a_call_that_a_template_renders_is_parsed(family: Family) -> None:
    assert writes_calls(family.renderer().called, family.form)


@pytest.mark.sample(4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", IDS)
def test_calls_are_rendered_and_parsed_in_the_form_of_their_family(
    family: Family, setup: RolloutSetup, tmp_path: Path, *, stream: bool
) -> None:
    """Answers with calls and thoughts are parsed, returned and continued with the exact tokens."""
    if family.form == "harmony":
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    else:
        thought = "<think>\nHm.\n</think>\n"
    first = thought + write_calls([CALL], family.form).removesuffix(family.stops or family.end)
    ending = family.stops or family.end
    last = (
        "<|channel|>final<|message|>It is there.<|return|>"
        if family.form == "harmony"
        else f"It is there.{family.end}"
    )
    engine = Speaking(family, first + ending, last)
    with (
        serve_policy(replace(setup, engine=engine), "duo", Binding(), ServingLimits(), tmp_path) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "Where?"}]
        query: Any = {"model": "first", "tools": [TOOL]}
        thoughts = words = ""
        if stream:
            calls = []
            for piece in client.chat.completions.create(**query, messages=messages, stream=True):
                for choice in piece.choices:
                    words += choice.delta.content or ""
                    thoughts += (choice.delta.model_extra or {}).get("reasoning_content") or ""
                    calls += [each.model_dump(exclude_none=True) for each in choice.delta.tool_calls or ()]
            message: dict[str, Any] = {"role": "assistant", "content": words, "tool_calls": calls}
        else:
            message = (
                client.chat.completions.create(**query, messages=messages).choices[0].message.model_dump()
            )
            words, thoughts, calls = (
                message["content"] or "",
                message["reasoning_content"],
                message["tool_calls"],
            )
        assert (words, thoughts) == ("", "Hm.")
        [call] = calls
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"at": "é"})
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "there"}]
        answer = client.chat.completions.create(**query, messages=messages)
        assert answer.choices[0].message.content == "It is there."
        session = str((answer.model_extra or {})["kapelle"]["session"])
        client.post(f"/sessions/{session}/reward", body={"reward": 1.0}, cast_to=object)
    [episode] = read_recorded(tmp_path)
    one, two = episode.turns
    assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
    read = engine.rendering.decode(two.prompt_ids)
    assert first + ending in read
    assert "You can call these tools" not in read, "kapelle writes that for templates without tools"
    assert read.count("there") == 1
    assert read.count("Hm.") == 1
    assert (ending + ending) not in read


def test_a_models_own_description_of_its_answers_is_used(setup: RolloutSetup) -> None:
    """A form that kapelle does not know is read by `response_template` of the model's tokeniser."""
    own = Family(
        "hermes",
        """{%- if tools %}<|turn>tools
{{ tools | tojson }}<turn|>{% endif %}
{%- for message in messages %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<|call>call:{{ call.function.name }}{{ call.function.arguments | tojson }}<call|>{% endfor %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}""",
        ("<|turn>", "<turn|>", "<|call>", "<call|>"),
        "<turn|>",
    )
    engine = Speaking(
        own,
        'I look.<|call>call:look{"at": "é"}<call|><turn|>',
        "Seven.<turn|>",
        "<|call>call:look{<call|><turn|>",
    )
    tokenizer: Any = engine.rendering.tokenizer
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|turn>model\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<\|call>call:(?P<name>\w+)",
                "close": "<call|>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "<turn|>", "content": "text"},
        },
    }
    with (
        serve_policy(replace(setup, engine=engine), "duo", Binding(), ServingLimits()) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "Where?"}]
        request: Any = {"model": "second", "tools": [TOOL], "messages": messages}
        with client.chat.completions.stream(**request) as pieces:
            message: Any = pieces.get_final_completion().choices[0].message
        [call] = message.tool_calls
        assert (message.content, call.function.name) == ("I look.", "look")
        assert json.loads(call.function.arguments) == {"at": "é"}
        messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        assert client.chat.completions.create(**request).choices[0].message.content == "Seven."
        assert '<|call>call:look{"at": "é"}<call|>' in engine.rendering.decode(engine.asked[1].prompt_ids)
        broken = client.chat.completions.create(**request).choices[0]
        assert (broken.finish_reason, broken.message.tool_calls) == ("stop", None)
