"""Conversations of programs that were only watched, from OpenTelemetry's spans, as data for SFT, DPO and verifiers.

A program whose calls cannot be sent to kapelle can still be recorded by whatever instruments it. Read are spans as the collector's
file exporter writes them (OTLP as JSON) and as the SDK of Python prints them, with what was said in any of four forms:

    gen_ai.input.messages, gen_ai.output.messages     the GenAI conventions since 1.37, on the span or its details event
    gen_ai.user.message, …, gen_ai.choice             their events before that
    gen_ai.prompt.0.content, gen_ai.completion.0.…    OpenLLMetry
    llm.input_messages.0.message.content, …           OpenInference

A call has no log-probs and names no weights of ours: it demonstrates, and no policy gradient can be taken of it. What a call is
worth is the `gen_ai.evaluation.score.value` of its own span or of the nearest one around it, or the trace's only one.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kapelle.errors import DataError
from kapelle.runtime.characters import replace_surrogates

Fields = Mapping[str, Any]
"""Attributes by their dotted names."""

SCORE = "gen_ai.evaluation.score.value"
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that lets instrumentations record what is said; most leave it out by default."""


class UnusableCall(Exception):
    """A call from which nothing can be learned, and why."""


@dataclass(frozen=True, slots=True)
class WatchedSpan:
    """One span, in nobody's form."""

    trace: str
    name: str
    parent: str
    """Its parent's id; empty at the root."""
    started: int
    """Nanoseconds; only the order counts."""
    fields: Fields
    events: tuple[tuple[str, Fields], ...] = ()
    title: str = ""
    """What the span is called."""


@dataclass(frozen=True, slots=True)
class WatchedCall:
    """One call of a model: what it was told, and what it answered."""

    trace: str
    agent: str
    model: str
    messages: tuple[Mapping[str, str], ...]
    """Before the answer: `role` and `content`, tools' calls in the form `hermes`."""
    completion: str
    score: float | None
    """None where nobody evaluated it."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What was found in recordings."""

    calls: tuple[WatchedCall, ...]
    """In the order in which they began, trace by trace."""
    spans: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Why calls were left out → how many."""


def read_traces(path: Path, metric: str | None = None) -> Traces:
    """Return the calls in a file, or in a folder's `.json`, `.jsonl` and `.log` files; `metric` names the evaluation that counts.

    DataError for a file that holds no spans, with the place where it cannot be read.
    """
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in (".json", ".jsonl", ".log"))
    spans: dict[tuple[str, str], WatchedSpan] = {}
    loose: list[tuple[str, str, str, Fields]] = []
    for file in files:
        for row in _documents(file):
            for each in _spans(row):
                spans[each.trace, each.name] = each
            loose += _logs(row)
    if not spans:
        raise DataError(
            f"{path} holds no spans. Name what OpenTelemetry's file exporter wrote (OTLP as JSON), or the output of a console exporter."
        )
    for trace, name, event, fields in loose:
        if (known := spans.get((trace, name))) is not None:
            spans[trace, name] = WatchedSpan(
                trace,
                name,
                known.parent,
                known.started,
                known.fields,
                (*known.events, (event, fields)),
                known.title,
            )
    traces: dict[str, list[WatchedSpan]] = {}
    for span in spans.values():
        traces.setdefault(span.trace, []).append(span)
    calls: list[WatchedCall] = []
    left: Counter[str] = Counter()
    for own in sorted(traces.values(), key=lambda each: (min(span.started for span in each), each[0].trace)):
        scores = _scores(own, metric)
        around = {span.name: span for span in own}
        for span in sorted(own, key=lambda each: (each.started, each.name)):
            try:
                said = _said(span)
                if said is None:
                    continue  # no call of a model
                messages, completion = said
            except UnusableCall as why:
                left[str(why)] += 1
                continue
            agent, model = _who(span, around)
            calls.append(
                WatchedCall(span.trace, agent, model, messages, completion, _score(span, around, scores))
            )
    return Traces(tuple(calls), len(spans), dict(left))


def sft_rows(traces: Traces, least: float | None = None) -> list[dict[str, Any]]:
    """Return a row for each call in the form of `kapelle collect` (`runs/exports.py`), which `trajectories` and `preferences` read.

    `least` keeps calls that were found worth so much; rows of calls without a score have no `reward`.
    """
    rows: list[dict[str, Any]] = []
    turns: Counter[str] = Counter()
    for call in traces.calls:
        turn, turns[call.trace] = turns[call.trace], turns[call.trace] + 1
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
    """Return a row for each call with a score in [0, 1] in the form of graded answers (`labelled`, `kapelle collect --show`)."""
    rows = []
    for call in traces.calls:
        if call.score is None or not 0 <= call.score <= 1:
            continue
        asked = [message for message in call.messages if message["role"] != "system"]
        question = (
            asked[0]["content"]
            if len(asked) == 1
            else "\n\n".join(f"{message['role']}: {message['content']}" for message in asked)
        )
        rows.append(
            {
                "question": question,
                "solution": call.completion,
                "is_correct": call.score,
                "agent": call.agent,
                "task": call.trace,
                "policy": call.model,
            }
        )
    return rows


# -------- Files: OTLP as JSON, one document a line or several documents in a row, and the spans that Python's SDK prints


def _documents(file: Path) -> Iterator[Any]:
    """Yield the JSON documents of a file, whatever white space is between them."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from error
    decoder = json.JSONDecoder()
    place = 0
    while (place := _after_space(text, place)) < len(text):
        try:
            found, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, place) + 1
            raise DataError(f"{file}, line {line} is no JSON: {error}. Fix or drop it.") from error
        yield from found if isinstance(found, list) else [found]


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _spans(row: Any) -> Iterator[WatchedSpan]:
    if not isinstance(row, Mapping):
        return
    for resource in _list(row.get("resourceSpans")):
        for scope in _list(resource.get("scopeSpans")):
            for span in _list(scope.get("spans")):
                yield WatchedSpan(
                    str(span.get("traceId", "")),
                    str(span.get("spanId", "")),
                    str(span.get("parentSpanId") or ""),
                    _number(span.get("startTimeUnixNano")),
                    _attributes(span.get("attributes")),
                    tuple(
                        (str(event.get("name", "")), _attributes(event.get("attributes")))
                        for event in _list(span.get("events"))
                    ),
                    str(span.get("name", "")),
                )
    context = row.get("context")
    if isinstance(context, Mapping) and "span_id" in context:  # as Python's SDK prints it
        attributes = row.get("attributes")
        yield WatchedSpan(
            _hex(context.get("trace_id")),
            _hex(context.get("span_id")),
            _hex(row.get("parent_id")),
            _moment(row.get("start_time")),
            attributes if isinstance(attributes, Mapping) else {},
            tuple(
                (str(event.get("name", "")), event.get("attributes") or {})
                for event in _list(row.get("events"))
            ),
            str(row.get("name", "")),
        )


def _logs(row: Any) -> Iterator[tuple[str, str, str, Fields]]:
    """Yield (trace, span, event, attributes) of every event that was logged beside its span."""
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
    """Return a value of OTLP as plain JSON."""
    if not isinstance(given, Mapping):
        return given
    for kind, value in given.items():
        if kind == "intValue":
            return _number(value)
        if kind == "arrayValue":
            return [_value(each) for each in (value or {}).get("values", ())]
        if kind == "kvlistValue":
            return _attributes((value or {}).get("values"))
        return value
    return None


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _hex(value: Any) -> str:
    return str(value or "").removeprefix("0x")


def _moment(value: Any) -> int:
    """Return the nanoseconds of an ISO time."""
    from datetime import datetime

    try:
        return int(datetime.fromisoformat(str(value)).timestamp() * 1e9)
    except (ValueError, OverflowError):
        return 0


# -------- What was said, in each of the forms

Said = tuple[tuple[Mapping[str, str], ...], str]
"""The messages before an answer, and the answer."""


def _said(span: WatchedSpan) -> Said | None:
    """Return what a model was told and answered; None for a span that is no call of one; raises UnusableCall."""
    fields = span.fields
    details = next(
        (own for name, own in span.events if name == "gen_ai.client.inference.operation.details"), {}
    )
    for given in (fields, details):
        if "gen_ai.output.messages" in given:
            told = [
                *_parsed(given.get("gen_ai.system_instructions"), system=True),
                *_parsed(given.get("gen_ai.input.messages")),
            ]
            return _checked(told, _parsed(given["gen_ai.output.messages"]))
    choices = [own for name, own in span.events if name == "gen_ai.choice"]
    if choices:
        told = [
            _event_message(name.removeprefix("gen_ai.").removesuffix(".message"), own)
            for name, own in span.events
            if re.fullmatch(r"gen_ai\.(system|user|assistant|tool)\.message", name)
        ]
        return _checked(told, [_event_message("assistant", own) for own in choices])
    for told_at, said_at, inner in (
        ("gen_ai.prompt", "gen_ai.completion", ""),
        ("llm.input_messages", "llm.output_messages", "message."),
    ):
        said = _indexed(fields, said_at, inner)
        if said:
            return _checked(_indexed(fields, told_at, inner), said)
    operation = fields.get("gen_ai.operation.name")
    called = operation in ("chat", "generate_content", "text_completion") or (
        operation is None
        and ("gen_ai.request.model" in fields or fields.get("openinference.span.kind") == "LLM")
    )
    if called:
        raise UnusableCall(
            f"what was said is not recorded (set {CAPTURE}=true, or your instrumentation's own switch)"
        )
    return None


def _checked(told: Sequence[Mapping[str, str]], said: Sequence[Mapping[str, str]]) -> Said:
    if len(said) != 1:
        raise UnusableCall("several answers to one question, of which nobody says which was taken")
    if not told:
        raise UnusableCall("an answer without a question")
    return tuple(told), said[0]["content"]


def _loaded(given: Any, otherwise: Any) -> Any:
    """Return what a text holds as JSON; of a text that is none `otherwise`, which is raised where it is an error."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        if isinstance(otherwise, UnusableCall):
            raise otherwise from None
        return otherwise


def _parsed(given: Any, *, system: bool = False) -> list[Mapping[str, str]]:
    """Return messages of the conventions since 1.37: a role and parts, as JSON or as the text of it."""
    if system:
        given = _loaded(given, [{"type": "text", "content": given}])
    given = _loaded(given, UnusableCall("messages that are no JSON (cut off, it seems)"))
    if given is None:
        return []
    if not isinstance(given, list):
        raise UnusableCall("messages that are no list")
    if system:
        return [_message("system", "\n".join(map(_part, given)))] if given else []
    messages = []
    for each in given:
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise UnusableCall("a message without a role")
        parts = each.get("parts")
        spoken = "\n".join(filter(None, map(_part, parts))) if isinstance(parts, list) else _content(each)
        messages.append(_message(each["role"], spoken))
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
    raise UnusableCall(f"a part of the kind `{kind}`, which is no text")


def _event_message(role: str, fields: Fields) -> Mapping[str, str]:
    """Return the message of one of the events before 1.37, whose content is a text, JSON, or attributes of its own."""
    content = fields.get("gen_ai.event.content")
    body = _loaded(content, {"content": content}) if content is not None else fields
    if not isinstance(body, Mapping):
        raise UnusableCall("an event without a message")
    message = body.get("message", body)
    message = _loaded(message, {"content": message})
    return _message(role, _content(message if isinstance(message, Mapping) else {}))


def _content(message: Fields) -> str:
    """Return the words and calls of a message in OpenAI's form."""
    content = message.get("content")
    lines = [_text(content)] if content else []
    calls = _loaded(message.get("tool_calls"), UnusableCall("calls of tools that are no JSON"))
    for call in _list(calls):
        function = call.get("function")
        own = function if isinstance(function, Mapping) else call
        lines.append(_tool_call(own.get("name"), own.get("arguments")))
    if not lines:
        raise UnusableCall(f"a message without content (set {CAPTURE}=true)")
    return "\n".join(lines)


def _indexed(fields: Fields, start: str, inner: str) -> list[Mapping[str, str]]:
    """Return messages whose fields are attributes by number: `START.0.role`, `START.0.content`, `START.0.tool_calls.0.name`."""
    found: dict[int, dict[str, Any]] = {}
    calls: dict[int, dict[int, dict[str, Any]]] = {}
    for key, value in fields.items():
        match = re.fullmatch(rf"{re.escape(start)}\.(\d{{1,6}})\.{re.escape(inner)}(.+)", key)
        if match is None:
            continue
        number, name = int(match[1]), match[2]
        own = found.setdefault(number, {})
        if call := re.fullmatch(
            r"tool_calls\.(\d{1,6})\.(?:tool_call\.)?(?:function\.)?(name|arguments)", name
        ):
            calls.setdefault(number, {}).setdefault(int(call[1]), {})[call[2]] = value
        elif re.fullmatch(r"contents\.\d+\.message_content\.text", name):
            own["content"] = "\n".join(filter(None, [own.get("content", ""), _text(value)]))
        elif name in ("role", "content"):
            own[name] = value
    messages = []
    for number, own in sorted(found.items()):
        asked = [call for _, call in sorted(calls.get(number, {}).items())]
        role = own.get("role") or "assistant"
        messages.append(_message(str(role), _content({"content": own.get("content"), "tool_calls": asked})))
    return messages


def _text(content: Any) -> str:
    """Return content as text: as it is, of OpenAI's parts their texts, of anything else its JSON."""
    if isinstance(content, str):
        return content
    parts = _list(content)
    if (
        parts
        and len(parts) == len(content)
        and all(part.get("type") in ("text", "input_text", "output_text") for part in parts)
    ):
        return "".join(str(part.get("text", part.get("content", ""))) for part in parts)
    if parts and any("image" in str(part.get("type")) for part in parts):
        raise UnusableCall("a message with a picture")
    return json.dumps(content, ensure_ascii=False)


def _tool_call(name: Any, arguments: Any) -> str:
    if not isinstance(name, str):
        raise UnusableCall("a call of a tool without a name")
    arguments = _loaded(arguments, UnusableCall("a call of a tool whose arguments are no JSON"))
    called = json.dumps({"name": name, "arguments": arguments or {}}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


ROLES = {"developer": "system", "human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}


def _message(role: str, content: str) -> Mapping[str, str]:
    role = ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise UnusableCall(f"a message of the role `{role}`")
    return {"role": role, "content": replace_surrogates(content)}


# -------- Who called, and what it was worth

NAMES = ("gen_ai.agent.name", "agent.name", "graph.node.id", "langgraph_node")
"""Attributes that name the agent, as instrumentations write them; the first that a span around the call has counts."""


def _who(span: WatchedSpan, around: Mapping[str, WatchedSpan]) -> tuple[str, str]:
    """Return the agent that called, and the model: the agent's name stands on the call or on the nearest span around it."""
    model = next(
        (
            str(span.fields[key])
            for key in ("gen_ai.request.model", "gen_ai.response.model", "llm.model_name")
            if key in span.fields
        ),
        "unknown",
    )
    for each in _outwards(span, around):
        for key in NAMES:
            if isinstance(each.fields.get(key), str) and each.fields[key]:
                return each.fields[key], model
        kind = each.fields.get("traceloop.span.kind") or each.fields.get("openinference.span.kind")
        if str(kind).lower() == "agent":
            return str(each.fields.get("traceloop.entity.name") or each.title or model), model
    return model, model


def _outwards(span: WatchedSpan, around: Mapping[str, WatchedSpan]) -> Iterator[WatchedSpan]:
    """Yield a span and those around it, from the inside; a circle of parents ends where it closes."""
    seen: set[str] = set()
    here: WatchedSpan | None = span
    while here is not None and here.name not in seen:
        seen.add(here.name)
        yield here
        here = around.get(here.parent)


def _scores(spans: Sequence[WatchedSpan], metric: str | None) -> dict[str, float]:
    """Return what spans were found worth: an evaluation's event, or attribute, of that name; the last one of each span."""
    found: dict[str, float] = {}
    for span in spans:
        for fields in (
            span.fields,
            *(own for name, own in span.events if name == "gen_ai.evaluation.result"),
        ):
            value, name = fields.get(SCORE), fields.get("gen_ai.evaluation.name")
            if metric is not None and name != metric:
                continue
            if isinstance(value, int | float) and math.isfinite(value):
                found[span.name] = float(value)
    return found


def _score(span: WatchedSpan, around: Mapping[str, WatchedSpan], scores: Mapping[str, float]) -> float | None:
    for each in _outwards(span, around):
        if each.name in scores:
            return scores[each.name]
    return next(iter(scores.values())) if len(scores) == 1 else None
