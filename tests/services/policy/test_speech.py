"""What an agent's text says, in the forms of all families."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapelle.grading.text.tool_call import Form, ReadCall, write_calls
from kapelle.services.policy.speech import SpeechForm, form_of

FORMS: tuple[Form, ...] = get_args(Form)
CALLS = (ReadCall("look", {"at": "é", "n": 2}), ReadCall("add", {}))
PIECES = ["<think>", "</think>", "\n", " ", "words", "<", "<|", "{", "[", "look(", '"', "é", "0"]


def written(form: Form, thoughts: str, words: str, calls: tuple[ReadCall, ...]) -> str:
    if form == "harmony":
        parts = [f"<|channel|>analysis<|message|>{thoughts}<|end|>"] if thoughts else []
        if words:
            parts.append(f"<|channel|>{'commentary' if calls else 'final'}<|message|>{words}<|end|>")
        return "<|start|>assistant".join([*parts, *([write_calls(calls, form)] if calls else [])])
    thought = f"<think>\n{thoughts}\n</think>\n\n" if thoughts else ""
    between = "\n" if words and calls else ""
    return thought + words + between + (write_calls(calls, form) if calls else "")


@pytest.mark.parametrize("calls", [(), CALLS[:1], CALLS])
@pytest.mark.parametrize("words", ["", "I look there."])
@pytest.mark.parametrize("thoughts", ["", "Where could it be? {maybe} <tool_call>"])
@pytest.mark.parametrize("form", FORMS)
def test_thoughts_words_and_calls_are_told_apart(
    form: Form, thoughts: str, words: str, calls: tuple[ReadCall, ...]
) -> None:
    if words and calls and form in ("llama", "pythonic"):
        pytest.skip("calls are the whole answer there")
    text = written(form, thoughts, words, calls)
    said = SpeechForm(form).read(text)
    assert said == (thoughts, words, calls)
    unopened = SpeechForm(form, thinking=bool(thoughts)).read(text.removeprefix("<think>"))
    assert unopened == said, "the template may have opened the thoughts"


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_what_was_told_is_never_taken_back(form: Form, data: st.DataObject) -> None:
    marks = [write_calls(CALLS, form), write_calls(CALLS[:1], form)[:9], "<tool_call>", "[TOOL_CALLS]"]
    if form == "harmony":
        marks += [f"<|{name}|>" for name in ("start", "channel", "message", "end", "call")]
        marks += ["analysis", "final", "commentary to=functions.look"]
    text = "".join(data.draw(st.lists(st.sampled_from([*PIECES, *marks]), max_size=12)))
    read = SpeechForm(form, tools=data.draw(st.booleans()), thinking=data.draw(st.booleans()))
    whole = read.read(text)
    before = ("", "")
    for place in range(len(text) + 1):
        told = read.heard(text[:place])
        assert told[0].startswith(before[0])
        assert told[1].startswith(before[1])
        before = told
    assert whole.thoughts.startswith(before[0])
    assert whole.words.startswith(before[1])


@pytest.mark.parametrize("form", FORMS)
def test_words_and_thoughts_are_told_as_they_come(form: Form) -> None:
    text = written(form, "Hm, where?", "Over there it is.", ())
    read = SpeechForm(form)
    told = [read.heard(text[:place]) for place in range(len(text))]
    assert ("Hm, wh", "") in told
    assert ("Hm, where?", "Over the") in told


def test_texts_of_glm_are_texts_where_the_tool_says_so() -> None:
    text = "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
    schema = {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}
    assert SpeechForm("glm").read(text).calls[0].arguments == {"at": 12}
    assert SpeechForm("glm", schemas=(schema,)).read(text).calls[0].arguments == {"at": "12"}


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{'<|im_start|>'}}<tools></tools><tool_call>", "hermes"),
        ("{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key>", "glm"),
        ("{{ '[AVAILABLE_TOOLS]' }}[TOOL_CALLS]", "mistral"),
        ("Environment: ipython {{ '<|python_tag|>' }}", "llama"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>", "deepseek"),
        ("<|start|>assistant<|channel|>commentary", "harmony"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ message.content }}", None),
    ],
)
def test_the_form_is_found_in_the_template(template: str, form: Form | None) -> None:
    assert form_of(template) == form
