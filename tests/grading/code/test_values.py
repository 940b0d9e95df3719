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

from kapelle.grading.code.values import MAX_KEY_DEPTH, MAX_TEXT, Named, ValueFault, decode, encode

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
        (None, '[["it",null]]'),
        (True, '[["it",true]]'),
        ("a\n", '[["it","a\\n"]]'),
        (-7, '[["int","-7"]]'),
        (2**70, '[["hex","0x400000000000000000"]]'),
        (1.5, '[["float","0x1.8000000000000p+0"]]'),
        (b"\x00\xff", '[["bytes","00ff"]]'),
        ((1, [2]), '[["int","1"],["list of int","2"],["tuple",0,1]]'),
        ({(1,): "x"}, '[["tuple of int","1"],["dict",0,"x"]]'),
        (1j, '[["complex","0x0.0p+0","0x1.0000000000000p+0"]]'),
        (int, '[["type","int"]]'),
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


def test_an_object_is_told_by_whoever_keeps_it_and_found_by_whoever_knows_it() -> None:
    kept = object()
    text = encode([kept, kept], lambda value: ("object", "5") if value is kept else None)
    assert text == '[["object","5"],["list",0,0]]'
    assert decode(text, lambda kind, number: (kind, number)) == [("object", "5")] * 2
    with pytest.raises(ValueFault, match="type object, which has no encoding"):
        encode(kept)
    with pytest.raises(ValueFault, match="unknown kind"):
        decode(text)


def test_what_is_one_object_twice_is_so_again() -> None:
    row = [0, 0]
    back = decode(encode([row, row]))
    assert back == [row, row]
    assert back[0] is back[1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1.5",
        "NaN",
        "[]",
        "{}",
        "[1]",
        '"x"',
        "[" * 100_000,
        '[["list",' * 50_000,
        '["it",true]',
        '[["it",true],5]',
        '[["it",0]]',
        '[["list",0]]',
        '[["list",1],["list"]]',
        '[["list",["int","1"]]]',
        '[["list",-1]]',
        '[["list",1.0]]',
        '[["it",{"a":null}]]',
        '[["int",1]]',
        '[["int","1","2"]]',
        '[["int","1_0"]]',
        '[["int"," 1"]]',
        '[["int","٣"]]',
        '[["int","--1"]]',
        '[["int",""]]',
        '[["int","' + "9" * 41 + '"]]',
        '[["hex","0x_1"]]',
        '[["hex","0X1"]]',
        '[["list of int","1  2"]]',
        '[["list of int",""]]',
        '[["list of str","a"]]',
        '[["dict of int","1"]]',
        '[["float","1e5x"]]',
        '[["float","0x1p99999"]]',
        '[["complex","0x1p+0"]]',
        '[["bytes","0"]]',
        '[["dict","a"]]',
        '[["list"],["set",0]]',
        '[["list"],["dict",0,"x"]]',
        '[["object","x"]]',
        '[["type","eval"]]',
        '[["type","os.system"]]',
        '[["constant","os"]]',
        '[["module","os"]]',
        '[["list"],["exception",0,0]]',
        '[["it","unfinished',
        '[["it",null]] trailing',
        b"\xff\xfe",
    ],
)
def test_everything_else_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueFault):
        decode(text)


PARTS = st.none() | st.booleans() | st.integers(0, 5) | st.text(max_size=8)
KINDS = st.sampled_from(
    ["it", "int", "hex", "float", "complex", "bytes", "list", "set", "tuple of int", "dict", "type", "named", "range", "x"]
)  # fmt: skip
TREES = st.lists(
    st.builds(lambda kind, parts: [kind, *parts], KINDS, st.lists(PARTS, max_size=3)), max_size=6
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
    keys = [["hex", hex(n * (2**61 - 1))] for n in range(20_000)]
    places = range(len(keys))
    items = [part for place in places for part in (place, None)] if kind == "dict" else places
    text = json.dumps([*keys, [kind, *items]])

    def refuse() -> None:
        with pytest.raises(ValueFault, match="one hash"):
            decode(text)

    assert timed(refuse, 1.0)[1] < 1.0
    assert decode(encode(set(range(10_000)))) == set(range(10_000))
    assert decode(encode({(n, -n): n for n in range(5_000)}))[(7, -7)] == 7


@pytest.mark.parametrize(
    "text",
    [
        '[["decimal","NaN"]]',
        '[["decimal","1E99999"]]',
        '[["fraction","1/0"]]',
        '[["fraction","1"]]',
        '[["date","2024-13-01"]]',
        '[["date",true]]',
        '[["timedelta","9999999999999","0","0"]]',
        '[["range","0","1","0"]]',
        '[["range","0","1","1","1"]]',
        '[["range"]]',
        '[["list"],["array","x",0]]',
        '[["tuple","a"],["tuple"],["named","P",0,1]]',
    ],
)
def test_what_a_library_would_not_make_is_refused(text: str) -> None:
    with pytest.raises(ValueFault):
        decode(text)


def test_large_deep_and_long_values_are_values() -> None:
    assert decode(encode(10**6000)) == 10**6000
    assert decode(encode("x" * 5_000_000)) == "x" * 5_000_000
    assert decode(encode(set(range(50_000)))) == set(range(50_000))
    nested: list[Any] = []
    for _ in range(20_000):
        nested = [nested]
    back, depth = decode(encode(nested)), 0
    while back:
        back, depth = back[0], depth + 1
    assert depth == 20_000


def test_sizes_are_bounded_before_they_cost_anything() -> None:
    with pytest.raises(ValueFault, match="most"):
        decode('[["it","' + "x" * (MAX_TEXT + 1) + '"]]')
    with pytest.raises(ValueFault, match="characters"):
        encode("x" * (MAX_TEXT + 1))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueFault, match="contains itself"):
        encode(loop)
    # Hashing goes down into a key, and into all parts of it, however often one of them stands there.
    deep = [["tuple"], *(["tuple", place] for place in range(MAX_KEY_DEPTH + 1))]
    wide = [["tuple"], *(["tuple", place, place] for place in range(24))]
    often = [["tuple of int", " ".join(["1"] * 100_000)]]
    for nodes, keys in ((deep, 1), (wide, 1), (often, 1000)):
        text = json.dumps([*nodes, ["set", *[len(nodes) - 1] * keys]])
        with pytest.raises(ValueFault, match="key nested too deeply, or too large"):
            decode(text)
    nested: Any = 1
    for _ in range(1000):
        nested = {"a": nested}
    assert encode(decode(encode(nested))) == encode(nested), "only keys are hashed"
