"""Parses the text of an agent into thoughts, content and tool calls, both while it grows and when it is complete.

The thoughts are at the beginning of a completion, between `<think>` and `</think>`. For Mistral, they may also be
between `[THINK]` and `[/THINK]`, and for gpt-oss, they are in the channel `analysis` of the harmony format. If the chat
template opens the thoughts, the completion contains only the end of the thoughts. Tool calls have the format of the
chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kapelle.environments.grading.text.tool_call import (
    Form,
    NotCalls,
    ReadCall,
    harmony_messages,
    parse_calls,
)
from kapelle.runtime import constraints
from kapelle.runtime.constraints import CallForm
from kapelle.runtime.thoughts import EVERY_PAIR, THOUGHTS, THOUGHTS_OF_MISTRAL, split_thoughts
from kapelle.types import Json


class ParsedAnswer(NamedTuple):
    """The parts of an agent's completion."""

    thoughts: str
    """The thoughts, without surrounding spaces."""
    words: str
    """The text outside of thoughts and tool calls. Spaces before the first tool call are removed."""
    calls: tuple[ReadCall, ...]


@dataclass(frozen=True, slots=True)
class SpeechForm:
    """The rules for parsing a completion."""

    form: Form = "hermes"
    tools: bool = True
    """Whether tool calls are parsed. If false, tool calls are part of the content."""
    thinking: bool = False
    """Whether the prompt has already opened the thoughts."""
    schemas: Sequence[Json] = ()
    """The schemas of the tools. The schemas define which values are strings in formats that write strings without quotes."""
    described: Json = None
    """The model's own description of its completions (`response_template` of transformers), which takes precedence over `form`.
    The value may be None."""
    prompt: str = ""
    """The prompt, if completions are `described`. Special tokens have the same form as in the completion."""

    def read(self, text: str, *, is_cut: bool = False) -> ParsedAnswer:
        """Parse a text that is complete, or that was truncated at its token limit.

        Text that violates the format of tool calls belongs to the content. If there are several tool calls, only
        complete ones are returned.
        """
        if self.described is not None:
            return self._read_described(text)
        if not (is_cut and self.tools):
            return self._read(text)
        # An incomplete mark at the end of a call makes no difference.
        whole = self._read(_without_begun(text, _ONE_CALL[self.form][1:] if self.form in _ONE_CALL else ()))
        if whole.calls and self.form not in (
            "glm",
            "harmony",
        ):  # in such a text, the beginning of a call may be complete
            return whole
        found = self._read(_before_cut_call(text, self.form))
        # If there is no complete call, the whole text is content.
        return found if found.calls else replace(self, tools=False).read(text)

    def _read_described(self, text: str) -> ParsedAnswer:
        from transformers.utils.chat_parsing import parse_response

        try:
            tools: list[Any] = [{"type": "function", "function": each} for each in self.schemas]
            found = parse_response(text, self.described, prefix=self.prompt, tools=tools)
            calls = []
            for each in found.get("tool_calls") or ():
                name, arguments = each["function"]["name"], each["function"]["arguments"]
                if not isinstance(name, str) or not isinstance(arguments, dict):
                    raise ValueError("it is not a call")  # noqa: TRY004 - treated as text in another format
                json.dumps(arguments, allow_nan=False)
                calls.append(ReadCall(name, arguments))
            thoughts, words = (str(found.get(name) or "") for name in ("reasoning_content", "content"))
        except (ValueError, KeyError, TypeError, RecursionError):
            return ParsedAnswer("", text, ())
        return (
            ParsedAnswer(thoughts.strip(), words, tuple(calls)) if self.tools else ParsedAnswer("", text, ())
        )

    def _read(self, text: str) -> ParsedAnswer:
        if self.form == "harmony":
            thoughts, words, calling = _harmony(text)
            try:
                calls = parse_calls(text, ("harmony",)) if self.tools and calling else ()
            except NotCalls:
                calls = ()
            if calling and not calls:
                words = "\n".join(filter(None, (words, calling)))
            return ParsedAnswer(thoughts, words, calls)
        thoughts, rest, _ = split_thoughts(text, thought_marks(self.form), thinking=self.thinking)
        if not self.tools:
            return ParsedAnswer(thoughts, rest, ())
        try:
            calls = parse_calls(rest, (self.form,), self.schemas)
        except NotCalls:
            calls = ()
        if not calls:
            return ParsedAnswer(thoughts, rest, ())
        return ParsedAnswer(thoughts, _words_beside(rest, self.form), calls)

    def read_partial(self, text: str) -> tuple[str, str]:
        """Return the thoughts and the content of a growing text that can no longer change."""
        if self.described is not None:
            return "", ""
        if self.form == "harmony":
            text = _BEGUN_MARK.sub("", text)
            if not text.strip():
                return "", ""  # a mark may follow
            return _harmony(text)[:2]
        around = thought_marks(self.form)
        if any(opening.startswith(text.lstrip()) for opening, _ in around):
            return "", ""
        thoughts, rest, complete = split_thoughts(text, around, thinking=self.thinking)
        if not complete:
            return _without_begun(thoughts, [closing for _, closing in around]).rstrip(), ""
        if not self.tools:
            return thoughts, rest
        begins = rest.rfind("</think>") + len("</think>") if "</think>" in rest else 0
        if (unmarked := _UNMARKED.get(self.form)) and unmarked.match(rest[begins:]):
            return thoughts, rest[:begins]
        marks = _MARKS[self.form]
        places = [place for mark in marks if (place := rest.find(mark)) >= 0]
        return thoughts, (rest[: min(places)] if places else _without_begun(rest, marks)).rstrip()


_MARKS: Mapping[Form, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "qwen_coder": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>"),
    "llama": (),
    "pythonic": (),
}
"""Mapping from a format to the opening marks of its tool calls."""

_BEGINS_AS_JSON = re.compile(r"\s*(?:[{\[`<]|$)")
_BEGINS_AS_CALL = re.compile(r"\s*(?:[\[`]|[^\W\d][\w.]*\s*(?:\(|$)|$)")
_UNMARKED: Mapping[Form, re.Pattern[str]] = {"llama": _BEGINS_AS_JSON, "pythonic": _BEGINS_AS_CALL}
"""Mapping from a format without marks to a regular expression for the beginning of a text that may be a tool call."""


def thought_marks(form: Form) -> Sequence[tuple[str, str]]:
    """Return the pairs of marks that may enclose a model's thoughts, given the format of its tool calls."""
    return EVERY_PAIR if form == "mistral" else (THOUGHTS,)


def _without_begun(text: str, marks: Sequence[str]) -> str:
    """Return a text without an incomplete mark at its end."""
    place = len(text)
    for mark in marks:
        longest = min(len(mark) - 1, len(text))
        begun = next((k for k in range(longest, 0, -1) if text.endswith(mark[:k])), 0)
        place = min(place, len(text) - begun)
    return text[:place]


_ONE_CALL: Mapping[Form, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>"),
    "qwen_coder": ("<tool_call>", "</tool_call>"),
    "deepseek": ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"),
    "harmony": ("<|channel|>", "<|call|>", "<|end|>"),
}
"""Mapping from a format to the mark before each tool call and the marks that may end a tool call. All other formats write tool
calls as a list."""
_IN_LIST = re.compile(r'"(?:[^"\\]|\\.)*+"?|\'(?:[^\'\\]|\\.)*+\'?|[\[\]{}()]', re.DOTALL)


def _before_cut_call(text: str, form: Form) -> str:
    """Return the text before the tool call in which the text was truncated."""
    if form in _ONE_CALL:
        place, *ends = map(text.rfind, _ONE_CALL[form])
        return text[:place] if place > max(ends) else text
    if form == "mistral" and "[ARGS]" in text:
        return text[: text.rfind("[TOOL_CALLS]")]
    start = text.find("[TOOL_CALLS]") + len("[TOOL_CALLS]") if "[TOOL_CALLS]" in text else 0
    is_list = text[start:].lstrip().startswith("[")
    depth, end = 0, 0
    for mark in _IN_LIST.finditer(text, start):
        depth += (mark[0] in "[{(") - (mark[0] in "]})")
        if mark[0] in "]})" and depth == is_list:
            end = mark.end()
    return text[:end] + "]" * (is_list and depth > 0)


def _words_beside(text: str, form: Form) -> str:
    """Return the content of a text that contains tool calls."""
    places = [place for mark in _MARKS[form] if (place := text.find(mark)) >= 0]
    if not places:  # the calls are the whole text after the thoughts, even if no mark opened the thoughts
        before, closing, _ = text.rpartition("</think>")
        return before + closing
    if form not in ("hermes", "glm", "qwen_coder"):
        return text[: min(places)].rstrip()
    first = text.index("<tool_call>", text.rfind("</think>") + 1)  # calls come after the thoughts
    behind = (each.partition("</tool_call>")[2].strip() for each in text[first:].split("<tool_call>"))
    before = text[:first].rstrip()
    return "\n".join([*([before] if before else []), *filter(None, behind)])


def _harmony(text: str) -> tuple[str, str, str]:
    """Return the thoughts, the content and the messages to tools of a text in the harmony format of gpt-oss."""
    messages = harmony_messages(text)
    thoughts = [each.text for each in messages if each.recipient is None and each.channel == "analysis"]
    words = [each.text for each in messages if each.recipient is None and each.channel != "analysis"]
    calls = [each.text for each in messages if each.recipient is not None]
    return "\n".join(thoughts), "\n".join(words), "\n".join(calls)


_BEGUN_MARK = re.compile(r"<(?:\|[a-z]{0,9}\|?)?\Z")
"""A regular expression for an incomplete mark of the harmony format at the end of a text."""

# -------- The format of a chat template's calls

_SIGNS: Sequence[tuple[tuple[str, ...], Form]] = (
    (("<|channel|>",), "harmony"),
    (("<arg_key>",), "glm"),
    (("<\uff5ctool\u2581call\u2581begin\uff5c>",), "deepseek"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>", "<function=", "<parameter="), "qwen_coder"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama"),
    (('{"name": ', '"parameters": '), "llama"),  # small models of version 3.2, without code execution
    (("func_name1(",), "pythonic"),
)
"""Pairs of the strings that a chat template must contain and the format of its tool calls. The most reliable entries come first."""

_DEEPSEEK = ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
_HARMONY = ("start", "channel", "constrain", "message", "end", "call", "return")
_TAGGED = (*THOUGHTS, "<tool_call>", "</tool_call>")
MARKS: Mapping[Form, frozenset[str]] = {
    "hermes": frozenset(_TAGGED),
    "glm": frozenset({*_TAGGED, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}),
    "llama": frozenset({*THOUGHTS, "<|python_tag|>"}),
    "pythonic": frozenset(THOUGHTS),
    "qwen_coder": frozenset(_TAGGED),
    "mistral": frozenset({*THOUGHTS, *THOUGHTS_OF_MISTRAL, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
    "deepseek": frozenset({*THOUGHTS, *(f"<\uff5ctool\u2581{name}\uff5c>" for name in _DEEPSEEK)}),
    "harmony": frozenset(f"<|{name}|>" for name in _HARMONY),
}
"""Mapping from a format to the special tokens that separate thoughts and tool calls from content. Tokenisers may drop these
tokens from text."""


def form_of(template: str) -> Form | None:
    """Return the format of tool calls in a chat template, or None if the template does not format tool calls."""
    return next((form for signs, form in _SIGNS if all(sign in template for sign in signs)), None)


def writes_calls(
    called: Callable[[str, Mapping[str, Json]], str], form: Form, described: Json = None
) -> bool:
    """Return whether a template writes tool calls in the given format.

    The function `called` returns a tool call as the template writes it.
    """
    call = ReadCall("kapelletool", {"word": "kapellecalled"})
    return SpeechForm(form, described=described).read(called(call.name, call.arguments)).calls == (call,)


def call_form(form: Form, template: str) -> CallForm | None:
    """Return the format in which a template writes a forced tool call, or None if tool calls cannot be forced."""
    if form == "mistral" and "[ARGS]" in template:
        return constraints.MISTRAL_NAMED
    if form == "deepseek" and "```json" in template:
        return constraints.DEEPSEEK_FENCED
    return _FORCED.get(form)


_FORCED: Mapping[Form, CallForm] = {
    "hermes": constraints.HERMES,
    "llama": constraints.LLAMA,
    "mistral": constraints.MISTRAL,
    "deepseek": constraints.DEEPSEEK,
    "glm": constraints.GLM,
    "qwen_coder": constraints.QWEN_CODER,
    "harmony": constraints.HARMONY,
}
