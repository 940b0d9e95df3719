from __future__ import annotations

import math
from typing import Any

import pytest
from tests.support.equal_trees import same_tree

from kapelle.environments.remote.messages import (
    from_message,
    from_task,
    from_value,
    to_message,
    to_task,
    to_value,
)
from kapelle.types import Message, Task
from kapelle.wire import environment_v1_pb2 as pb

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(10**40), 0.1, -0.0, 1e-320, math.inf, math.nan),
    *(
        "",
        "é\x00\U0001f600",
        [],
        (),
        {},
        [1, (2.0, [None])],
        {"b": 1, "a": {2: (), (1, "x"): "y", None: 0.5}},
    ),
]


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_nothing_is_lost(value: Any) -> None:
    sent = to_value(value, "it").SerializeToString()
    assert same_tree(from_value(pb.Value.FromString(sent)), value, same)


def test_tasks_and_messages_are_the_same_again() -> None:
    task = Task("train-3", "why?", {"answer": 10**30, "pair": (1, 2)}, "sums", system="Be brief.")
    assert from_task(to_task(task)) == task
    for message in (Message("user", "hi"), Message("user", "hi", ""), Message("assistant", "ho", "ann")):
        assert from_message(to_message(message)) == message


def test_what_has_no_form_is_named() -> None:
    deep: Any = 0
    for _ in range(31):
        deep = {"a": deep}
    for value, said in (
        ({"a": [object()]}, "it.a.0 is a object"),
        ("\udc80", "half a character"),
        (deep, "more than 30 levels deep"),
    ):
        with pytest.raises(TypeError, match=said):
            to_value(value, "it")
    pb.Value.FromString(to_value(deep["a"], "it").SerializeToString())


def test_a_message_that_no_value_has_is_refused() -> None:
    with pytest.raises(ValueError, match="digits"):
        from_value(pb.Value(large_integer="9" * 5000))
    unhashable = pb.Map(entries=[pb.Entry(key=pb.Value(list=pb.Values()), value=pb.Value())])
    with pytest.raises(ValueError, match="cannot be one"):
        from_value(pb.Value(map=unhashable))
