"""Parse JSON answers within limits and compare them by value and type."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from itertools import accumulate

from kapelle.environments.grading.text.extraction import ExtractionRule, extract
from kapelle.environments.grading.text.match import composed
from kapelle.environments.grading.verdict import Grade, no_answer, right, wrong
from kapelle.types import Json

MAX_CHARACTERS = 100_000
MAX_DEPTH = 32
MAX_NUMBER_CHARACTERS = 40
MAX_EXPONENT = 308


class NotJson(Exception):
    """Raised for a string that is not a JSON value or exceeds the limits."""


def parse_json(text: str) -> Json:
    """Parse a string as JSON; numbers with a fraction or an exponent become Decimals.

    Raises NotJson if the string is too long or too deeply nested, repeats a key, contains NaN, Infinity or a number that is too
    large, or has text before or after the JSON value.
    """
    if len(text) > MAX_CHARACTERS:
        raise NotJson(f"It has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read.")
    # Before parsing, check the depth of brackets outside strings.
    outside = ((mark in "[{") - (mark in "]}") for mark in _STRING.sub("", text))
    if max(accumulate(outside), default=0) > MAX_DEPTH:
        raise NotJson(f"It nests deeper than {MAX_DEPTH} levels.")
    try:
        return json.loads(
            text,
            parse_int=_integer,
            parse_float=_decimal,
            parse_constant=_constant,
            object_pairs_hook=_object,
        )
    except json.JSONDecodeError as problem:
        raise NotJson(f"It is not JSON: {problem.msg} at character {problem.pos}.") from None


_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


def _integer(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARACTERS:
        raise NotJson(f"It contains a number of {len(digits):,} digits.")
    return int(digits)


def _decimal(written: str) -> Decimal:
    mantissa, _, exponent = written.lower().partition("e")
    if len(mantissa) > MAX_NUMBER_CHARACTERS or len(exponent) > 5 or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise NotJson("It contains a number that is too large.")
    return Decimal(written)


def _constant(name: str) -> Json:
    raise NotJson(f"It contains {name}, which is not JSON.")


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise NotJson("It gives a key twice.")
    return value


def same_json(one: Json, other: Json) -> bool:
    """Return whether two JSON values are equal; the comparison is symmetric.

    The order of keys is ignored, but the order of list items matters. The number 1 equals 1.0, and neither equals true or the
    string "1".
    """
    if isinstance(one, dict) and isinstance(other, dict):
        ours, theirs = ({composed(key): value for key, value in each.items()} for each in (one, other))
        return ours.keys() == theirs.keys() and all(same_json(ours[key], theirs[key]) for key in ours)
    if isinstance(one, str) and isinstance(other, str):
        return composed(one) == composed(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    if _is_number(one) and _is_number(other):
        return Decimal(str(one)) == Decimal(str(other))
    return type(one) is type(other) and bool(one == other)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


def unfenced(text: str) -> str:
    """Return the content of the code fence if the string is a single code fence; otherwise return the string unchanged."""
    fence = _FENCE.fullmatch(text.strip())
    return fence[1] if fence and "```" not in fence[1] else text


_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", re.DOTALL)
_BRACKETED = re.compile(r"[^\[{]*?\s([\[{].*[\]}])[^\]}\"]*", re.DOTALL)


def _stated(text: str) -> str:
    """Return the part of a text that may be JSON.

    This part is the content of the only code fence, or an object or list between sentences; otherwise it is the whole text.
    """
    fences = _FENCED.findall(text)
    body = fences[0].strip() if len(fences) == 1 else text.strip()
    among = _BRACKETED.fullmatch(f"\n{body}")
    return body if among is None or body[:1] in '"[{' else among[1]


def grade_json(text: str, gold: Json, rules: Sequence[ExtractionRule] = ("tag", "whole")) -> Grade:
    """Return whether the final answer of a text is JSON with the same value as the gold answer."""
    found = extract(text, rules)
    if found.text is None:
        return no_answer(found.problem)
    try:
        value = parse_json(_stated(found.text))
    except NotJson as problem:
        return no_answer(f"'{found.text[:80]}' is not an answer. {problem}")
    answer = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    expected = json.dumps(gold, sort_keys=True, ensure_ascii=False, default=str)
    return right(answer) if same_json(value, gold) else wrong(answer, expected)
