"""Calls that are forced, in the form of each family of chat templates: sampled under the constraint, and read by the family's parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.tool_templates import DEEPSEEK, FAMILIES, GLM, MISTRAL, QWEN_CODER, Family

from kapelle.environments.grading.text.tool_call import ReadCall
from kapelle.errors import ConfigError
from kapelle.models.token_masks import TokenMasks, check_constraint
from kapelle.runtime import constraints
from kapelle.runtime.constraints import CALL_MARKS, forced_call
from kapelle.services.policy.agents import MarkedTexts
from kapelle.services.policy.speech import MARKS, SpeechForm, call_form
from kapelle.types import Constraint

pytest.importorskip("llguidance")

NAMED = replace(MISTRAL, template=MISTRAL.template + "{# [ARGS] #}", special=(*MISTRAL.special, "[ARGS]"))
FENCED = replace(DEEPSEEK, template=DEEPSEEK.template + "{# ```json #}")
IDS = [
    *(pytest.param(each, id=each.name or each.form) for each in FAMILIES),
    pytest.param(NAMED, id="mistral, named"),
    pytest.param(FENCED, id="deepseek, fenced"),
]

TOOLS: Sequence[Mapping[str, Any]] = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["°C", "°F"]},
                "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                "at": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
            },
            "required": ["city", "at"],
            "additionalProperties": False,
        },
    },
    {"name": "math.e-2"},
]


def legal(call: ReadCall) -> bool:
    given = call.arguments
    if call.name == "math.e-2":
        return given == {}
    city, at, hours = given["city"], given["at"], given.get("hours", [])
    return (
        call.name == "weather"
        and isinstance(city, str)
        and len(city) <= 5
        and given.get("days", 1) in range(1, 10)
        and given.get("unit", "°C") in ("°C", "°F")
        and (at is None or (isinstance(at, str) and len(at) <= 2))
        and isinstance(hours, list)
        and all(each is True or each is False for each in hours)
    )


class Sampler:
    """A model of a family, for which every token that is allowed is equally likely."""

    def __init__(self, family: Family) -> None:
        self.family, renderer = family, family.renderer()
        self.raw = renderer.tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        end = self.raw.token_to_id(family.end)
        assert end is not None
        self.end = end
        self.masks = TokenMasks(renderer.tokenizer, self.raw.get_vocab_size(), frozenset({end}))
        self.texts = MarkedTexts(renderer, MARKS[family.form])

    def allowed(self, walk: Any) -> list[int]:
        bits_W = self.masks.next([walk])[0]
        return [int(each) for each in np.nonzero(np.unpackbits(bits_W.view(np.uint8), bitorder="little"))[0]]

    def ids(self, constraint: Constraint, seed: int) -> list[int]:
        draw, walk, ids = np.random.default_rng(seed), self.masks.begin(constraint), list[int]()
        while len(ids) < 1500:
            token = int(draw.choice(self.allowed(walk)))
            if token == self.end:
                return ids
            ids.append(token)
            walk.take(token)
        raise AssertionError("It comes to no end.")


@pytest.mark.parametrize("family", IDS)
def test_a_call_that_is_forced_is_read_by_the_familys_parser(family: Family) -> None:
    form = call_form(family.form, family.template)
    assert form is not None
    constraint = forced_call(TOOLS, form=form)
    check_constraint(constraint)
    sampler, speech = Sampler(family), SpeechForm(family.form, schemas=TOOLS)
    called, by_mark = set[str](), 0
    for seed in range(12):
        ids = sampler.ids(constraint, seed)
        said = speech.read(sampler.texts.spoken(ids))
        [call] = said.calls
        assert legal(call), call
        assert said.words == ""
        called.add(call.name)
        by_mark += sampler.texts.marked(ids)
    assert called == {"weather", "math.e-2"}
    special = CALL_MARKS & set(family.special) - {"<|call|>"}
    assert (by_mark > 0) == bool(special), "a mark that is a special token may be that token"


@pytest.mark.parametrize("family", IDS)
def test_a_special_token_is_allowed_only_at_its_mark(family: Family) -> None:
    form = call_form(family.form, family.template)
    assert form is not None
    sampler = Sampler(family)
    special = {sampler.raw.token_to_id(each) for each in family.special} - {sampler.end}
    marks = {sampler.raw.token_to_id(each) for each in CALL_MARKS & set(family.special)}
    walk, seen = sampler.masks.begin(forced_call(TOOLS, "weather", form)), set[int]()
    first = set(sampler.allowed(walk)) & special
    for token in sampler.ids(forced_call(TOOLS, "weather", form), 3):
        now = set(sampler.allowed(walk)) & special
        assert now <= marks
        assert len(now) <= 1
        seen |= now
        walk.take(token)
    assert seen == marks
    assert len(first) == (form.begin[:1] in ("[", "<") and bool(marks))
    for other in (Constraint.regex("(?s:.*)"), Constraint.json_object()):
        assert not set(sampler.allowed(sampler.masks.begin(other))) & special


@pytest.mark.parametrize("family", IDS)
def test_several_calls_are_read_where_a_form_has_several(family: Family) -> None:
    form = call_form(family.form, family.template)
    assert form is not None
    sampler, speech = Sampler(family), SpeechForm(family.form, schemas=TOOLS)
    constraint = forced_call([TOOLS[1]], form=form, several=True)
    made = [len(speech.read(sampler.texts.spoken(sampler.ids(constraint, seed))).calls) for seed in range(8)]
    assert min(made) == 1
    assert (max(made) > 1) == (form.between is not None)


# -------- Texts without quotes, of GLM and Qwen3-Coder


def one(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}


WRITTEN = {
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "qwen_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize(
    ("family", "schema", "fits", "breaks"),
    [
        (GLM, one(), ["", "a b", '"é"', "true", "x</arg_valu"], []),
        (GLM, one(pattern="b|c"), ["abd", "c"], ["a"]),
        (GLM, one(pattern="a/b", maxLength=4), ["a/b", "xa/b"], ["ab", "xxa/b"]),
        (GLM, one(enum=["left", "a</arg_value>", 3, "right"], maxLength=4), ["left"], ["right", "3"]),
        (QWEN_CODER, one(), ["", "a b", '"é"', "true", "a\nb", "\n a\n", "x</paramete"], []),
        (QWEN_CODER, one(enum=["left", "a</parameter>", 3, "right"], maxLength=4), ["left"], ["right", "3"]),
        *(
            (family, *case)
            for family in (GLM, QWEN_CODER)
            for case in (
                (one(minLength=2, maxLength=3), ["ab", "abc", "a\n"], ["a", "abcd"]),
                (one(pattern="^a+$"), ["a", "aaa"], ["", "ab", "ba"]),
                (one(const="7"), ["7"], ["8"]),
            )
        ),
    ],
)
def test_texts_without_quotes_match_their_schema(
    family: Family, schema: dict[str, Any], fits: list[str], breaks: list[str]
) -> None:
    sampler = Sampler(family)
    speech = SpeechForm(family.form, schemas=[{"name": "f", "parameters": schema}])
    form = constraints.GLM if family is GLM else constraints.QWEN_CODER
    constraint = forced_call([{"name": "f", "parameters": schema}], form=form)
    for value in [*fits, *breaks]:
        text = WRITTEN[family.form].format(value)
        walk, held = sampler.masks.begin(constraint), True
        for token in sampler.raw.encode(text).ids:
            held = held and token in sampler.allowed(walk)
            if held:
                walk.take(token)
        assert (held and walk.complete) == (value in fits), value
        if value in fits:
            assert speech.read(text).calls == (ReadCall("f", {"a": value}),)


@pytest.mark.parametrize("family", IDS)
def test_a_call_has_only_the_arguments_that_its_schema_names(family: Family) -> None:
    form = call_form(family.form, family.template)
    assert form is not None
    sampler = Sampler(family)
    for names in ([], ["a", "b"]):
        properties = {name: {"type": "boolean"} for name in names}
        schema = {"type": "object", "properties": properties, "required": names}
        constraint = forced_call([{"name": "f", "parameters": schema}], form=form)
        for seed in range(4):
            ids = sampler.ids(constraint, seed)
            [call] = SpeechForm(family.form).read(sampler.texts.spoken(ids)).calls
            assert sorted(call.arguments) == names


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {}}, "allOf": [{"required": ["a"]}]},
        True,
    ],
)
def test_other_schemas_keep_their_further_properties(schema: Any) -> None:
    assert constraints.closed(schema) == schema


@pytest.mark.parametrize("family", IDS)
def test_the_trainer_masks_a_lenient_schema_as_the_sampler_does(family: Family) -> None:
    """Of a constraint as a turn records it: the same tokens were allowed in each place, and a `set` is held to its items."""
    sampler = Sampler(family)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = call_form(family.form, family.template)
    assert form is not None
    with pytest.raises(ConfigError, match="uniqueItems"):
        check_constraint(forced_call([{"name": "f", "parameters": schema, "strict": True}], form=form))
    constraint = forced_call([{"name": "f", "parameters": schema}], form=form)
    ids = sampler.ids(constraint, 3)
    [call] = SpeechForm(family.form).read(sampler.texts.spoken(ids)).calls
    given = call.arguments["a"]
    assert isinstance(given, list)
    assert len(given) <= 2
    assert set(given) <= {1, 2}
    walk, allowed = sampler.masks.begin(constraint), list[Any]()
    for token in ids:
        allowed.append(sampler.masks.next([walk])[0])
        walk.take(token)
    recorded = Constraint(constraint.kind, constraint.text)
    np.testing.assert_array_equal(Sampler(family).masks.of(recorded, tuple(ids)), np.stack(allowed))
