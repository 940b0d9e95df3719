from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.patience import timed

from kapelle.environments.grading.text.tool_call import (
    ALL_FORMS,
    Form,
    NotCalls,
    ReadCall,
    grade_tool_call,
    parse_calls,
    write_calls,
)

WEATHER = ReadCall("weather", {"city": "Bern", "days": 3})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Bern", "days": 3}}</tool_call>'),
        (
            "hermes",
            'I look.\n<tool_call>\n{"arguments": {"days": 3, "city": "Bern"}, "name": "weather"}\n</tool_call>',
        ),
        ("llama", '{"name": "weather", "parameters": {"city": "Bern", "days": 3}}'),
        ("llama", '<|python_tag|>{"name": "weather", "parameters": {"city": "Bern", "days": 3}}'),
        ("llama", '```json\n[{"name": "weather", "parameters": {"city": "Bern", "days": 3}}]\n```'),
        ("pythonic", '[weather(city="Bern", days=3)]'),
        ("pythonic", "weather(days=3, city='Bern')"),
        ("pythonic", "```python\nweather(days=3, city='Bern')\n```"),
        ("pythonic", "```tool_code\n[weather(city='Bern', days=3)]\n```"),
        ("pythonic", "<think>which?</think>[weather(city='Bern', days=+3)]"),
    ],
)
def test_one_call_in_each_form(form: Form, text: str) -> None:
    [call] = parse_calls(text, [form])
    assert call == WEATHER


def test_calls_side_by_side_and_dotted_names() -> None:
    calls = parse_calls("[math.sqrt(x=2.5), f(a=[1, -2], b={'c': None, 'd': True})]", ["pythonic"])
    assert [call.name for call in calls] == ["math.sqrt", "f"]
    assert calls[1].arguments == {"a": [1, -2], "b": {"c": None, "d": True}}


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("text", ["", "It is sunny.", "5", "call weather", "<think>f(a=1)</think>"])
def test_a_text_without_calls(form: Form, text: str) -> None:
    assert parse_calls(text, [form]) == ()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call></tool_call>'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "score": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[]"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x=1"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} Done.'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}'),
        ("llama", '{"name": "f", "parameters": {}} and {"name": "g", "parameters": {}}'),
        ("llama", '{"name": "f", "parameters": {}}; {"name": "g"'),
        ("llama", '{"name": "f", "parameters": {}}' * 65),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 65),
        ("llama", '{"name": "f"'),
        ("llama", '{"name": "f", "parameters": {}, "arguments": {}}'),
        ("llama", '{"name": "f", "parameters": [1]}'),
        ("pythonic", "f(1)"),
        ("pythonic", "f(*a)"),
        ("pythonic", "f(**a)"),
        ("pythonic", "f(a=1, a=2)"),
        ("pythonic", "f(a=b)"),
        ("pythonic", "f(a=g(x=1))"),
        ("pythonic", "f(a=1+1)"),
        ("pythonic", "f(a=9**9**9)"),
        ("pythonic", "f(a=1-1)"),
        ("pythonic", "f(a='x' 'y')"),
        ("pythonic", "f(a=f'{1}')"),
        ("pythonic", "f(a=b'x')"),
        ("pythonic", "f(a=1j)"),
        ("pythonic", "f(a=1e999)"),
        ("pythonic", "f(a=lambda: 1)"),
        ("pythonic", "f(a=[x for x in (1,)])"),
        ("pythonic", "f(a={1: 2})"),
        ("pythonic", "f(a={'x': 1, 'x': 2})"),
        ("pythonic", "f(a={**b})"),
        ("pythonic", "f(a=1).g(b=2)"),
        ("pythonic", "f(a=" + "(" * 5000 + ")" * 5000 + ")"),
        ("pythonic", "f(a=" + "-" * 5000 + "1)"),
        ("pythonic", "f(a=" + "not " * 2000 + "1)"),
        ("pythonic", "f" + ".f" * 4000 + "()"),
        ("pythonic", "f(a=" + "9" * 9000 + ")"),
        ("pythonic", "f(a='" + "x" * 10_000 + "')"),
        ("pythonic", "f(a='\x00')"),
    ],
    ids=lambda value: value[:40],
)
def test_malformed_calls(form: Form, text: str) -> None:
    def refuse() -> None:
        with pytest.raises(NotCalls):
            parse_calls(text, [form])

    assert timed(refuse, 0.5)[1] < 0.5


Accepted = Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]


def grade(text: str, accepted: Accepted) -> tuple[float, str]:
    verdict = grade_tool_call(text, accepted)
    return verdict.score, verdict.status


@pytest.mark.parametrize(
    ("arguments", "score"),
    [
        ({"city": "Bern", "days": 3}, 1.0),
        ({"city": "bern ", "days": 3}, 1.0),
        ({"city": "Bern, CH", "days": 3}, 1.0),
        ({"city": "Bern", "days": 3, "unit": "C"}, 1.0),
        ({"city": "Bern", "days": 4}, 0.0),
        ({"city": "Bern", "days": "3"}, 0.0),
        ({"city": "Bern", "days": 3.0}, 0.0),
        ({"city": "Bern", "days": True}, 0.0),
        ({"city": "Basel", "days": 3}, 0.0),
        ({"city": ["Bern"], "days": 3}, 0.0),
        ({"city": "Bern"}, 0.0),
        ({"city": "Bern", "days": 3, "hours": 1}, 0.0),
        ({"city": "Bern", "days": 3, "unit": "F"}, 0.0),
    ],
)
def test_arguments_are_among_the_accepted_ones(arguments: dict[str, Any], score: float) -> None:
    accepted: Accepted = [{"weather": {"city": ["Bern", "Bern CH"], "days": [3], "unit": ["", "C"]}}]
    text = json.dumps({"name": "weather", "parameters": arguments})
    assert grade(text, accepted) == (score, "graded")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("April 1, 2024", "april 1,2024", True),
        ("New-York", "new york", True),
        ("1.5", "15", False),
        ("-5", "5", False),
        ("1/2", "12", False),
        ("2*3", "23", False),
        ("2024-01-02", "2024-010-2", False),
    ],
)
def test_texts_that_differ_by_separators_only(one: str, other: str, same: bool) -> None:
    for value, option in ((one, other), (other, one)):
        text = json.dumps({"name": "f", "parameters": {"x": value}})
        assert grade(text, [{"f": {"x": [option]}}])[0] == float(same)


def test_an_integer_is_correct_for_a_fraction() -> None:
    assert grade("f(x=5)", [{"f": {"x": [5.0]}}])[0] == 1.0
    assert grade("f(x=0.5)", [{"f": {"x": [0.5]}}])[0] == 1.0


def test_an_integral_float_is_correct_if_the_tool_expects_a_float() -> None:
    accepted: Accepted = [{"f": {"x": [5], "n": [3], "all": [[1, 2]]}}]
    floats = {"x": {"type": "float"}, "n": {"type": "integer"}, "all": {"items": {"type": "number"}}}
    schema = {"name": "f", "parameters": {"type": "dict", "properties": floats}}

    def score(arguments: str, *schemas: Any) -> float:
        return grade_tool_call(
            f'{{"name": "f", "parameters": {arguments}}}', accepted, ["llama"], schemas
        ).score

    assert score('{"x": 5.0, "n": 3, "all": [1.0, 2]}', schema) == 1.0
    assert score('{"x": 5.0, "n": 3, "all": [1.0, 2]}', {"type": "function", "function": schema}) == 1.0
    assert score('{"x": 5, "n": 3, "all": [1, 2]}', schema) == 1.0
    assert score('{"x": 5.5, "n": 3, "all": [1, 2]}', schema) == 0.0
    assert score('{"x": 5.0, "n": 3.0, "all": [1, 2]}', schema) == 0.0
    assert score('{"x": true, "n": 3, "all": [1, 2]}', schema) == 0.0
    assert score('{"x": 5.0, "n": 3, "all": [1, 2]}') == 0.0


def test_the_mark_of_an_optional_argument_is_a_value_only_for_a_text() -> None:
    accepted: Accepted = [{"f": {"n": ["", 0], "unit": ["", "km"], "b": [""]}}]
    kinds = {"n": {"type": "integer"}, "unit": {"type": "string"}, "b": {"type": "boolean"}}
    schema: Any = {"name": "f", "parameters": {"type": "dict", "properties": kinds}}
    assert grade_tool_call("f(n=0)", accepted, schemas=[schema]).score == 1.0
    assert grade_tool_call("f(n='')", accepted, schemas=[schema]).score == 0.0
    assert grade_tool_call("f(b='')", accepted, schemas=[schema]).score == 0.0
    assert grade_tool_call("f(unit='')", accepted, schemas=[schema]).score == 1.0
    assert grade("f(n='')", accepted)[0] == 0.0
    assert grade("f(unit='')", accepted)[0] == 1.0


def test_required_arguments_must_be_given() -> None:
    """BFCL's `simple_python_17` accepts a call without an argument that the tool requires; its checker does not."""
    schema: Any = {"name": "f", "parameters": {"type": "dict", "properties": {}, "required": ["a"]}}
    accepted: Accepted = [{"f": {"a": [1, ""], "b": [2, ""]}}]
    assert grade_tool_call("f(b=2)", accepted, schemas=[schema]).score == 0.0
    assert grade_tool_call("f(a=1)", accepted, schemas=[schema]).score == 1.0
    assert grade("f(b=2)", accepted)[0] == 1.0


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> <tool_call>{"name": "g", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'),
        ("llama", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'),
        ("llama", '{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": {}}'),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}} These will do.'),
        ("llama", '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]\n\nThis calls both.'),
        ("llama", '{"name": "f", "parameters": "{\\"a\\": 1}"}; {"name": "g", "parameters": {}}.'),
    ],
)  # fmt: skip
def test_calls_as_models_write_them(form: Form, text: str) -> None:
    assert parse_calls(text, [form]) == (ReadCall("f", {"a": 1}), ReadCall("g", {}))


def test_composed_and_decomposed_accents_are_equal() -> None:
    composed, apart = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))
    assert composed != apart
    for said, right in ((composed, apart), (apart, composed)):
        text = f"f(stadt='{said}', alle=['{said}'])"
        assert grade(text, [{"f": {"stadt": [right], "alle": [[right]]}}])[0] == 1.0
    assert grade("f(stadt='Zurich')", [{"f": {"stadt": [composed]}}])[0] == 0.0


def test_parallel_calls_match_in_any_order_and_one_to_one() -> None:
    accepted = [{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]
    assert grade("[f(x=1), f(x=2)]", accepted)[0] == 1.0
    assert grade("[f(x=2), f(x=1)]", accepted)[0] == 1.0
    assert grade("[f(x=2), f(x=2)]", accepted)[0] == 0.0
    assert grade("[f(x=1)]", accepted)[0] == 0.0
    assert grade("[f(x=1), f(x=2), f(x=1)]", accepted)[0] == 0.0


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral", "deepseek", "glm", "qwen_coder", "harmony"])
def test_a_second_call_in_another_form_is_found_with_each_form(form: Form) -> None:
    call, accepted = write_calls([ReadCall("f", {"a": 1})], form), [{"f": {"a": [1]}}]
    final = "<|start|>assistant<|channel|>final<|message|>" if form == "harmony" else " "
    assert grade_tool_call(call, accepted, [form]).score == 1.0
    assert grade_tool_call(f"{call}{final}This will do (probably).", accepted, [form]).score == 1.0
    for other in ("g(b=2)", "`g(b='x')`", "# g(b=2)"):
        assert grade_tool_call(f"{call}{final}{other}", accepted, [form]).score == 0.0
        assert grade_tool_call(other, [], [form]).score == 0.0
    assert grade_tool_call("None of them helps (sorry).", [], [form]).score == 1.0


CHARACTERS = st.text(alphabet="f(a=1,'\"[]{}:.-+ e\\\n<tool_call>/\x00ñ", max_size=60)
SCRAPS = [
    "[",
    "]",
    "f(",
    "a=",
    "1",
    "1e999",
    "'x'",
    ",",
    ")",
    '{"name":"f",',
    '"arguments":',
    "{",
    '{"a":1}',
    "}",
    "<tool_call>",
    "</tool_call>",
    "\x00",
]
PIECES = st.lists(st.sampled_from(SCRAPS), max_size=8).map("".join)
CALLS = [
    "[f(a=1)]",
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    '{"name": "f", "parameters": {"a": 1}}',
]


@given(st.one_of(CHARACTERS, PIECES, st.tuples(PIECES, st.sampled_from(CALLS), PIECES).map("".join)))
def test_the_reader_accepts_or_rejects_every_text(text: str) -> None:
    for form in ALL_FORMS:
        try:
            calls = parse_calls(text, [form])
        except NotCalls:
            continue
        for call in calls:
            assert isinstance(call.name, str)
            json.dumps(dict(call.arguments), allow_nan=False)


CATEGORIES = (
    "simple_python multiple parallel parallel_multiple live_simple live_parallel live_parallel_multiple"
)
Calls = list[tuple[str, dict[str, Any]]]


def first_right(options: Any) -> Any:
    """Return one value that BFCL accepts: the first that is not 'omitted'."""
    chosen = next(value for value in options if value != "") if isinstance(options, list) else options
    return spelled_out(chosen)


def spelled_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: first_right(options) for key, options in value.items() if given_at_all(options)}
    return [spelled_out(item) for item in value] if isinstance(value, list) else value


def given_at_all(options: Any) -> bool:
    return not isinstance(options, list) or any(value != "" for value in options)


def gold_calls(accepted: Sequence[Mapping[str, Mapping[str, Any]]]) -> Calls:
    return [
        (name, {key: first_right(values) for key, values in options.items() if given_at_all(values)})
        for call in accepted
        for name, options in call.items()
    ]


def as_hermes(calls: Calls) -> str:
    return "".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"
        for name, arguments in calls
    )


def as_llama(calls: Calls) -> str:
    return json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])


def as_python(calls: Calls) -> str:
    inside = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(inside)}]"


WRITTEN = (as_hermes, as_llama, as_python)


def perturbed(calls: Calls) -> Iterator[Calls]:
    """Yield the gold calls with one thing wrong that no accepted answer of BFCL allows."""
    (name, arguments), *others = calls
    yield [(name + "_", arguments), *others]
    yield [(name, {**arguments, "no_such_argument": 1}), *others]
    yield [*calls, (name, arguments)]
    yield others
    for key in arguments:
        yield [(name, {**arguments, key: "something else entirely"}), *others]
        yield [(name, {**arguments, key: {"not": "accepted"}}), *others]


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("each", [5, pytest.param(1, marks=pytest.mark.long)])
def test_every_gold_answer_of_bfcl_and_none_that_is_perturbed(each: int, data_folder: Path) -> None:
    folder = data_folder / "bfcl" / "possible_answer"
    if not folder.is_dir():
        pytest.skip(f"the folder {data_folder / 'bfcl'} holds no possible_answer/ (BFCL)")
    rows = wrong = 0
    for category in CATEGORIES.split():
        for line in (folder / f"{category}.jsonl").read_text(encoding="utf-8").splitlines()[::each]:
            row = json.loads(line)
            accepted, calls = row["ground_truth"], gold_calls(row["ground_truth"])
            rows += 1
            scores = [grade_tool_call(write(calls), accepted).score for write in WRITTEN]
            assert scores == [1.0, 1.0, 1.0], row["id"]
            for others in perturbed(calls):
                wrong += 1
                text = WRITTEN[wrong % 3](others)
                assert grade_tool_call(text, accepted).score == 0.0, (row["id"], text)
    assert rows >= 1298 / each
    assert wrong > 6 * rows
