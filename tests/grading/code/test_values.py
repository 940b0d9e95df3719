from __future__ import annotations

import collections
import enum
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.patience import timed

from kapelle.grading.code.collected import Named
from kapelle.grading.code.values import (
    MAX_DIGITS,
    MAX_HASHED,
    MAX_TEXT,
    Reference,
    ValueFault,
    decode,
    encode,
)

HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4),
    max_leaves=8,
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
    max_leaves=16,
)


def types_of(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [type(value), *map(types_of, value)]
    return type(value)


@given(VALUES)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert types_of(back) == types_of(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("a\n", '"a\\n"'),
        (-7, '{"int":"-7"}'),
        (1.5, '{"float":"0x1.8000000000000p+0"}'),
        (b"\x00\xff", '{"bytes":"00ff"}'),
        ((1, [2]), '{"tuple":[{"int":"1"},{"list":[{"int":"2"}]}]}'),
        ({(1,): "x"}, '{"dict":[[{"tuple":[{"int":"1"}]},"x"]]}'),
        (1j, '{"complex":["0x0.0p+0","0x1.0000000000000p+0"]}'),
        (int, '{"type":"int"}'),
        (Reference(3), '{"object":"3"}'),
    ],
)
def test_the_encoding_is_this(value: Any, text: str) -> None:
    assert encode(value) == text
    assert decode(text) == value
    assert decode(text.encode()) == value


def test_numbers_that_json_lacks_are_values() -> None:
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode([math.inf, -math.inf])) == [math.inf, -math.inf]
    assert math.copysign(1, decode(encode(-0.0))) == -1


def test_a_subclass_is_sent_as_what_it_derives_from() -> None:
    class Colour(enum.IntEnum):
        RED = 3

    pair = collections.namedtuple("pair", "a b")  # noqa: PYI024
    value = [Colour.RED, pair(1, 2), collections.OrderedDict(x=1), collections.Counter("aa")]
    back = decode(encode(value))
    assert back == [3, (1, 2), {"x": 1}, {"a": 2}]
    assert [type(item) for item in back] == [int, Named, collections.OrderedDict, collections.Counter]
    assert back[1].b == 2
    assert repr(back[1]) == "pair(a=1, b=2)"


def test_an_object_is_referred_to_or_refused() -> None:
    assert decode(encode([object()], lambda value: 5)) == [Reference(5)]
    with pytest.raises(ValueFault, match="type object, which has no encoding"):
        encode(object())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1.5",
        "NaN",
        "Infinity",
        "[]",
        "{}",
        "[" * 100_000,
        '{"list":' * 50_000,
        '{"int":"1","int":"2"}',
        '{"int":"1","float":"2"}',
        '{"int":1}',
        '{"int":"1_0"}',
        '{"int":" 1"}',
        '{"int":"٣"}',
        '{"int":"--1"}',
        '{"int":""}',
        '{"float":"1e5x"}',
        '{"float":"0x1p99999"}',
        '{"complex":["0x1p99999","0x1p0"]}',
        '{"float":["0x1p+0"]}',
        '{"complex":["0x1p+0"]}',
        '{"bytes":"0"}',
        '{"list":"ab"}',
        '{"dict":[["a"]]}',
        '{"dict":[["a","b","c"]]}',
        '{"set":[{"list":[]}]}',
        '{"dict":[[{"list":[]},"x"]]}',
        '{"object":"-x"}',
        '{"type":"eval"}',
        '{"module":"os"}',
        '"unfinished',
        '{"int":"1"} trailing',
        b"\xff\xfe",
    ],
)
def test_everything_else_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueFault):
        decode(text)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["int", "float", "complex", "bytes", "list", "set", "dict", "type", "object", "x"]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=12,
)


@given(TREES.map(json.dumps) | st.text() | st.binary())
def test_a_text_is_a_value_or_a_fault_and_never_anything_else(text: str | bytes) -> None:
    try:
        value = decode(text)
    except ValueFault:
        return
    assert decode(encode(value)) == value or value != value  # noqa: PLR0124 (NaN)


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_keys_that_collide_are_counted_before_they_cost_anything(kind: str) -> None:
    # All of them have the hash 0.
    keys = [{"int": str(n * (2**61 - 1))} for n in range(20_000)]
    items: list[Any] = [[key, None] for key in keys] if kind == "dict" else keys

    def refuse() -> None:
        with pytest.raises(ValueFault, match="one hash"):
            decode(json.dumps({kind: items}))

    assert timed(refuse, 1.0)[1] < 1.0
    assert decode(encode(set(range(10_000)))) == set(range(10_000))
    assert decode(encode({(n, -n): n for n in range(5_000)}))[(7, -7)] == 7


@pytest.mark.parametrize(
    "text",
    [
        '{"decimal": "NaN"}',
        '{"decimal": "1E99999"}',
        '{"fraction": "1/0"}',
        '{"fraction": "1"}',
        '{"date": "2024-13-01"}',
        '{"date": ["2024"]}',
        '{"timedelta": ["9999999999999", "0", "0"]}',
        '{"range": ["0", "1", "0"]}',
        '{"range": ["0", "1", "1", "1"]}',
        '{"range": []}',
    ],
)
def test_what_a_library_would_not_make_is_refused(text: str) -> None:
    with pytest.raises(ValueFault):
        decode(text)


def test_sizes_are_bounded_before_they_cost_anything() -> None:
    for text in (
        json.dumps({"int": "9" * (MAX_DIGITS + 1)}),
        json.dumps({"set": [{"int": str(n)} for n in range(MAX_HASHED + 1)]}),
        '"' + "x" * (MAX_TEXT + 1) + '"',
    ):
        with pytest.raises(ValueFault, match=r"most|too many"):
            decode(text)
    with pytest.raises(ValueFault, match="characters"):
        encode("x" * (MAX_TEXT + 1))
    with pytest.raises(ValueFault):
        encode(10**5000)
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    with pytest.raises(ValueFault, match="deeply"):
        encode(nested)
