"""Calls of programs in OpenTelemetry's spans, in each of their forms, as data for recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kapelle.cli import main
from kapelle.runs.traces import read_traces, sft_rows

TOLD = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "2+2?"}]
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def otlp(value: Any) -> dict[str, Any]:
    """Return a value as OTLP writes it."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [otlp(each) for each in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": attributes(value)}}
    return {"stringValue": value}


def attributes(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": otlp(value)} for key, value in fields.items()]


def span(
    name: str,
    fields: Mapping[str, Any],
    parent: str = "",
    trace: str = "t1",
    start: int = 0,
    events: Sequence[tuple[str, Mapping[str, Any]]] = (),
    title: str = "chat",
) -> dict[str, Any]:
    return {
        "traceId": trace,
        "spanId": name,
        **({"parentSpanId": parent} if parent else {}),
        "name": title,
        "startTimeUnixNano": str(start),
        "attributes": attributes(fields),
        "events": [{"name": event, "attributes": attributes(own)} for event, own in events],
    }


def written(folder: Path, *spans: Mapping[str, Any], logs: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write spans as the collector's file exporter does, one document a line."""
    rows: list[Any] = [{"resourceSpans": [{"scopeSpans": [{"spans": [each]}]}]} for each in spans]
    rows += [{"resourceLogs": [{"scopeLogs": [{"logRecords": [each]}]}]} for each in logs]
    file = folder / "traces.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


CALL = {"type": "tool_call", "id": "1", "name": "add", "arguments": {"a": 2}}
HEAD = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt"}
PRESENT = {
    **HEAD,
    "gen_ai.system_instructions": json.dumps([text("Plan.")]),
    "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [text("2+2?")]}]),
    "gen_ai.output.messages": json.dumps(
        [{"role": "assistant", "parts": [text("Let me add."), CALL], "finish_reason": "tool_call"}]
    ),
}
STRUCTURED = {
    **HEAD,
    "gen_ai.input.messages": [
        {"role": "system", "parts": [text("Plan.")]},
        {"role": "user", "parts": [text("2+2?")]},
    ],
    "gen_ai.output.messages": [
        {"role": "assistant", "parts": [text("Let me add."), {**CALL, "arguments": '{"a": 2}'}]}
    ],
}
LLMETRY = {
    "gen_ai.request.model": "gpt",
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Plan.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "2+2?",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "Let me add.",
    "gen_ai.completion.0.tool_calls.0.name": "add",
    "gen_ai.completion.0.tool_calls.0.arguments": '{"a": 2}',
}
INFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "gpt",
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Plan.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.text": "2+2?",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "Let me add.",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "add",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"a": 2}',
}
OLD_CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
OLD = (
    ("gen_ai.system.message", {"content": "Plan."}),
    ("gen_ai.user.message", {"gen_ai.event.content": json.dumps({"content": "2+2?"})}),
    (
        "gen_ai.choice",
        {
            "gen_ai.event.content": json.dumps(
                {"message": {"content": "Let me add.", "tool_calls": [OLD_CALL]}}
            )
        },
    ),
)


@pytest.mark.parametrize(
    ("fields", "events"),
    [
        (PRESENT, ()),
        (STRUCTURED, ()),
        (HEAD, [("gen_ai.client.inference.operation.details", PRESENT)]),
        (LLMETRY, ()),
        (INFERENCE, ()),
        (HEAD, OLD),
    ],
    ids=["text", "structured", "details", "openllmetry", "openinference", "events"],
)
def test_every_form_gives_the_same_call(
    tmp_path: Path, fields: Mapping[str, Any], events: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    [call] = read_traces(written(tmp_path, span("a", fields, events=events))).calls
    assert list(call.messages) == TOLD
    assert call.completion == f"Let me add.\n{CALLED}"
    assert (call.model, call.agent, call.score) == ("gpt", "gpt", None)


def test_logged_events_belong_to_their_span(tmp_path: Path) -> None:
    logs = [
        {"traceId": "t1", "spanId": "a", "eventName": name, "attributes": attributes(own)}
        for name, own in OLD
    ]
    logs += [
        {
            "traceId": "t1",
            "spanId": "a",
            "attributes": attributes(
                {"event.name": "gen_ai.evaluation.result", "gen_ai.evaluation.score.value": 0.5}
            ),
        }
    ]
    [call] = read_traces(written(tmp_path, span("a", HEAD), logs=logs)).calls
    assert (list(call.messages), call.score) == (TOLD, 0.5)


def test_pythons_console_exporter_is_read(tmp_path: Path) -> None:
    printed: dict[str, Any] = {
        "name": "chat",
        "context": {"trace_id": "0xt1", "span_id": "0xa", "trace_state": "[]"},
        "parent_id": None,
        "start_time": "2026-11-27T01:00:00.000000Z",
        "attributes": PRESENT,
        "events": [],
    }
    later = {
        **printed,
        "context": {"trace_id": "0xt1", "span_id": "0xb"},
        "start_time": "2026-11-27T01:00:01Z",
    }
    file = tmp_path / "console.log"
    file.write_text(json.dumps(later, indent=4) + "\n" + json.dumps(printed, indent=4) + "\n")
    found = read_traces(file)
    assert (found.spans, len(found.calls), found.calls[0].trace) == (2, 2, "t1")


def said(answer: str, question: str = "2+2?") -> dict[str, Any]:
    return {
        **HEAD,
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [text(question)]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [text(answer)]}]),
    }


def worth(value: float, name: str = "right") -> tuple[str, dict[str, Any]]:
    return (
        "gen_ai.evaluation.result",
        {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value},
    )


def test_agents_and_scores_are_those_of_the_nearest_span(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        span("root", {}, events=[worth(0.25), worth(9.0, "speed")]),
        span("plan", {"gen_ai.agent.name": "planner"}, "root"),
        span("p1", said("first"), "plan", start=1),
        span("p2", said("second"), "plan", start=3, events=[worth(1.0)]),
        span("solve", {"openinference.span.kind": "AGENT"}, "root", title="solver"),
        span("s1", said("third"), "solve", start=2),
        span("lost", said("fourth"), "who knows", start=4),
        span("turning", said("fifth"), "turning", start=5),
    )
    found = read_traces(file, "right")
    assert [(call.completion, call.agent, call.score) for call in found.calls] == [
        ("first", "planner", 0.25),
        ("third", "solver", 0.25),
        ("second", "planner", 1.0),
        ("fourth", "gpt", None),
        ("fifth", "gpt", None),
    ]
    assert read_traces(file).calls[0].score == 9.0, "the last one, where none is named"
    rows = sft_rows(found)
    assert [row["turn"] for row in rows] == [0, 1, 2, 3, 4]
    assert [("reward" in row) for row in rows] == [True, True, True, False, False]
    assert [row["completion"] for row in sft_rows(found, 0.5)] == ["second"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (HEAD, "not recorded (set OTEL_"),
        ({**PRESENT, "gen_ai.output.messages": "[{"}, "not JSON (probably"),
        (
            {**PRESENT, "gen_ai.system_instructions": "[]", "gen_ai.input.messages": "[]"},
            "without a prompt",
        ),
        (
            {**PRESENT, "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "blob"}]}])},
            "a part of the kind `blob`",
        ),
        (
            {**PRESENT, "gen_ai.input.messages": json.dumps([{"role": "king", "parts": [text("x")]}])},
            "role `king`",
        ),
        ({**LLMETRY, "gen_ai.completion.0.tool_calls.0.arguments": "{"}, "arguments that are not JSON"),
    ],
)
def test_unusable_calls_are_counted(tmp_path: Path, fields: Mapping[str, Any], why: str) -> None:
    found = read_traces(written(tmp_path, span("a", fields), span("b", PRESENT)))
    assert len(found.calls) == 1
    [(reason, number)] = found.excluded.items()
    assert (why in reason, number) == (True, 1)


@pytest.mark.parametrize(
    "attribute", ["gen_ai.output.messages", "gen_ai.input.messages", "gen_ai.system_instructions"]
)
@settings(max_examples=25, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["role", "parts", "type", "content", "name", "arguments", "tool_calls", "function"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_message_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, attribute: str, value: Any
) -> None:
    file = written(tmp_path_factory.mktemp("any"), span("a", {**PRESENT, attribute: json.dumps(value)}))
    found = read_traces(file)
    assert len(found.calls) + sum(found.excluded.values()) == 1


class TestCollect:
    def test_recorded_conversations_train_by_sft(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        spans = []
        for k in range(12):
            for answer, score in (("4", 1.0), ("5", 0.0)):
                trace = f"{k}-{answer}"
                spans += [
                    span(f"r{trace}", {"gen_ai.agent.name": "actor"}, trace=trace, events=[worth(score)]),
                    span(f"c{trace}", said(answer, f"{k}+{4 - k}?"), f"r{trace}", trace=trace, start=1),
                ]
        file, out = written(tmp_path, *spans), tmp_path / "rows.jsonl"
        assert main(["collect", "--traces", str(file), "--out", str(out)]) == 0
        said_so = capsys.readouterr().out
        assert "24 of 24 calls, 24 with a score, by actor" in said_so
        assert "no log-probs" in said_so
        words = ["environment.name=trajectories", "workflow.name=parallel", f"environment.path={out}", "environment.test_share=0.3",
                 "model.path=embedded", "training.steps=1", "training.tasks_per_step=2", "evaluation.problems=2", "--no-rich"]  # fmt: skip
        assert main(["train", "mrlm_sft", *words, "--run-dir", str(tmp_path / "sft")]) == 0
        graded = tmp_path / "graded.jsonl"
        assert main(["collect", "--traces", str(file), "--for", "verifier", "--out", str(graded)]) == 0
        capsys.readouterr()
        assert main(["collect", "--show", str(graded), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["answers"], shown["right"], shown["both"]) == (24, 12, 12)
