"""Parsing of agents' texts in the forms of all families."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kapelle.environments.grading.text.tool_call import Form, ReadCall, write_calls
from kapelle.services.policy.speech import SpeechForm, form_of
from kapelle.types import Json

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
def test_thoughts_words_and_calls_are_separated(
    form: Form, thoughts: str, words: str, calls: tuple[ReadCall, ...]
) -> None:
    if words and calls and form in ("llama", "pythonic"):
        words = ""  # calls are the whole answer there
    text = written(form, thoughts, words, calls)
    answer = SpeechForm(form).read(text)
    assert answer == (thoughts, words, calls)
    unopened = SpeechForm(form, thinking=bool(thoughts)).read(text.removeprefix("<think>"))
    assert unopened == answer, "the template may have opened the thoughts"


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_growing_text_never_changes_what_was_sent(form: Form, data: st.DataObject) -> None:
    marks = [write_calls(CALLS, form), write_calls(CALLS[:1], form)[:9], "<tool_call>", "[TOOL_CALLS]"]
    marks += ["[THINK]", "[/THINK]"] if form == "mistral" else []
    if form == "harmony":
        marks += [f"<|{name}|>" for name in ("start", "channel", "message", "end", "call")]
        marks += ["analysis", "final", "commentary to=functions.look"]
    text = "".join(data.draw(st.lists(st.sampled_from([*PIECES, *marks]), max_size=12)))
    read = SpeechForm(form, tools=data.draw(st.booleans()), thinking=data.draw(st.booleans()))
    whole = read.read(text)
    before = ("", "")
    for place in range(len(text) + 1):
        sent = read.read_partial(text[:place])
        assert sent[0].startswith(before[0])
        assert sent[1].startswith(before[1])
        before = sent
    assert whole.thoughts.startswith(before[0])
    assert whole.words.startswith(before[1])


@pytest.mark.parametrize("form", ["llama", "pythonic"])
def test_text_before_thoughts_end_stays_where_a_call_follows(form: Form) -> None:
    before = "So I look.</think>"
    text = before + write_calls(CALLS, form)
    assert SpeechForm(form).read(text) == ("", before, CALLS)
    assert SpeechForm(form).read_partial(text) == ("", before)
    assert SpeechForm(form).read_partial(before + "It is") == ("", before + "It is")


def test_string_arguments_of_glm_stay_strings() -> None:
    text = "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
    schema = {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}
    assert SpeechForm("glm").read(text).calls[0].arguments == {"at": 12}
    assert SpeechForm("glm", schemas=(schema,)).read(text).calls[0].arguments == {"at": "12"}


def schema_of(argument: dict[str, Any] | None) -> dict[str, Any]:
    properties = {} if argument is None else {"at": argument}
    shared = {"place": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    return {"name": "look", "parameters": {"properties": properties, "$defs": shared}}


NULLABLE: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("form", ["glm", "qwen_coder"])
@pytest.mark.parametrize(
    ("argument", "text", "value"),
    [
        (None, "42", 42),
        (None, "there", "there"),
        ({"type": "string"}, "42", "42"),
        (NULLABLE, "42", "42"),
        (NULLABLE, "null", None),
        ({"type": ["string", "integer"]}, "42", 42),
        ({"type": ["string", "integer"]}, "4.5", "4.5"),
        ({"enum": ["42", "43"]}, "42", "42"),
        ({"const": "7"}, "7", "7"),
        ({"$ref": "#/$defs/place"}, "42", "42"),
        ({"oneOf": [{"$ref": "#/$defs/place"}, {"type": "array"}]}, "42", "42"),
        ({"$ref": "#/$defs/loop"}, "42", 42),
        ({"type": "integer"}, "42", 42),
        ({"type": "boolean"}, "true", True),
        ({"type": "object"}, '{"a": "1"}', {"a": "1"}),
    ],
)
def test_an_unquoted_value_has_its_schemas_type(
    form: Form, argument: dict[str, Any] | None, text: str, value: Json
) -> None:
    written = write_calls([ReadCall("look", {"at": text})], form)
    [call] = SpeechForm(form, schemas=[schema_of(argument)]).read(written).calls
    assert repr(call.arguments) == repr({"at": value})


def test_recursive_schemas_are_parsed_at_once() -> None:
    both: list[Any] = [{"$ref": f"#/$defs/{number}"} for number in range(40)]
    shared = {str(number): {"anyOf": both} for number in range(40)}
    parameters = {"properties": {"at": {"anyOf": both}}, "$defs": shared}
    text = write_calls([ReadCall("look", {"at": "42"})], "qwen_coder")
    [call] = SpeechForm("qwen_coder", schemas=[{"name": "look", "parameters": parameters}]).read(text).calls
    assert call.arguments == {"at": 42}


def test_thoughts_of_magistral_are_separated() -> None:
    call = write_calls(CALLS[:1], "mistral")
    assert SpeechForm("mistral").read(f"[THINK]Hm.[/THINK]{call}") == ("Hm.", "", CALLS[:1])
    assert SpeechForm("mistral", thinking=True).read("Hm.[/THINK]There.") == ("Hm.", "There.", ())
    reply = [
        SpeechForm("mistral").read_partial("[THINK]Hm.[/THINK]There."[:place]) for place in (3, 9, 13, 18, 21)
    ]
    assert reply == [("", ""), ("Hm", ""), ("Hm.", ""), ("Hm.", ""), ("Hm.", "The")]
    assert SpeechForm("hermes").read("[THINK]Hm.[/THINK]There.").thoughts == "", "no mark of theirs"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{'<|im_start|>'}}<tools></tools><tool_call>", "hermes"),
        ("{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key>", "glm"),
        ("{{ '[AVAILABLE_TOOLS]' }}[TOOL_CALLS]", "mistral"),
        ("Environment: ipython {{ '<|python_tag|>' }}", "llama"),
        ("""{{ '{"name": "' + name }}{{ '", "parameters": ' }}{{ arguments | tojson }}""", "llama"),
        ("{{ '<tool_call>\\n<function=' + name + '>' }}<parameter={{ key }}>", "qwen_coder"),
        ("""Tools: {"name": "look", "parameters": {}}, called as <tool_call>""", "hermes"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>", "deepseek"),
        ("<|start|>assistant<|channel|>commentary", "harmony"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ message.content }}", None),
    ],
)
def test_the_form_is_found_in_the_template(template: str, form: Form | None) -> None:
    assert form_of(template) == form


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_answer_has_its_complete_calls(form: Form) -> None:
    """Wherever the token limit cuts, the calls are the first ones of the whole answer."""
    text, counts = write_calls((*CALLS, *CALLS), form), list[int]()
    for place in range(len(text) + 1):
        answer = SpeechForm(form).read(text[:place], is_cut=True)
        assert answer.calls == (*CALLS, *CALLS)[: len(answer.calls)]
        if not answer.calls and form != "harmony":
            assert answer.words == text[:place]
        counts.append(len(answer.calls))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3, 4}
