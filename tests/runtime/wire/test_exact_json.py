import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.equal_trees import same_tree

from kapelle.runtime.wire.exact_json import decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.sampled_from(["$tuple", "$float", "$items", "$", "$x"]) | st.integers()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


def through_text(value: object) -> Any:
    return decode(json.loads(json.dumps(encode(value, "value"), allow_nan=False)))


def same(a: object, b: object) -> bool:
    """Equality that tells 1 from 1.0 and True, -0.0 from 0.0, and a tuple from a list."""
    return same_tree(a, b, _same_leaf)


def _same_leaf(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return a == b


@given(values)
def test_values_return_with_their_types_and_order(value: object) -> None:
    assert same(through_text(value), value)


def test_what_json_can_hold_is_not_tagged() -> None:
    plain = {"answer": 42, "steps": ["48/2", 24.0, None, True]}
    assert encode(plain, "value") == plain


def test_the_forms_are_those_of_the_documentation() -> None:
    assert encode((1, 2), "value") == {"$tuple": [1, 2]}
    assert encode(-math.inf, "value") == {"$float": "-inf"}
    assert encode({1: "a"}, "value") == {"$items": [[1, "a"]]}
    assert encode({"$tuple": []}, "value") == {"$items": [["$tuple", []]]}


def test_not_a_number_returns_as_such() -> None:
    assert math.isnan(through_text([math.nan])[0])


def test_the_state_of_the_random_generator_returns_exactly() -> None:
    generator = random.Random(7)
    state = through_text(generator.getstate())
    ahead = [generator.random() for _ in range(5)]
    generator.setstate(state)
    assert [generator.random() for _ in range(5)] == ahead


def test_a_value_without_a_form_is_named_by_its_place() -> None:
    with pytest.raises(TypeError, match=r"info\.seen\.1 is a set"):
        encode({"seen": [1, {2}]}, "info")


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\$tensor"):
        decode({"$tensor": "policy/weight"})
