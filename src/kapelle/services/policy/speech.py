"""What an agent's text says: thoughts, words and calls of tools, whole and while the text still grows.

A model thinks between `<think>` and `</think>` at the beginning of its answer, or in harmony's channel `analysis`; where the
chat template opens the thoughts itself, the answer has their end alone. Calls stand in the form that the chat template knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kapelle.grading.text.tool_call import (
    Form,
    NotCalls,
    ReadCall,
    harmony_messages,
    parse_calls,
)
from kapelle.runtime import constraints
from kapelle.runtime.constraints import CallForm
from kapelle.types import Json


class Speech(NamedTuple):
    """An answer of an agent."""

    thoughts: str
    """Without the spaces around them."""
    words: str
    """All words outside of thoughts and calls; what stands before the first call as it is, but for the spaces at its end."""
    calls: tuple[ReadCall, ...]


@dataclass(frozen=True, slots=True)
class SpeechForm:
    """How one answer is read."""

    form: Form = "hermes"
    tools: bool = True
    """Whether calls are looked for; else a text that calls is a text."""
    thinking: bool = False
    """Whether the prompt has opened the thoughts."""
    schemas: Sequence[Json] = ()
    """Of the tools: they say which values are texts, where a form writes texts without quotes."""

    def read(self, text: str) -> Speech:
        """Return what a complete text says; one that breaks the form of calls calls nothing."""
        if self.form == "harmony":
            thoughts, words, calling = _harmony(text)
            try:
                calls = parse_calls(text, ("harmony",)) if self.tools and calling else ()
            except NotCalls:
                calls = ()
            return Speech(thoughts, words if calls or not calling else _together(words, calling), calls)
        thoughts, rest, _ = _split_thoughts(text, thinking=self.thinking)
        if not self.tools:
            return Speech(thoughts, rest, ())
        try:
            calls = parse_calls(rest, (self.form,), self.schemas)
        except NotCalls:
            calls = ()
        if not calls:
            return Speech(thoughts, rest, ())
        return Speech(thoughts, _words_beside(rest, self.form), calls)

    def heard(self, text: str) -> tuple[str, str]:
        """Return the thoughts and words of a text that still grows, as far as nothing that follows can take them back."""
        if self.form == "harmony":
            text = _BEGUN_MARK.sub("", text)
            if not text.strip():
                return "", ""  # a mark may follow, before which spaces say nothing
            thoughts, words, calling = _harmony(text)
            return thoughts, words if not calling else words.rstrip()
        if "<think>".startswith(text.lstrip()):
            return "", ""
        thoughts, rest, thought = _split_thoughts(text, thinking=self.thinking)
        if not thought:
            return _without_begun(thoughts, ("</think>",)).rstrip(), ""
        if not self.tools:
            return thoughts, rest
        if _HOLDS.get(self.form, _never)(rest):
            return thoughts, ""
        marks = _MARKS[self.form]
        places = [place for mark in marks if (place := rest.find(mark)) >= 0]
        return thoughts, (rest[: min(places)] if places else _without_begun(rest, marks)).rstrip()


_MARKS: Mapping[Form, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>"),
    "llama": (),
    "pythonic": (),
}
"""Form → what opens its calls."""

_BEGINS_AS_JSON = re.compile(r"\s*(?:[{\[`<]|$)")
_BEGINS_AS_CALL = re.compile(r"\s*(?:[\[`]|[^\W\d][\w.]*\s*(?:\(|$)|$)")
_HOLDS: Mapping[Form, Callable[[str], object]] = {
    "llama": _BEGINS_AS_JSON.match,
    "pythonic": _BEGINS_AS_CALL.match,
}
"""Form → whether a text so far may be nothing but calls, in forms without a mark."""


def _never(_text: str) -> None:
    return None


def _split_thoughts(text: str, *, thinking: bool) -> tuple[str, str, bool]:
    """Return thoughts, what follows them, and whether the thoughts are over (or there are none)."""
    begun = text.lstrip()
    opens = begun.startswith("<think>")
    if not opens and not thinking:
        return "", text, True
    inner, end, rest = begun.removeprefix("<think>").partition("</think>")
    return inner.strip(), rest.lstrip() if end else "", bool(end)


def _without_begun(text: str, marks: Sequence[str]) -> str:
    """Return a text without what may be the beginning of a mark at its end."""
    place = len(text)
    for mark in marks:
        longest = min(len(mark) - 1, len(text))
        begun = next((k for k in range(longest, 0, -1) if text.endswith(mark[:k])), 0)
        place = min(place, len(text) - begun)
    return text[:place]


def _words_beside(text: str, form: Form) -> str:
    """Return the words outside of the calls of a text that has some."""
    places = [place for mark in _MARKS[form] if (place := text.find(mark)) >= 0]
    if not places:
        return ""
    if form not in ("hermes", "glm"):
        return text[: min(places)].rstrip()
    first = text.index("<tool_call>", text.rfind("</think>") + 1)  # calls come after thoughts
    behind = (each.partition("</tool_call>")[2].strip() for each in text[first:].split("<tool_call>"))
    before = text[:first].rstrip()
    return "\n".join([*([before] if before else []), *filter(None, behind)])


def _harmony(text: str) -> tuple[str, str, str]:
    """Return the thoughts and words of a text of gpt-oss, and what it says to tools."""
    said = harmony_messages(text)
    thoughts = [each.text for each in said if each.recipient is None and each.channel == "analysis"]
    words = [each.text for each in said if each.recipient is None and each.channel != "analysis"]
    calls = [each.text for each in said if each.recipient is not None]
    return "\n".join(thoughts), "\n".join(words), "\n".join(calls)


def _together(*texts: str) -> str:
    return "\n".join(filter(None, texts))


_BEGUN_MARK = re.compile(r"<(?:\|[a-z]{0,9}\|?)?$")
"""The beginning of a mark of harmony at the end of a text."""

# -------- The form that a chat template knows

_SIGNS: Sequence[tuple[str, Form]] = (
    ("<|channel|>", "harmony"),
    ("<arg_key>", "glm"),
    ("<\uff5ctool\u2581call\u2581begin\uff5c>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ("func_name1(", "pythonic"),
)
"""What stands in a chat template → the form of its calls, the surest sign first."""

_DEEPSEEK = ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
_HARMONY = ("start", "channel", "constrain", "message", "end", "call", "return")
_THOUGHTS = ("<think>", "</think>")
_TAGGED = (*_THOUGHTS, "<tool_call>", "</tool_call>")
MARKS: Mapping[Form, frozenset[str]] = {
    "hermes": frozenset(_TAGGED),
    "glm": frozenset({*_TAGGED, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}),
    "llama": frozenset({*_THOUGHTS, "<|python_tag|>"}),
    "pythonic": frozenset(_THOUGHTS),
    "mistral": frozenset({*_THOUGHTS, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
    "deepseek": frozenset({*_THOUGHTS, *(f"<\uff5ctool\u2581{name}\uff5c>" for name in _DEEPSEEK)}),
    "harmony": frozenset(f"<|{name}|>" for name in _HARMONY),
}
"""Form → tokens that tell thoughts and calls from words, and that a tokeniser may drop from texts as special ones."""


def form_of(template: str) -> Form | None:
    """Return the form of tool calls that a chat template writes; None where it writes none."""
    return next((form for sign, form in _SIGNS if sign in template), None)


def call_form(form: Form, template: str) -> CallForm | None:
    """Return how a forced call is written in a form, as this template writes calls; None where none can be forced."""
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
    "harmony": constraints.HARMONY,
}
