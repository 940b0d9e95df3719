"""Reads model calls of other programs, recorded as OpenTelemetry spans, as data for SFT, DPO and verifiers.

This module is for programs that are instrumented but cannot send their calls to kapelle. Spans may have the format that
the collector's file exporter writes (OTLP as JSON) or the format that Python's SDK prints. The messages may have any of
four formats:

    gen_ai.input.messages, gen_ai.output.messages     the GenAI conventions since 1.37, on the span or its details event
    gen_ai.user.message, …, gen_ai.choice             their earlier events
    gen_ai.prompt.0.content, gen_ai.completion.0.…    OpenLLMetry
    llm.input_messages.0.message.content, …           OpenInference

A call has no log-probs and was not sampled with the weights of the run. A call is therefore a demonstration and has no
policy gradient. The score of a call is the `gen_ai.evaluation.score.value` of its span or of the nearest enclosing
span, or the only score of its trace.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kapelle.errors import DataError
from kapelle.runtime.characters import replace_surrogates

Fields = Mapping[str, Any]
"""Attributes by dotted name."""
Row = Mapping[str, str]
"""A message with the keys `role` and `content`."""

SCORE = "gen_ai.evaluation.score.value"
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that makes instrumentations record messages. Most instrumentations do not record messages by default."""


class UnusableCall(Exception):
    """Raised for a call that cannot be used for training, with the reason."""


@dataclass(frozen=True, slots=True)
class WatchedSpan:
    """A span, independent of its original format."""

    trace: str
    name: str
    parent: str
    """The id of the parent span; empty for the root."""
    started: int
    """The start time in nanoseconds, of which only the order matters."""
    fields: Fields
    events: tuple[tuple[str, Fields], ...] = ()
    title: str = ""
    """The name of the span itself."""


@dataclass(frozen=True, slots=True)
class WatchedCall:
    """A model call, with its prompt and the response."""

    trace: str
    agent: str
    model: str
    messages: tuple[Row, ...]
    """The messages of the prompt, with the keys `role` and `content`. Tool calls have the format `hermes`."""
    completion: str
    score: float | None
    """The score of the call, or None if the call was not evaluated."""


@dataclass(frozen=True, slots=True)
class Traces:
    """The content of recordings."""

    calls: tuple[WatchedCall, ...]
    """The calls in the order of their start, trace by trace."""
    spans: int
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Mapping from a reason to the number of calls that were excluded for this reason."""


def read_traces(path: Path, metric: str | None = None) -> Traces:
    """Return the calls in a file, or in the `.json`, `.jsonl` and `.log` files of a folder.

    The argument `metric` is the name of the evaluation to use. Raises DataError with the position for a file that
    cannot be read, and DataError if there are no spans.
    """
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in (".json", ".jsonl", ".log"))
    spans: dict[tuple[str, str], WatchedSpan] = {}
    logged: list[tuple[str, str, str, Fields]] = []
    for file in files:
        for row in _documents(file):
            spans |= {(each.trace, each.name): each for each in _spans(row)}
            logged += _logs(row)
    if not spans:
        raise DataError(
            f"{path} contains no spans. Give a file written by OpenTelemetry's file exporter (OTLP as "
            "JSON), or the output of a console exporter."
        )
    for trace, name, event, fields in logged:
        if (known := spans.get((trace, name))) is not None:
            spans[trace, name] = replace(known, events=(*known.events, (event, fields)))
    traces: dict[str, list[WatchedSpan]] = {}
    for span in spans.values():
        traces.setdefault(span.trace, []).append(span)
    calls: list[WatchedCall] = []
    excluded: Counter[str] = Counter()
    for own in sorted(traces.values(), key=lambda each: (min(span.started for span in each), each[0].trace)):
        scores = _scores(own, metric)
        by_name = {span.name: span for span in own}
        for span in sorted(own, key=lambda each: (each.started, each.name)):
            try:
                found = _messages(span)
            except UnusableCall as why:
                excluded[str(why)] += 1
                continue
            if found is not None:
                agent, model = _caller(span, by_name)
                score = _score(span, by_name, scores)
                calls.append(WatchedCall(span.trace, agent, model, *found, score))
    return Traces(tuple(calls), len(spans), dict(excluded))


def sft_rows(traces: Traces, least: float | None = None) -> list[dict[str, Any]]:
    """Return a row for each call in the format of `kapelle collect` (see `runs/exports.py`), for `trajectories` and `preferences`.

    If `least` is given, only calls with at least this score are returned. The rows of calls without a score have no
    `reward`.
    """
    rows: list[dict[str, Any]] = []
    turns: Counter[str] = Counter()
    for call in traces.calls:
        turn = turns[call.trace]
        turns[call.trace] += 1
        if least is not None and (call.score is None or call.score < least):
            continue
        rows.append(
            {
                "task": call.trace,
                "episode": 0,
                "turn": turn,
                "agent": call.agent,
                **({} if call.score is None else {"reward": call.score}),
                "messages": [dict(message) for message in call.messages],
                "completion": call.completion,
                "policy": call.model,
            }
        )
    return rows


def graded_rows(traces: Traces) -> list[dict[str, Any]]:
    """Return a row for each call with a score in [0, 1], in the format of graded answers (`labelled`, `kapelle collect --show`)."""
    rows = []
    for call in traces.calls:
        if call.score is None or not 0 <= call.score <= 1:
            continue
        prompt = [message for message in call.messages if message["role"] != "system"]
        question = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        rows.append(
            {
                "question": prompt[0]["content"] if len(prompt) == 1 else question,
                "solution": call.completion,
                "is_correct": call.score,
                "agent": call.agent,
                "task": call.trace,
                "policy": call.model,
            }
        )
    return rows


# -------- Files: OTLP as JSON, one document per line or several in sequence, and the spans that Python's SDK prints


def _documents(file: Path) -> Iterator[Any]:
    """Yield the JSON documents in a file, which may be separated by any white space."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from error
    decoder = json.JSONDecoder()
    space = re.compile(r"\s*")
    place = 0
    while (place := space.match(text, place).end()) < len(text):  # type: ignore[union-attr]
        try:
            found, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, place) + 1
            raise DataError(f"{file}, line {line} is not JSON: {error}. Fix or remove it.") from error
        yield from found if isinstance(found, list) else [found]


def _spans(row: Any) -> Iterator[WatchedSpan]:
    if not isinstance(row, Mapping):
        return
    for resource in _list(row.get("resourceSpans")):
        for scope in _list(resource.get("scopeSpans")):
            for span in _list(scope.get("spans")):
                events = [
                    (str(event.get("name", "")), _attributes(event.get("attributes")))
                    for event in _list(span.get("events"))
                ]
                yield WatchedSpan(
                    str(span.get("traceId", "")),
                    str(span.get("spanId", "")),
                    str(span.get("parentSpanId") or ""),
                    _number(span.get("startTimeUnixNano")),
                    _attributes(span.get("attributes")),
                    tuple(events),
                    str(span.get("name", "")),
                )
    context = row.get("context")
    if isinstance(context, Mapping) and "span_id" in context:  # as Python's SDK prints it
        attributes = row.get("attributes")
        printed = _list(row.get("events"))
        yield WatchedSpan(
            _hex(context.get("trace_id")),
            _hex(context.get("span_id")),
            _hex(row.get("parent_id")),
            _moment(row.get("start_time")),
            attributes if isinstance(attributes, Mapping) else {},
            tuple((str(event.get("name", "")), event.get("attributes") or {}) for event in printed),
            str(row.get("name", "")),
        )


def _logs(row: Any) -> Iterator[tuple[str, str, str, Fields]]:
    """Yield the trace, span, event and attributes of every event that was logged outside of its span."""
    for resource in _list(row.get("resourceLogs")) if isinstance(row, Mapping) else ():
        for scope in _list(resource.get("scopeLogs")):
            for record in _list(scope.get("logRecords")):
                fields = dict(_attributes(record.get("attributes")))
                event = str(record.get("eventName") or fields.get("event.name") or "")
                if isinstance(record.get("body"), Mapping):
                    fields["gen_ai.event.content"] = _value(record["body"])
                yield str(record.get("traceId", "")), str(record.get("spanId", "")), event, fields


def _list(found: Any) -> Sequence[Mapping[str, Any]]:
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else ()


def _attributes(found: Any) -> Fields:
    return {str(each.get("key", "")): _value(each.get("value")) for each in _list(found)}


def _value(given: Any) -> Any:
    """Convert an OTLP value to plain JSON values."""
    if not isinstance(given, Mapping):
        return given
    kind, value = next(iter(given.items()), ("", None))
    if kind == "intValue":
        return _number(value)
    if kind == "arrayValue":
        return [_value(each) for each in (value or {}).get("values", ())]
    if kind == "kvlistValue":
        return _attributes((value or {}).get("values"))
    return value


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _hex(value: Any) -> str:
    return str(value or "").removeprefix("0x")


def _moment(value: Any) -> int:
    """Convert an ISO time to nanoseconds."""
    from datetime import datetime

    try:
        return int(datetime.fromisoformat(str(value)).timestamp() * 1e9)
    except (ValueError, OverflowError):
        return 0


# -------- Messages, in each of the formats


def _messages(span: WatchedSpan) -> tuple[tuple[Row, ...], str] | None:
    """Return the prompt and the response of a call, or None for a span that is not a model call.

    Raises UnusableCall if the call cannot be used for training.
    """
    fields = span.fields
    details = [own for name, own in span.events if name == "gen_ai.client.inference.operation.details"]
    for given in (fields, *details[:1]):
        if "gen_ai.output.messages" in given:
            prompt = [
                *_system(given.get("gen_ai.system_instructions")),
                *_parsed(given.get("gen_ai.input.messages")),
            ]
            return _checked(prompt, _parsed(given["gen_ai.output.messages"]))
    choices = [own for name, own in span.events if name == "gen_ai.choice"]
    if choices:
        prompt = [
            _event_message(match[1], own)
            for name, own in span.events
            if (match := re.fullmatch(r"gen_ai\.(system|user|assistant|tool)\.message", name))
        ]
        return _checked(prompt, [_event_message("assistant", own) for own in choices])
    for prompts, completions, inner in (
        ("gen_ai.prompt", "gen_ai.completion", ""),
        ("llm.input_messages", "llm.output_messages", "message."),
    ):
        answers = _indexed(fields, completions, inner)
        if answers:
            return _checked(_indexed(fields, prompts, inner), answers)
    operation = fields.get("gen_ai.operation.name")
    is_call = operation in ("chat", "generate_content", "text_completion") or (
        operation is None
        and ("gen_ai.request.model" in fields or fields.get("openinference.span.kind") == "LLM")
    )
    if is_call:
        raise UnusableCall(
            f"its messages are not recorded (set {CAPTURE}=true, or your instrumentation's own switch)"
        )
    return None


def _checked(prompt: Sequence[Row], answers: Sequence[Row]) -> tuple[tuple[Row, ...], str]:
    if len(answers) != 1:
        raise UnusableCall("several responses to one prompt, and no record of the one that was used")
    if not prompt:
        raise UnusableCall("a response without a prompt")
    return tuple(prompt), answers[0]["content"]


def _json(given: Any, complaint: str) -> Any:
    """Parse a string as JSON and return other values unchanged. Raises UnusableCall if a string is not JSON."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        raise UnusableCall(complaint) from None


def _json_or(given: Any, default: Any) -> Any:
    """Parse a string as JSON and return other values unchanged. If a string is not JSON, `default` is returned."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return default


def _listed(given: Any) -> list[Any]:
    found = _json(given, "messages that are not JSON (probably truncated)")
    if not isinstance(found, list | None):
        raise UnusableCall("messages that are not a list")
    return found or []


def _system(given: Any) -> list[Row]:
    """Return the system instructions in the conventions since 1.37.

    The instructions are either a plain string, or parts as JSON or as a JSON string.
    """
    parts = _listed(_json_or(given, [{"type": "text", "content": given}]))
    return [_message("system", "\n".join(map(_part, parts)))] if parts else []


def _parsed(given: Any) -> list[Row]:
    """Return messages in the conventions since 1.37, in which each message has a role and parts, as JSON or as a JSON string."""
    messages = []
    for each in _listed(given):
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise UnusableCall("a message without a role")
        parts = each.get("parts")
        text = "\n".join(filter(None, map(_part, parts))) if isinstance(parts, list) else _content(each)
        messages.append(_message(each["role"], text))
    return messages


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return _text(part.get("content"))
    if kind == "reasoning":
        return f"<think>\n{_text(part.get('content'))}\n</think>"
    if kind == "tool_call":
        return _tool_call(part.get("name"), part.get("arguments"))
    if kind == "tool_call_response":
        return _text(part.get("response", part.get("result")))
    raise UnusableCall(f"a part of the kind `{kind}`, which is not text")


def _event_message(role: str, fields: Fields) -> Row:
    """Return the message of an event in the conventions before 1.37. The content of the event is a string, JSON, or separate attributes."""
    content = fields.get("gen_ai.event.content")
    body = fields if content is None else _json_or(content, {"content": content})
    if not isinstance(body, Mapping):
        raise UnusableCall("an event without a message")
    message = body.get("message", body)
    message = _json_or(message, {"content": message})
    return _message(role, _content(message if isinstance(message, Mapping) else {}))


def _content(message: Fields) -> str:
    """Return the text and the tool calls of a message in OpenAI's format."""
    content = message.get("content")
    lines = [_text(content)] if content else []
    for call in _list(_json(message.get("tool_calls"), "tool calls that are not JSON")):
        function = call.get("function")
        own = function if isinstance(function, Mapping) else call
        lines.append(_tool_call(own.get("name"), own.get("arguments")))
    if not lines:
        raise UnusableCall(f"a message without content (set {CAPTURE}=true)")
    return "\n".join(lines)


def _indexed(fields: Fields, start: str, inner: str) -> list[Row]:
    """Return the messages stored in numbered attributes, such as `START.0.role`, `START.0.content` and `START.0.tool_calls.0.name`."""
    found: dict[int, dict[str, Any]] = {}
    calls: dict[int, dict[int, dict[str, Any]]] = {}
    pattern = re.compile(rf"{re.escape(start)}\.(\d{{1,6}})\.{re.escape(inner)}(.+)")
    call_pattern = re.compile(r"tool_calls\.(\d{1,6})\.(?:tool_call\.)?(?:function\.)?(name|arguments)")
    for key, value in fields.items():
        match = pattern.fullmatch(key)
        if match is None:
            continue
        number, name = int(match[1]), match[2]
        own = found.setdefault(number, {})
        if call := call_pattern.fullmatch(name):
            calls.setdefault(number, {}).setdefault(int(call[1]), {})[call[2]] = value
        elif re.fullmatch(r"contents\.\d+\.message_content\.text", name):
            own["content"] = "\n".join(filter(None, [own.get("content", ""), _text(value)]))
        elif name in ("role", "content"):
            own[name] = value
    messages = []
    for number, own in sorted(found.items()):
        own["tool_calls"] = [call for _, call in sorted(calls.get(number, {}).items())]
        messages.append(_message(str(own.get("role") or "assistant"), _content(own)))
    return messages


def _text(content: Any) -> str:
    """Return content as a string.

    A string is returned unchanged, parts in OpenAI's format are returned as their text, and anything else as JSON.
    """
    if isinstance(content, str):
        return content
    parts = _list(content)
    texts = [part for part in parts if part.get("type") in ("text", "input_text", "output_text")]
    if parts and len(texts) == len(content):
        return "".join(str(part.get("text", part.get("content", ""))) for part in texts)
    if any("image" in str(part.get("type")) for part in parts):
        raise UnusableCall("a message with an image")
    return json.dumps(content, ensure_ascii=False)


def _tool_call(name: Any, arguments: Any) -> str:
    if not isinstance(name, str):
        raise UnusableCall("a tool call without a name")
    arguments = _json(arguments, "a tool call with arguments that are not JSON")
    call = json.dumps({"name": name, "arguments": arguments or {}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


ROLES = {"developer": "system", "human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}


def _message(role: str, content: str) -> Row:
    role = ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise UnusableCall(f"a message of the role `{role}`")
    return {"role": role, "content": replace_surrogates(content)}


# -------- Agents and scores

NAMES = ("gen_ai.agent.name", "agent.name", "graph.node.id", "langgraph_node")
"""The attributes in which instrumentations store the name of the agent. The first attribute on the nearest span is used."""
MODELS = ("gen_ai.request.model", "gen_ai.response.model", "llm.model_name")


def _caller(span: WatchedSpan, by_name: Mapping[str, WatchedSpan]) -> tuple[str, str]:
    """Return the agent and the model of a call.

    The name of the agent is an attribute of the call's span or of the nearest enclosing span.
    """
    model = next((str(span.fields[key]) for key in MODELS if key in span.fields), "unknown")
    for each in _outwards(span, by_name):
        for key in NAMES:
            if isinstance(each.fields.get(key), str) and each.fields[key]:
                return each.fields[key], model
        kind = each.fields.get("traceloop.span.kind") or each.fields.get("openinference.span.kind")
        if str(kind).lower() == "agent":
            return str(each.fields.get("traceloop.entity.name") or each.title or model), model
    return model, model


def _outwards(span: WatchedSpan, by_name: Mapping[str, WatchedSpan]) -> Iterator[WatchedSpan]:
    """Yield a span and its ancestors. The iteration ends if the ancestors form a cycle."""
    seen: set[str] = set()
    here: WatchedSpan | None = span
    while here is not None and here.name not in seen:
        seen.add(here.name)
        yield here
        here = by_name.get(here.parent)


def _scores(spans: Sequence[WatchedSpan], metric: str | None) -> dict[str, float]:
    """Return, for each span with an evaluation (an event or an attribute) of the given metric, the last score."""
    found: dict[str, float] = {}
    for span in spans:
        results = [own for name, own in span.events if name == "gen_ai.evaluation.result"]
        for fields in (span.fields, *results):
            value = fields.get(SCORE)
            if metric is not None and fields.get("gen_ai.evaluation.name") != metric:
                continue
            if isinstance(value, int | float) and math.isfinite(value):
                found[span.name] = float(value)
    return found


def _score(
    span: WatchedSpan, by_name: Mapping[str, WatchedSpan], scores: Mapping[str, float]
) -> float | None:
    for each in _outwards(span, by_name):
        if each.name in scores:
            return scores[each.name]
    return next(iter(scores.values())) if len(scores) == 1 else None
