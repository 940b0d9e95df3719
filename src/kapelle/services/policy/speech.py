"""What an agent's text says: thoughts, words and calls of tools, whole and while the text still grows.

A model thinks between `<think>` and `</think>` at the beginning of its answer, Mistral's also between `[THINK]` and `[/THINK]`, or
in harmony's channel `analysis`; where the chat template opens the thoughts itself, the answer has their end alone. Calls stand in the form that the chat template knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        thoughts, rest, _ = split_thoughts(text, thought_marks(self.form), thinking=self.thinking)
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
            return _harmony(text)[:2]
        around = thought_marks(self.form)
        if any(opening.startswith(text.lstrip()) for opening, _ in around):
            return "", ""
        thoughts, rest, thought = split_thoughts(text, around, thinking=self.thinking)
        if not thought:
            return _without_begun(thoughts, [closing for _, closing in around]).rstrip(), ""
        if not self.tools:
            return thoughts, rest
        begins = rest.rfind("</think>") + len("</think>") if "</think>" in rest else 0
        if _HOLDS.get(self.form, _never)(rest[begins:]):
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


def thought_marks(form: Form) -> Sequence[tuple[str, str]]:
    """Return what may stand around the thoughts of a model whose calls have this form."""
    return EVERY_PAIR if form == "mistral" else (THOUGHTS,)


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
    if not places:  # the calls are all that stands behind thoughts, even those that nothing opened
        before, closing, _ = text.rpartition("</think>")
        return before + closing
    if form not in ("hermes", "glm", "qwen_coder"):
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


_BEGUN_MARK = re.compile(r"<(?:\|[a-z]{0,9}\|?)?\Z")
"""The beginning of a mark of harmony at the end of a text."""

# -------- The form that a chat template knows

_SIGNS: Sequence[tuple[tuple[str, ...], Form]] = (
    (("<|channel|>",), "harmony"),
    (("<arg_key>",), "glm"),
    (("<\uff5ctool\u2581call\u2581begin\uff5c>",), "deepseek"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>", "<function=", "<parameter="), "qwen_coder"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama"),
    (('{"name": ', '"parameters": '), "llama"),  # 3.2 in small, which runs no code
    (("func_name1(",), "pythonic"),
)
"""What stands in a chat template, all of it → the form of its calls, the surest sign first."""

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
"""Form → tokens that tell thoughts and calls from words, and that a tokeniser may drop from texts as special ones."""


def form_of(template: str) -> Form | None:
    """Return the form of tool calls that a chat template writes; None where it writes none."""
    return next((form for signs, form in _SIGNS if all(sign in template for sign in signs)), None)


def writes_calls(called: Callable[[str, Mapping[str, Json]], str], form: Form) -> bool:
    """Return whether what a template writes for a call is read in a form; `called` returns the answer that makes a call."""
    call = ReadCall("kapelletool", {"word": "kapellecalled"})
    return SpeechForm(form).read(called(call.name, call.arguments)).calls == (call,)


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
    "qwen_coder": constraints.QWEN_CODER,
    "harmony": constraints.HARMONY,
}
