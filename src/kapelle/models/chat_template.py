"""Chat templates: find out which conversations a template can render and how it writes tools, and limit its running time.

Chat templates are programs that come with a model. Any exception that a template raises becomes a ModelError. The
running time of a template is limited: a watchdog ends a rendering that takes too long with an exception that the
interpreter raises between two steps of the template's loop. A single exponentiation can run without end, so a template
that contains an exponentiation is rejected before it runs.

Some templates reject a system message (Gemma, the first Mistral), two user messages in a row, or an agent that writes
first. Other templates drop such messages silently. Rendering a few small conversations shows what a template supports.
Any message that is not supported becomes part of a user message, which every template supports.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kapelle.errors import KapelleError, ModelError
from kapelle.runtime.machine import refusal
from kapelle.runtime.watchdog import every_tick
from kapelle.types import Json, Message

LIMIT_S = 10.0
"""The time limit of one rendering in seconds. An ordinary rendering takes a millisecond."""
_FIX = "Fix its chat_template.jinja, or use another model."

PLAIN = "plain"
"""The value of `model.chat_template` that selects the plain template."""
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{% if message.role != 'system' %}{{ message.role | capitalize }}: {% endif %}{{ message.content | trim }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
"""A template that renders conversations as plain text with role names, such as `User: …`, an empty line and `Assistant:
…`. The template is meant for base models, and a system message has no role name."""
PLAIN_END = "\nUser:"
"""The string at which answers end with the plain template, in addition to the model's end token."""


def named_template(setting: str) -> str:
    """Return the chat template that a setting names, either `plain` or the path of a Jinja file.

    Raises ModelError if the file cannot be read.
    """
    if setting == PLAIN:
        return PLAIN_TEMPLATE
    try:
        return Path(setting).expanduser().read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelError(
            f"`model.chat_template: {setting}` cannot be read: {refusal(error) or error}. Set `{PLAIN}`, or the path of "
            "a Jinja file."
        ) from None


def check_template(name: str, found: str | dict[str, str] | None) -> None:
    """Raise ModelError if a tokeniser has no chat template, or if the template is invalid or contains `**`."""
    from jinja2 import Environment, TemplateError

    if not found:
        raise ModelError(
            f"The tokeniser of '{name}' has no chat template, so agents cannot converse. Set "
            f"`model.chat_template: {PLAIN}`, which suits base models, set it to the path of a Jinja file, or use an "
            "instruction-tuned model."
        )
    for template in found.values() if isinstance(found, dict) else [found]:
        try:
            read = Environment().lex(template)  # noqa: S701 (nothing is rendered here)
            powers = [line for line, kind, what in read if (kind, what) == _POWER]
        except TemplateError as error:
            raise ModelError(f"The chat template of '{name}' is invalid: {error}. {_FIX}") from None
        if powers:
            raise ModelError(
                f"The chat template of '{name}' uses the operator `**` in line {powers[0]}, whose computation may never "
                f"end. {_FIX}"
            )


_POWER = ("operator", "**")


def template_variables(template: str) -> frozenset[str] | None:
    """Return the arguments that a chat template reads in addition to the conversation and its tools.

    Returns None if the template cannot be parsed.
    """
    from jinja2 import Environment, TemplateError, meta, nodes

    parser = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701 (nothing is rendered here)
    try:  # transformers also supports a tag that marks answers
        parsed = parser.parse(_GENERATION.sub("", template))
    except TemplateError:
        return None
    names = {each.name for each in parsed.find_all(nodes.Name) if each.ctx == "store"}
    # A variable that a template sets itself is an argument only if the template tests whether it is defined.
    tests = (each.node for each in parsed.find_all(nodes.Test) if each.name == "defined")
    own = names - {each.name for each in tests if isinstance(each, nodes.Name)}
    read = meta.find_undeclared_variables(parsed) - own - parser.globals.keys() - _GIVEN
    return frozenset(name for name in read if not name.endswith("_token"))


def with_defaults(template: str, arguments: Mapping[str, Json]) -> str:
    """Return a chat template in which these arguments have default values."""
    given = (
        f"{{%- if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in arguments.items()
    )
    return "".join(given) + template


_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
_GIVEN = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables that every renderer passes to a chat template."""


class _TooLong(Exception):
    """The exception that the watchdog raises in a thread whose rendering takes too long."""


_lock = threading.Lock()
_seconds: dict[int, float] = {}
"""Mapping from a thread to the number of seconds that the thread has been rendering."""
_ended: set[int] = set()
"""The threads to which `_TooLong` has been sent."""


def _end_long_ones(passed: float) -> None:
    """Raise `_TooLong` in threads whose rendering takes too long. The watchdog calls this function."""
    with _lock:
        for thread in _seconds.keys() - _ended:
            _seconds[thread] += passed
            if _seconds[thread] > LIMIT_S:
                _ended.add(thread)
                # A server renders on threads in which a signal handler could not raise.
                raised = ctypes.py_object(_TooLong)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


@contextmanager
def rendering(name: str) -> Iterator[None]:
    """Convert an exception that a template raises in this context into a ModelError.

    A rendering that takes longer than `LIMIT_S` also raises a ModelError.
    """
    fault: Exception | None = None
    me = threading.get_ident()
    every_tick(_end_long_ones)
    try:
        with _lock:
            _ended.discard(me)
            _seconds[me] = 0.0
        try:
            yield
        except _TooLong:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to other people's programs and libraries
            fault = error
        with _lock:
            _seconds.pop(me, None)
            ended = me in _ended
        while ended:  # an exception that was sent already is raised here at the latest
            time.sleep(0.001)
    except _TooLong:
        raise ModelError(
            f"The chat template of '{name}' did not finish within {LIMIT_S:g} s. {_FIX}"
        ) from None
    finally:
        with _lock:
            _seconds.pop(me, None)
    if isinstance(fault, KapelleError):
        raise fault
    if fault is not None:
        why = refusal(fault) or f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}."
        raise ModelError(f"The chat template of '{name}' failed: {why} {_FIX}") from fault


Render = Callable[[list[dict[str, Json]], bool], str]
"""A function that returns a conversation as a string. If the second argument of the function is True, the string ends
with the opening of the agent's next message. The function raises ModelError if the template fails."""

_ROLES = ("system", "developer", "tool", "function")

WORDS = ("kapelleone", "kapelletwo", "kapellethree")
"""The contents of the small conversations. A template can neither strip nor escape these words."""


@dataclass(slots=True)
class TemplateForm:
    """The kinds of conversations that one template supports. Each kind is rendered once, when it is first needed."""

    _render: Render
    _taken: dict[tuple[str, ...], bool] = field(default_factory=dict)
    _in_parts: bool | None = None
    _header: str | None = None

    def text(self, messages: Sequence[Message], *, speak: bool) -> str:
        """Return a conversation as a string. With `speak`, the string ends at the start of the agent's next message.

        Raises ModelError if the template fails.
        """
        written = self._written(self._fitted(messages, speak=speak), speak=speak)
        if not self._takes("user"):
            raise ModelError(
                "The chat template drops the user's messages, so no agent would read its task. Fix its chat_template.jinja, or use "
                "another model."
            )
        return written + self.header if speak else written

    @property
    def header(self) -> str:
        """The opening of an agent's message if the template ignores `add_generation_prompt`. For most templates, the string is empty."""
        if self._header is None:
            header, question = "", [Message("user", WORDS[0])]
            closed = self._written(question, speak=False)
            if self._written(question, speak=True) == closed and self._takes("user", "assistant"):
                # The text between the user's message and an answer.
                answered = self._written([*question, Message("assistant", WORDS[1])], speak=False)
                before, _, _ = answered.partition(WORDS[1])
                between = before.removeprefix(closed)
                # The agent writes a single space itself, with its first word.
                header = between if before.startswith(closed) and between.strip() else ""
            self._header = header
        return self._header

    @property
    def limits(self) -> tuple[str, ...]:
        """Descriptions of what the template does not support and how kapelle handles it. For most templates, the tuple is empty."""
        found = []
        if not self._takes("system", "user"):
            found.append(
                "does not support system messages (agents' `system` opens their first user message instead)"
            )
        if not self._takes("user", "user"):
            found.append(
                "requires alternating user and assistant messages (consecutive messages of one role are joined)"
            )
        if not self._takes("user", "assistant"):
            found.append("does not support the agent's answers (a second turn of an agent raises an error)")
        if self.header:
            found.append(f"ignores `add_generation_prompt` (kapelle adds {self.header!r})")
        return tuple(found)

    def _fitted(self, messages: Sequence[Message], *, speak: bool) -> list[Message]:
        """Return messages with the same content, with roles and in an order that the template supports."""
        fitted: list[Message] = []
        joins = False
        for message in messages:
            foreign = message.role not in ("user", "assistant") and not (
                message.role in _ROLES  # a template may turn any other role name into a control token
                and self._takes(
                    *((message.role, "user") if not fitted else ("user", "assistant", message.role))
                )
            )
            role = "user" if foreign else message.role
            before = fitted[-1].role if fitted else ""
            if role == before == "user" and (foreign or joins or not self._takes("user", "user")):
                joined = f"{fitted[-1].content}\n\n{message.content}"
                fitted[-1] = Message("user", joined, images=(*fitted[-1].images, *message.images))
                joins = foreign
                continue
            if role == "assistant" and before != "user":
                # A second assistant message in a row is tested after the first user message.
                roles = ("user", "assistant") if before == "assistant" else (before,) if before else ()
                if not self._takes(*roles, "assistant"):
                    fitted.append(Message("user", ""))
            fitted.append(Message(role, message.content, images=message.images))
            joins = foreign
        if speak and messages and fitted[-1].role == "assistant" and not self._takes("user", "assistant", ""):
            fitted.append(Message("user", ""))
        return fitted

    def _takes(self, *roles: str) -> bool:
        """Return whether the template writes all messages of a conversation that has these roles.

        An empty last role opens the agent's next message.
        """
        if roles not in self._taken:
            speak = not roles[-1]
            messages = [Message(role, word) for role, word in zip(roles, WORDS, strict=False) if role]
            try:
                text = self._written(messages, speak=speak)
                self._taken[roles] = all(message.content in text for message in messages)
            except ModelError as error:
                if error.__cause__ is None:  # it exceeded the time limit, as any conversation would
                    raise
                self._taken[roles] = False
        return self._taken[roles]

    def _written(self, messages: Sequence[Message], *, speak: bool) -> str:
        if self._in_parts is None:
            self._in_parts = False
            if not self._takes("user"):
                # Templates of vision-language models take a message's content as a list of parts.
                self._in_parts = True
                del self._taken["user",]
                self._in_parts = self._takes("user")
        turns: list[dict[str, Json]] = []
        for message in messages:
            content: Json = message.content
            if self._in_parts or message.images:
                content = [{"type": "image"}] * len(message.images) + [{"type": "text", "text": content}]
            turns.append({"role": message.role, "content": content})
        return self._render(turns, speak)


RenderTools = Callable[[list[dict[str, Json]], bool, Json], str]
"""A function that returns a conversation as a string, with tools in OpenAI's format or None (see `Render`)."""


@dataclass(slots=True)
class ToolTemplate:
    """The format in which a template writes tools, calls and their results, which is determined by rendering a small conversation."""

    _render: RenderTools
    _special_end: Callable[[str], str]
    _as_text: bool = False
    """Whether the arguments of a call are a JSON string. Most templates take an object."""
    _known: bool | None = None

    @property
    def known(self) -> bool:
        """Whether the template writes tools, calls and results."""
        if self._known is None:
            self._known = False
            for self._as_text in (False, True):
                with suppress(ModelError):
                    text = self._written(_EXAMPLE, speak=False)
                    if all(word in text for word in (*WORDS, "kapelletool", "kapellecalled")):
                        self._known = True
                        break
        return self._known

    def start(self, messages: Sequence[Message]) -> str | None:
        """Return a new conversation as a string, or None if no message is structured or the template fails."""
        if not self.known or all(message.structured is None for message in messages):
            return None
        with suppress(ModelError):
            return self._written(_rows(messages), speak=True)
        return None

    def called(self, *calls: Mapping[str, Json], content: str = "") -> str:
        """Return an answer with this content and these calls (`name`, `arguments`) as a string, without its end token.

        The string is empty if the template does not support tools or does not append answers to the prompt.
        """
        if not self.known:
            return ""
        tools = [{"type": "function", "function": {**_TOOL, "name": call["name"]}} for call in calls]
        question: dict[str, Json] = {"role": "user", "content": "?", "tools": tools}
        made = [{"id": f"call{k:05d}", "type": "function", "function": call} for k, call in enumerate(calls)]
        answer: dict[str, Json] = {"role": "assistant", "content": content, "tool_calls": made}
        with suppress(ModelError):
            prompt = self._written([question], speak=True)
            whole = self._written([question, answer], speak=False)
            if whole.startswith(prompt):
                written = whole.removeprefix(prompt)
                return written.rstrip().removesuffix(self._special_end(written).rstrip())
        return ""

    def after_calls(self, messages: Sequence[Message]) -> str | None:
        """Return messages that begin with results of calls as the template writes them after an answer, or None if this is unsupported."""
        rows = _rows(messages)
        results = list(itertools.takewhile(lambda row: "tool_call_id" in row, rows))
        if not self.known or not results:
            return None
        calls = [
            {
                "id": row["tool_call_id"],
                "type": "function",
                "function": {"name": row["name"], "arguments": {}},
            }
            for row in results
        ]
        question: dict[str, Json] = {"role": "user", "content": "?"}
        before = [question, {"role": "assistant", "content": "", "tool_calls": calls}]
        with suppress(ModelError):
            called = self._written(before, speak=False)
            whole = self._written([*before, *rows], speak=True)
            if whole.startswith(called):
                # The model has sampled the calls itself; only the end token and the messages after them are added.
                return self._special_end(called) + whole.removeprefix(called)
        return None

    def _written(self, rows: Sequence[dict[str, Json]], *, speak: bool) -> str:
        tools = next((row["tools"] for row in rows if "tools" in row), None)
        turns = [{name: each for name, each in row.items() if name != "tools"} for row in rows]
        if self._as_text:
            turns = [
                {**turn, "tool_calls": [_with_text(call) for call in turn["tool_calls"]]}
                if "tool_calls" in turn
                else turn
                for turn in turns
            ]
        return self._render(turns, speak, tools)


def _rows(messages: Sequence[Message]) -> list[dict[str, Json]]:
    return [
        {"role": message.role, "content": message.content}
        if message.structured is None
        else json.loads(message.structured)
        for message in messages
    ]


def _with_text(call: Mapping[str, Json]) -> Json:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):  # arguments that are not valid JSON are already a string
        return call
    function = {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {**call, "function": function}


_TOOL = {
    "name": "kapelletool",
    "description": "?",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "?"}},
        "required": ["a"],
    },
}
_CALL = {"name": "kapelletool", "arguments": {"a": "kapellecalled"}}
_EXAMPLE: Sequence[dict[str, Json]] = (
    {"role": "user", "content": WORDS[0], "tools": [{"type": "function", "function": _TOOL}]},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_kapelle00", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "tool_call_id": "call_kapelle00", "name": "kapelletool", "content": WORDS[1]},
    {"role": "assistant", "content": WORDS[2]},
)
