from __future__ import annotations

import collections
import enum
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.patience import timed

from kapelle.environments.grading.code.values import MAX_TEXT, NoEncoding, Stays, ValueFault, decode, encode

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
def test_a_value_is_returned_with_its_types(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert types_of(back) == types_of(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("a\n", '"a\\n"'),
        (-7, "-7"),
        (2**70, '["int","0x400000000000000000"]'),
        (1.5, "1.5"),
        (math.inf, '["float","inf"]'),
        (b"\x00\xff", '["bytes","00ff"]'),
        ((1, [2]), '["tuple",1,["list",2]]'),
        ({(1,): "x"}, '["dict",["tuple",1],"x"]'),
        (1j, '["complex",0.0,1.0]'),
        (int, '["type","int"]'),
    ],
)
def test_the_encoding_is_this(value: Any, text: str) -> None:
    assert encode(value) == text
    assert decode(text) == value
    assert decode(text.encode()) == value


def test_a_subclass_is_sent_as_its_base_type_without_running_its_methods() -> None:
    class Colour(enum.IntEnum):
        RED = 3

    class Liar(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([9])

        def __len__(self) -> int:
            return 9

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "other"

    pair = collections.namedtuple("pair", "a b")  # noqa: PYI024
    value = [
        Colour.RED,
        pair(1, 2),
        collections.OrderedDict(x=1),
        Liar([1]),
        Text("t"),
        collections.UserList([5]),
    ]
    assert types_of(decode(encode(value))) == types_of([3, (1, 2), {"x": 1}, [1], "t", [5]])
    assert decode(encode(value)) == [3, (1, 2), {"x": 1}, [1], "t", [5]]


def test_an_object_stays_where_it_is_and_is_no_part_of_a_value() -> None:
    with pytest.raises(NoEncoding, match="type object"):
        encode([object()])
    text = encode(Stays(5, "Node"))
    found = decode(text)
    assert (found.number, found.nature) == (5, "Node")
    with pytest.raises(ValueFault, match="inside a value"):
        decode(f'["list",{text}]')
    assert decode(f'["list",{text}]', resolve=lambda number: number + 1) == [6]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "Infinity",
        "{}",
        "[]",
        "[1]",
        '["it",1]',
        '["int",7]',
        '["int","7"]',
        '["int","0x"]',
        '["int","0x_1"]',
        '["float","1.5"]',
        '["float",["list"]]',
        '["dict",1]',
        '["set",["list"]]',
        '["bytes","0"]',
        '["fraction","0x1","0x0"]',
        '["decimal","NaN"]',
        '["decimal","1E99999"]',
        '["date","yesterday"]',
        '["range","0x0"]',
        '["type","object"]',
        '["object","x",""]',
        '["timedelta","x",0,0]',
        '[["list"]]',
        "99999999999999999999",
        '"\\x00"',
        "[" * 100_000,
    ],
    ids=lambda text: text[:30],
)
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(ValueFault):
        decode(text)


def refused(function: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ValueFault):
        function(value)


@pytest.mark.long
def test_sizes_are_bounded_before_they_cost_anything() -> None:
    colliding = [k * (2**61 - 1) for k in range(3000)]
    nested: Any = 1
    for _ in range(300):
        nested = [nested]
    cases: list[Any] = [set(colliding), dict.fromkeys(colliding), 2**500_000, nested, "x" * (MAX_TEXT + 1)]
    shared: Any = [0]
    for _ in range(40):
        shared = [shared, shared]
    cases.append(shared)
    for case in cases:
        _, seconds = timed(partial(refused, encode, case), 5.0)
        assert seconds < 5.0
    texts = [
        f'["set",{",".join(encode(each) for each in colliding)}]',
        '["int","0x' + "9" * 200_000 + '"]',
        '["list",' * 300 + "1" + "]" * 300,
        '"' + "x" * MAX_TEXT + '"',
    ]
    for text in texts:
        _, seconds = timed(partial(refused, decode, text), 5.0)
        assert seconds < 5.0


def test_a_value_that_contains_itself_is_rejected() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueFault):
        encode(loop)
